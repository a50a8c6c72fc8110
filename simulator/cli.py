"""`pengserve simulate`, `replay` and `compare`: what they take. The work is in `commands.py`."""

from pathlib import Path
from typing import Annotated

import typer

Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the JSON files and the page.")]
Seed = Annotated[int | None, typer.Option(help="In place of the configuration's seed.", show_default=False)]
SloTtft = Annotated[
    float | None, typer.Option("--slo-ttft", min=0, help="Seconds: the limit at SLO scale 1.", show_default=False)
]
SloTpot = Annotated[
    float | None, typer.Option("--slo-tpot", min=0, help="Seconds a token: the same.", show_default=False)
]
SloTbt = Annotated[
    float | None, typer.Option("--slo-tbt", min=0, help="Seconds between two tokens: the same.", show_default=False)
]
Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", "-p", help="`NAME` or `NAME:option=value,...`; several are compared.", show_default=False),
]
Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace, or the request log of a real run.")]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML file with the cluster; its trace is not used.", show_default=False),
]
GpuName = Annotated[str | None, typer.Option(help="GPU of the catalog, such as a800 or h200.", show_default=False)]
ModelName = Annotated[str | None, typer.Option(help="Model of the catalog, such as qwen2.5-14b.", show_default=False)]
ProfileName = Annotated[
    str | None, typer.Option(help="In place of both: what `pengserve profile` measured.", show_default=False)
]
Instances = Annotated[int | None, typer.Option(min=1, help="Number of instances.", show_default=False)]
Degrees = Annotated[
    str | None, typer.Option(help="Tensor-parallel degrees that groups may have: `2,4`.", show_default=False)
]
MaxStages = Annotated[
    int | None, typer.Option(min=1, help="Most stages of a pipeline that drops parameters.", show_default=False)
]
HostBytes = Annotated[
    int | None, typer.Option(min=0, help="Memory of each instance's host for KV, in bytes.", show_default=False)
]
Scheduler = Annotated[
    str | None, typer.Option(help="auto, vllm (its own) or fast (equal decisions, for sweeps).", show_default=False)
]
EventLog = Annotated[
    Path | None, typer.Option(help="Event log of that real run: its layouts are shown.", show_default=False)
]
TraceFormat = Annotated[
    str | None, typer.Option(help="Format of the trace, where its header is not known.", show_default=False)
]
StepSeconds = Annotated[
    float | None,
    typer.Option("--step", min=0, help="Seconds of a decode step, for traces that count in steps.", show_default=False),
]
Window = Annotated[
    str | None, typer.Option(help="Part of it, in seconds since its start: `600:1200`.", show_default=False)
]
Scale = Annotated[
    float | None, typer.Option(min=0, help="So many times the requests, bursts kept.", show_default=False)
]
MaxRequests = Annotated[int | None, typer.Option(min=1, help="The first requests alone.", show_default=False)]
FileName = Annotated[
    str | None, typer.Option(help="Name of the files.  [default: that of the trace]", show_default=False)
]
DEFAULT_OUTPUT = Path("simulations")


def simulate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file with cluster, policy and trace.")],
    policy: Policies = None,
    seed: Seed = None,
    output: Output = DEFAULT_OUTPUT,
) -> None:
    """Run a cluster in virtual time, and write a page and a JSON file of what came of it.

    The production controller and planners and vLLM's scheduler run as they are; only the GPUs are a model. The same
    configuration and seed give the same files.

        cluster: {gpu: a800, model: qwen2.5-14b, instances: 8, max_stages: 4}

        policy: {name: pengserve}

        trace: {file: azure.csv, window: [600, 1200]}

    - `pengserve simulate cluster.yaml`
    - `pengserve simulate cluster.yaml -p vllm_dp -p vllm_tp:degree=4 -p pengserve`: one page, side by side
    """
    from pengserve.simulator.commands import run_simulate

    run_simulate(config, policies=policy or [], seed=seed, output=output)


def replay(
    trace: Trace,
    config: ClusterFile = None,
    gpu: GpuName = None,
    model: ModelName = None,
    profile: ProfileName = None,
    instances: Instances = None,
    degrees: Degrees = None,
    max_stages: MaxStages = None,
    host_bytes: HostBytes = None,
    policy: Policies = None,
    scheduler: Scheduler = None,
    events: EventLog = None,
    format: TraceFormat = None,
    step_s: StepSeconds = None,
    window: Window = None,
    scale: Scale = None,
    max_requests: MaxRequests = None,
    seed: Seed = None,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    slo_tbt: SloTbt = None,
    name: FileName = None,
    output: Output = DEFAULT_OUTPUT,
) -> None:
    """Replay a trace, or a real run, on a cluster in virtual time, under one policy or several.

    The formats of Azure, Mooncake, BurstGPT, ServeGen and others are known by their headers. A request log that
    PengServe wrote (the setting `request_log`) is shown as the run `real` beside the simulated ones; with its event log
    (`event_log`) so are its layouts.

    - `pengserve replay azure.csv --gpu a800 --model qwen2.5-14b --instances 8 -p vllm_dp -p pengserve`
    - `pengserve replay requests.jsonl --events events.jsonl --config cluster.yaml -p pengserve`: would dropping
      parameters have helped at 14:03?
    """
    from pengserve.simulator.commands import ReplayOptions, run_replay

    options = ReplayOptions(
        trace=trace, config=config, gpu=gpu, model=model, profile=profile, instances=instances, degrees=degrees,
        max_stages=max_stages, host_bytes=host_bytes, policies=tuple(policy or ()), scheduler=scheduler, events=events,
        format=format, step_s=step_s, window=window, scale=scale, max_requests=max_requests, seed=seed,
        slo_ttft_s=slo_ttft, slo_tpot_s=slo_tpot, slo_tbt_s=slo_tbt, name=name, output=output,
    )  # fmt: skip
    run_replay(options)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.json...", help="Files that `simulate` or `replay` wrote.")],
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    name: Annotated[str, typer.Option(help="Name of the page.")] = "comparison",
    output: Output = DEFAULT_OUTPUT,
) -> None:
    """Put runs side by side on one page, with ratios to the first.

    SLOs scale from the limits given here or in the first run's configuration, else from the lowest P50 of the runs that
    are not PengServe's.

    - `pengserve compare simulations/azure-vllm_dp.json simulations/azure-pengserve.json`
    """
    from pengserve.simulator.commands import run_compare

    run_compare(runs, slo_ttft_s=slo_ttft, slo_tpot_s=slo_tpot, name=name, output=output)
