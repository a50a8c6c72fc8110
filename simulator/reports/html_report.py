"""One page for one run or several: everything is inside it, nothing is fetched, and it follows the reader's theme."""

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files

import yaml

from pengserve.planners.types.codec import to_data
from pengserve.simulator.reports import panels, words
from pengserve.simulator.reports.decisions import decisions
from pengserve.simulator.reports.runs import Run
from pengserve.simulator.reports.tables import FigureRow, headline_rows, rows

Legend = Sequence[tuple[str, str]]  # (colour, words)

DROPPED_WORDS = (panels.DROPPED, "parameters dropped")


def write_page(runs: Sequence[Run]) -> str:
    """The page's text: of one run, or of several with ratios to the first. The same runs give the same bytes."""
    names = [run.title for run in runs]
    title = names[0] if len(runs) == 1 else " against ".join(names) if len(runs) == 2 else "Comparison of runs"
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(_subtitle(runs))}</p></header>",
        _headline(runs),
        _memory(runs),
        _layout(runs),
        _ttft(runs),
        _layouts(runs),
        decisions(runs),
        _slo(runs),
        _queues(runs),
        _table("figures", "Figures", "Beside a value, its ratio to the first run's.", rows(), runs),
        _assumptions(runs),
        _config(runs),
        "<footer>Made by PengServe's simulator. The same configuration and seed give the same page.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_css()}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


@cache
def _css() -> str:
    return files(__package__).joinpath("page.css").read_text(encoding="utf-8")


def _subtitle(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs, compared with {runs[0].title}"
    result = runs[0].result
    instances = f"{result.num_instances} instance{'s' if result.num_instances != 1 else ''}"
    arrived = words.count(len(result.outcomes))
    lasted = words.seconds(result.end_s)
    return f"policy {result.policy}, {instances}, {arrived} requests in {lasted}, seed {result.seed}"


def _headline(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return _table("headline", "Headline", "Beside a value, its ratio to the first run's.", headline_rows(), runs)
    figures = runs[0].figures
    cards = [
        f'<div class="card"><b>{escape(row.show(row.get(figures)))}</b><span>{escape(row.title)}</span></div>'
        for row in headline_rows()
        if row.get(figures) is not None
    ]
    return "\n".join(['<section id="headline" class="cards">', *cards, "</section>"])


def _memory(runs: Sequence[Run]) -> str:
    legend = [(panels.DEMAND, "demand: what all requests in flight would hold"), (panels.USED, "in use")]
    legend += [(panels.CAPACITY, "room (dashed)"), DROPPED_WORDS]
    return _section(
        "memory", "Memory over time (tokens of KV)", "Demand above the room is overload.", legend,
        _each(runs, [panels.memory(run, runs) for run in runs]),
    )  # fmt: skip


def _layout(runs: Sequence[Run]) -> str:
    legend = [(panels.shape_color(shape), _shape_words(shape)) for shape in panels.shapes_of(runs)]
    many = any(run.result.num_instances > panels.MOST_LANES for run in runs)
    text = "The share of instances in each shape." if many else "A lane an instance, the first on top; groups are one."
    found = _section(
        "layout", "Layout over time", text, legend, _each(runs, [panels.layout(run, runs) for run in runs])
    )
    charts = [panels.instance_kv(run, runs) for run in runs]
    if not any(charts):
        return found
    fifth = 100 // panels.KV_LEVELS
    steps = [(f"var(--kv{level})", f"{fifth * level}-{fifth * (level + 1)} %") for level in range(panels.KV_LEVELS)]
    text = "One lane an instance, the first on top; the fullest moment of each interval."
    return found + "\n" + _section("instances", "KV in use by instance", text, steps, _each(runs, charts))


def _ttft(runs: Sequence[Run]) -> str:
    text = "A dot for each request, at the time it arrived. The axis is logarithmic."
    over_time = _each(runs, [panels.ttft_over_time(run, runs) for run in runs])
    found = _section("ttft", "Time to first token (TTFT) over time", text, [DROPPED_WORDS], over_time)
    text = "The share of requests (of gaps, for the time between tokens) that took at most so long."
    charts = [
        ("TTFT", panels.ttft_distribution(runs)),
        ("Time per output token (TPOT)", panels.tpot_distribution(runs)),
        ("Time between tokens (TBT)", panels.tbt_distribution(runs)),
    ]
    return found + "\n" + _section("latency", "Latency distributions", text, _run_legend(runs), _pair(charts))


def _slo(runs: Sequence[Run]) -> str:
    base = runs[0].figures.slo_base
    charts = [("Share of requests within the limits", panels.slo(runs)), ("Goodput (requests/s)", panels.goodput(runs))]
    if base is None:
        return ""
    if base.tbt_s is not None:
        charts.append(("Share of gaps between tokens within the limit", panels.tbt(runs)))
    given = (("TTFT", base.ttft_s), ("TPOT", base.tpot_s), ("TBT", base.tbt_s))
    limits = ", ".join(f"{name} {words.seconds(limit)}" for name, limit in given if limit is not None)
    text = f"Limits at scale 1: {limits} ({base.source}). What was refused or never ended is outside."
    return _section("slo", "SLO attainment over scale", text, _run_legend(runs), _pair(charts))


def _queues(runs: Sequence[Run]) -> str:
    legend = [(panels.RUNNING, "running"), (panels.WAITING, "waiting at instances")]
    legend += [(panels.UNPLACED, "waiting at the ingress"), DROPPED_WORDS]
    return _section(
        "queues", "Requests in flight over time", "", legend, _each(runs, [panels.queues(run, runs) for run in runs])
    )


def _layouts(runs: Sequence[Run]) -> str:
    lines = []
    for run in runs:
        layouts = run.figures.layouts[:8]
        cells = "".join(
            f"<tr><td>{escape(found.layout)}</td><td>{words.seconds(found.seconds)}</td></tr>" for found in layouts
        )
        more = len(run.figures.layouts) - len(layouts)
        cells += f"<tr><td>and {more} more</td><td></td></tr>" if more else ""
        heading = f"<h3>{escape(run.title)}</h3>" if len(runs) > 1 else ""
        lines.append(f"<div>{heading}<table><thead><tr><th>layout</th><th>time</th></tr></thead>"
                     f"<tbody>{cells}</tbody></table></div>")  # fmt: skip
    return _section("layouts", "Time in each layout", "", (), f'<div class="pair">{"".join(lines)}</div>')


def _table(name: str, title: str, text: str, table: Sequence[FigureRow], runs: Sequence[Run]) -> str:
    figures = [run.figures for run in runs]
    head = "".join(f"<th>{escape(run.title)}</th>" for run in runs)
    lines, part = [f"<thead><tr><th></th>{head}</tr></thead><tbody>"], ""
    for row in table:
        if all(row.get(one) is None for one in figures):
            continue
        if row.part and row.part != part:
            lines.append(f'<tr><th colspan="{len(runs) + 1}">{escape(row.part)}</th></tr>')
        part = row.part
        cells = "".join(
            f"<td>{escape(value)}{f'<small>{escape(ratio)}</small>' if len(runs) > 1 else ''}</td>"
            for value, ratio in row.cells(figures)
        )
        lines.append(f"<tr><td>{escape(row.title)}</td>{cells}</tr>")
    text = text if len(runs) > 1 else ""
    return _section(name, title, text, (), f'<div class="scroll"><table>{"".join(lines)}</tbody></table></div>')


def _assumptions(runs: Sequence[Run]) -> str:
    shared = [words for words in runs[0].result.assumptions if all(words in run.result.assumptions for run in runs)]
    found = _list(shared)
    for run in runs:
        own = [words for words in run.result.assumptions if words not in shared]
        found += f"<h3>{escape(run.title)} alone</h3>{_list(own)}" if own else ""
    return _section("assumptions", "Assumptions", "" if found else "None were recorded.", (), found)


def _config(runs: Sequence[Run]) -> str:
    blocks = []
    for run in runs:
        text = yaml.safe_dump(to_data(run.result.config), sort_keys=True, allow_unicode=True, width=100)
        state = " open" if len(runs) == 1 and len(text) < 6000 else ""
        blocks.append(f"<details{state}><summary>{escape(run.title)}</summary><pre>{escape(text)}</pre></details>")
    return _section("config", "Configuration", "", (), "".join(blocks))


def _section(name: str, title: str, text: str, legend: Legend, content: str) -> str:
    note = f"<p>{escape(text)}</p>" if text else ""
    items = "".join(f'<li><i style="background:{color}"></i>{escape(label)}</li>' for color, label in legend)
    items = f'<ul class="legend">{items}</ul>' if items else ""
    return f'<section id="{name}">\n<h2>{escape(title)}</h2>\n{note}{items}\n{content}\n</section>'


def _each(runs: Sequence[Run], charts: Iterable[str]) -> str:
    """A chart for each run, under its name where there are several."""
    found = []
    for run, chart in zip(runs, charts, strict=True):
        if chart:
            found.append((f"<h3>{escape(run.title)}</h3>" if len(runs) > 1 else "") + _chart(chart))
    return "\n".join(found)


def _chart(svg: str) -> str:
    return f'<div class="chart">{svg}</div>'


def _pair(charts: Sequence[tuple[str, str]]) -> str:
    """Titled charts, side by side where there is room."""
    boxes = (f'<div><h3>{escape(title)}</h3><div class="narrow">{svg}</div></div>' for title, svg in charts if svg)
    return f'<div class="pair">{"".join(boxes)}</div>'


def _run_legend(runs: Sequence[Run]) -> Legend:
    return [(panels.run_color(index), run.title) for index, run in enumerate(runs)] if len(runs) > 1 else ()


def _list(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>" if sentences else ""


def _shape_words(shape: str) -> str:
    if shape == "dp":
        return "dp: alone"
    return f"{shape}: {'tensor-parallel group' if shape.startswith('tp') else 'pipeline'} of {shape[2:]}"
