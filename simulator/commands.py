"""What `pengserve simulate`, `replay` and `compare` do: read, simulate, write reports, print the headline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from pengserve.controller.collector import spare_the_loop
from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.config import ClusterConfig, SimulationConfig
from pengserve.simulator.progress import Advance, progress_on
from pengserve.simulator.replay import is_request_log, read_events, read_request_log, real_result
from pengserve.simulator.reports.json_report import read_json
from pengserve.simulator.reports.runs import Run, runs_of
from pengserve.simulator.reports.save import check_folder, save_page, save_run
from pengserve.simulator.reports.slo import SloBase
from pengserve.simulator.reports.terminal import headline_table
from pengserve.simulator.result import Result
from pengserve.simulator.run import simulate

MOST_DEFAULT_STAGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What `pengserve replay` was given; None: not."""

    trace: Path
    config: Path | None = None
    gpu: str | None = None
    model: str | None = None
    profile: str | None = None
    instances: int | None = None
    degrees: str | None = None
    max_stages: int | None = None
    host_bytes: int | None = None
    policies: tuple[str, ...] = ()
    scheduler: str | None = None
    events: Path | None = None
    format: str | None = None
    step_s: float | None = None
    window: str | None = None
    scale: float | None = None
    max_requests: int | None = None
    seed: int | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_tbt_s: float | None = None
    name: str | None = None
    output: Path = Path("simulations")


def run_simulate(path: Path, *, policies: Sequence[str], seed: int | None, output: Path) -> None:
    """`pengserve simulate`.

    Raises:
        ConfigError: names the file and field that cannot be used.
    """
    config = SimulationConfig.load(path)
    check_folder(output)
    data = config.model_dump() | {"folder": path.parent}
    if seed is not None:
        data["seed"] = seed
    name = path.stem if "name" not in config.model_fields_set else config.name
    _finish(_simulated(_variants(data, name, policies, str(path))), name, output)


def run_replay(options: ReplayOptions) -> None:
    """`pengserve replay`.

    Raises:
        ConfigError: names the file, option or field that cannot be used.
    """
    name = options.name or options.trace.name.removesuffix(".gz").rsplit(".", 1)[0]
    check_folder(options.output)
    configs = _variants(_replay_data(options), name, options.policies, str(options.config or ""))
    real = _real(options)
    results = [*real, *_simulated(configs)]
    _finish(results, name, options.output, _base(options.slo_ttft_s, options.slo_tpot_s, options.slo_tbt_s))


def run_compare(
    paths: Sequence[Path], *, slo_ttft_s: float | None, slo_tpot_s: float | None, name: str, output: Path
) -> None:
    """`pengserve compare`.

    Raises:
        ConfigError: a file is no run; names it.
    """
    check_folder(output)
    results = [read_json(path) for path in paths]
    names = [result.name for result in results]
    if len(set(names)) < len(names):  # two folders may hold runs of one name
        results = [replace(result, name=str(path)) for result, path in zip(results, paths, strict=True)]
    runs = runs_of(results, _base(slo_ttft_s, slo_tpot_s))
    _show(runs, [save_page(runs, output, name)])


def policy_of(text: str) -> dict[str, Any]:
    """`NAME` or `NAME:option=value,...` as the `policy` section of a configuration.

    Raises:
        ConfigError: an option has no value.
    """
    name, _, rest = text.partition(":")
    options = {}
    for part in filter(None, rest.split(",")):
        key, is_given, value = part.partition("=")
        if not is_given:
            raise ConfigError(f"--policy {text}: write options as NAME:option=value,option=value")
        options[key.strip()] = yaml.safe_load(value)
    return {"name": name.strip(), "options": options}


def window_of(text: str) -> tuple[float, float]:
    """`600:1200` as numbers.

    Raises:
        ConfigError: it has another form.
    """
    start, is_given, stop = text.partition(":")
    try:
        found = (float(start), float(stop))
    except ValueError:
        found = (0.0, 0.0)
    if not is_given or not 0 <= found[0] < found[1]:
        raise ConfigError(f"--window {text}: write START:STOP in seconds since the trace's start, such as 600:1200")
    return found


def _replay_data(options: ReplayOptions) -> dict[str, Any]:
    """The configuration that the options describe."""
    data: dict[str, Any] = {"cluster": {}}
    if options.config is not None:
        data = SimulationConfig.load(options.config).model_dump() | {"folder": options.config.parent}
    given = {
        "gpu": options.gpu,
        "model": options.model,
        "profile": options.profile,
        "instances": options.instances,
        "degrees": _degrees_of(options.degrees),
        "max_stages": options.max_stages,
        "host_bytes": options.host_bytes,
    }
    # A profile stands in place of a GPU and a model: what is given here leaves the file's other way out.
    others = ("gpu", "model") if options.profile else ("profile",) if options.gpu or options.model else ()
    kept = {key: value for key, value in data["cluster"].items() if key not in others}
    cluster = {**kept, **{key: value for key, value in given.items() if value is not None}}
    if options.config is None and options.max_stages is None and not options.host_bytes:
        widest = int(cluster.get("instances", ClusterConfig.model_fields["instances"].default))
        cluster["max_stages"] = min(MOST_DEFAULT_STAGES, 1 << (widest.bit_length() - 1))
    trace = {
        "file": str(options.trace.absolute()),
        "format": options.format,
        "step_s": options.step_s,
        "window": list(window_of(options.window)) if options.window else None,
        "upscale": options.scale,
        "max_requests": options.max_requests,
    }
    slo = {"ttft_s": options.slo_ttft_s, "tpot_s": options.slo_tpot_s, "tbt_s": options.slo_tbt_s}
    more = {"scheduler": options.scheduler, "seed": options.seed}
    return {
        **data,
        **{key: value for key, value in more.items() if value is not None},
        "cluster": cluster,
        "trace": {key: value for key, value in trace.items() if value is not None},
        "slo": {**data.get("slo", {}), **{key: value for key, value in slo.items() if value is not None}},
    }


def _degrees_of(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in filter(None, text.split(","))]
    except ValueError:
        raise ConfigError(f"--degrees {text}: write numbers with commas between them, such as 2,4") from None


def _variants(data: Mapping[str, Any], name: str, policies: Sequence[str], source: str) -> list[SimulationConfig]:
    """One configuration for each policy; each run is named after it where there are several."""
    if not policies:
        return [SimulationConfig.parse({**data, "name": name}, source)]
    return [
        SimulationConfig.parse(
            {**data, "name": name if len(policies) == 1 else f"{name}-{text}", "policy": policy_of(text)}, source
        )
        for text in dict.fromkeys(policies)
    ]


def _real(options: ReplayOptions) -> list[Result]:
    """The real run, where the trace is its request log and is replayed as it was."""
    is_whole = options.scale in (None, 1.0) and options.max_requests is None
    if not is_request_log(options.trace):
        if options.events is not None:
            raise ConfigError(
                f"--events belongs to a request log of PengServe, and {options.trace} is none: leave it out"
            )
        return []
    if not is_whole:
        Console(stderr=True).print("The real run is left out: --scale and --max-requests change what arrived.")
        return []
    events = read_events(options.events) if options.events is not None else ()
    window = window_of(options.window) if options.window else None
    return [real_result(read_request_log(options.trace), events, window=window)]


def _simulated(configs: Sequence[SimulationConfig]) -> list[Result]:
    spare_the_loop()  # the process is this command's
    results = []
    with progress_on(Console(stderr=True)) as progress:
        for config in configs:
            advance = Advance(progress, config.name)
            results.append(simulate(config, on_progress=advance))
            advance.done()
    return results


def _finish(results: Sequence[Result], name: str, output: Path, base: SloBase | None = None) -> None:
    runs = runs_of(results, base)
    paths = [save_run(run, output) for run in runs if run.result.policy != "real" or len(runs) > 1]
    _show(runs, [*paths, save_page(runs, output, name)])


def _show(runs: Sequence[Run], paths: Sequence[Path]) -> None:
    console = Console()
    # Into a pipe or a file, rich would wrap at 80 columns; tables that people grep stay on one line instead.
    wide = console if console.is_terminal else Console(width=max(80, 40 + 30 * len(runs)))
    wide.print(headline_table(runs))
    for path in paths:
        Console(stderr=True).print(str(path), soft_wrap=True, highlight=False)


def _base(ttft_s: float | None, tpot_s: float | None, tbt_s: float | None = None) -> SloBase | None:
    if ttft_s is None and tpot_s is None and tbt_s is None:
        return None
    return SloBase(ttft_s=ttft_s, tpot_s=tpot_s, tbt_s=tbt_s, source="the command line")
