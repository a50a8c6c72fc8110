"""Draws docs/processes.svg, the processes of one application and what runs between them.

python docs/draw_processes.py            (or `make diagrams`)
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 960, 490
LINE_HEIGHT = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A process: title, what it does, and where it stands (pixels)."""

    title: str
    lines: tuple[str, ...]
    x: int
    y: int
    width: int
    height: int
    fill: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """What one process sends another, from point to point (pixels), with its label at `label_at`."""

    start: tuple[int, int]
    end: tuple[int, int]
    label: tuple[str, ...]
    label_at: tuple[int, int]
    dashed: bool = False


BOXES = (
    Box(title="Client", lines=("openai, curl,", "pengserve.client"), x=20, y=60, width=140, height=76, fill="#f5f5f5"),
    Box(title="HTTP proxy", lines=("HAProxy, or", "Serve's own"), x=240, y=60, width=130, height=76, fill="#e8f0fe"),
    Box(
        title="Ingress (Serve replica, N)",
        lines=(
            "vLLM's OpenAI layer, limits, keys,",
            "dispatcher, links; keeps each request's",
            "prompt and output tokens",
        ),
        x=450,
        y=50,
        width=290,
        height=96,
        fill="#e8f0fe",
    ),
    Box(
        title="Instance 0 (Ray actor, one GPU or CPU slot)",
        lines=("channel server, step loop, lanes over", "one copy of weights and KV: dp, tp2, ..."),
        x=60,
        y=320,
        width=330,
        height=80,
        fill="#e6f4ea",
    ),
    Box(
        title="Instance 1 (Ray actor)",
        lines=("the same, in its own placement group;", "more of them on more nodes"),
        x=430,
        y=320,
        width=280,
        height=80,
        fill="#e6f4ea",
    ),
    Box(
        title="Controller",
        lines=("deployment-scoped actor:", "observe, plan, act, log;", "routing table, events (JSONL)"),
        x=750,
        y=205,
        width=195,
        height=96,
        fill="#fef7e0",
    ),
)
ARROWS = (
    Arrow(start=(160, 98), end=(240, 98), label=("HTTP",), label_at=(200, 90)),
    Arrow(start=(370, 98), end=(450, 98), label=("HTTP",), label_at=(410, 90)),
    Arrow(
        start=(500, 146),
        end=(250, 320),
        label=("framed TCP, msgpack:", "requests one way,", "one token batch a step back"),
        label_at=(240, 200),
    ),
    Arrow(start=(570, 146), end=(570, 320), label=(), label_at=(0, 0)),
    Arrow(
        start=(390, 372),
        end=(430, 372),
        label=("peer TCP, between the members of a group:", "steps, activations, KV on a switch"),
        label_at=(410, 420),
    ),
    Arrow(
        start=(800, 205),
        end=(715, 146),
        label=("routing table (long poll),", "demands of requests"),
        label_at=(858, 165),
        dashed=True,
    ),
    Arrow(
        start=(790, 301),
        end=(710, 345),
        label=("to every instance:", "create, status, lease,", "peers, switches,", "drain, kill"),
        label_at=(855, 335),
        dashed=True,
    ),
)


def draw() -> str:
    """The whole drawing as SVG text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#444"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        '<text x="20" y="28" font-size="16" font-weight="bold">The processes of one PengServe application</text>',
        *(_arrow(arrow) for arrow in ARROWS),
        *(_box(box) for box in BOXES),
        f'<text x="20" y="{HEIGHT - 30}" fill="#444">Solid: the path of every token. Dashed: control, over Ray; '
        "serving goes on while it is interrupted.</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _box(box: Box) -> str:
    middle = box.x + box.width // 2
    lines = [
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="8" '
        f'fill="{box.fill}" stroke="#666"/>',
        f'<text x="{middle}" y="{box.y + 22}" text-anchor="middle" font-weight="bold">{escape(box.title)}</text>',
    ]
    lines += _text(box.lines, middle, box.y + 43)
    return "\n".join(lines)


def _arrow(arrow: Arrow) -> str:
    (x1, y1), (x2, y2) = arrow.start, arrow.end
    dash = ' stroke-dasharray="6 4"' if arrow.dashed else ""
    line = (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#444" stroke-width="1.5"{dash} '
        'marker-end="url(#tip)" marker-start="url(#tip)"/>'
    )
    return "\n".join([line, *_text(arrow.label, *arrow.label_at)])


def _text(lines: tuple[str, ...], x: int, y: int) -> list[str]:
    return [
        f'<text x="{x}" y="{y + LINE_HEIGHT * i}" text-anchor="middle" fill="#333">{escape(line)}</text>'
        for i, line in enumerate(lines)
    ]


if __name__ == "__main__":
    Path(__file__).with_name("processes.svg").write_text(draw())
