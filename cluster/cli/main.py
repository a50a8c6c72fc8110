"""The `pengserve` command: what each sub-command takes. The work is in the modules beside this one.

Those are imported inside the commands, so that `pengserve --help` costs neither rich tables nor httpx, Ray or vLLM.
Commands of other floors come through entry points (`commands.py`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pengserve.cluster.cli.commands import Commands
from pengserve.planners.types.errors import PengServeError
from pengserve.planners.types.strategy import SwitchStrategy as Strategy

app = typer.Typer(
    name="pengserve",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A cluster of vLLM instances behind one OpenAI API.\n\n"
    "Begin with `pengserve up --model demo`: it serves a small model that comes with PengServe.\n\n"
    "Something does not work? `pengserve doctor` looks at this machine and says what to do.",
)
model_app = typer.Typer(no_args_is_help=True, help="Make models to try PengServe with.")
app.add_typer(model_app, name="model")
layout_app = typer.Typer(invoke_without_command=True)
app.add_typer(layout_app, name="layout")
dashboards_app = typer.Typer(no_args_is_help=True, help="Grafana dashboards of the cluster.")
app.add_typer(dashboards_app, name="dashboards")

Url = Annotated[
    str, typer.Option("--url", envvar="PENGSERVE_URL", help="Address of the running application.", show_default=True)
]
AdminKey = Annotated[
    str | None,
    typer.Option("--admin-key", envvar="PENGSERVE_ADMIN_KEY", help="Key of the cluster routes.", show_default=False),
]
Config = Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file with settings.", show_default=False)]
DEFAULT_URL = "http://127.0.0.1:8000"


@app.command()
def up(
    config: Config = None,
    model: Annotated[
        str | None, typer.Option(help="Hugging Face model directory (or hub name).", show_default=False)
    ] = None,
    instances: Annotated[int | None, typer.Option(min=1, help="Number of instances.", show_default=False)] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="HTTP port.", show_default=False)] = None,
    host: Annotated[str | None, typer.Option(help="HTTP address to listen on.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.", show_default=False)] = None,
    proxy: Annotated[str | None, typer.Option(help="haproxy or serve.", show_default=False)] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Deploy onto the Ray cluster at RAY_ADDRESS and return.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds to wait for the first ready instance.")
    ] = 600,
) -> None:
    """Start instances and the OpenAI API, and stay until Ctrl-C.

    Ctrl-C (or SIGTERM, SIGHUP) lets running answers finish, then stops everything; a second signal stops at once.

    Settings come from CONFIG, then `PENGSERVE_` variables (`PENGSERVE_HTTP__PORT=9000`), then the options here.

    - `pengserve up --model demo`, the small model that comes with PengServe
    - `pengserve up --model ./my-model`
    - `pengserve up serve.yaml --instances 4 --port 9000`
    - `RAY_ADDRESS=auto pengserve up serve.yaml --detach`
    """
    from pengserve.cluster.cli.up import run_detached, run_foreground
    from pengserve.cluster.settings_sources import load_settings

    settings = load_settings(
        config,
        model=model,
        instances={"count": instances, "device": device},
        http={"port": port, "host": host, "proxy": proxy},
    )
    raise typer.Exit((run_detached if detach else run_foreground)(settings, timeout_s))


@app.command()
def down(
    application: Annotated[str, typer.Option("--app", help="Name of the application.")] = "pengserve",
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, help="Seconds that running answers may take.")] = 60,
) -> None:
    """Drain and remove an application from the Ray cluster at RAY_ADDRESS.

    For what `pengserve up --detach` or `serve deploy` started. A `pengserve up` in the foreground stops with Ctrl-C.
    """
    from pengserve.cluster.cli.down import run_down

    run_down(application, url, admin_key, timeout_s)


@app.command()
def drain(
    instance: Annotated[int, typer.Argument(min=0, help="Number of the instance, as `pengserve status` shows it.")],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return before it is over.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, max=3600, help="Seconds in which its requests may move or end.")
    ] = 60,
) -> None:
    """Empty one instance while the others serve, and keep its slot empty until `pengserve undrain`.

    Its running requests go on at other instances, with their KV. What cannot move within the time is sent again
    elsewhere. When the command ends, nothing of the instance is left, and its machine may be taken away.

    - `pengserve drain 1`
    """
    from pengserve.cluster.cli.drain import run_drain

    run_drain(url, admin_key, instance, timeout_s, not no_wait)


@app.command()
def undrain(
    instance: Annotated[int, typer.Argument(min=0, help="Number of the instance that was drained.")],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Start an instance again that was drained.

    - `pengserve undrain 1`
    """
    from pengserve.cluster.cli.drain import run_undrain

    run_undrain(url, admin_key, instance)


@app.command()
def status(
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole snapshot as JSON.")] = False,
) -> None:
    """Show the instances, where they run, and their load.

    - `pengserve status`
    - `pengserve status --json | jq '.instances[].stats'`
    """
    from pengserve.cluster.cli.watch import run_status

    run_status(url, admin_key, as_json)


@app.command()
def top(
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between frames.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    tenants: Annotated[bool, typer.Option("--tenants", help="By tenant and class instead.")] = False,
) -> None:
    """Watch instances, lanes, KV and weight memory, queues and tokens per second. Ctrl-C leaves."""
    from pengserve.cluster.cli.watch import run_top, run_top_tenants

    (run_top_tenants if tenants else run_top)(url, admin_key, interval_s, once)


@app.command()
def events(
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    after: Annotated[int, typer.Option(min=0, help="Leave out events up to this number.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay, and print events as they happen.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    why: Annotated[
        bool, typer.Option("--why", help="Decisions about the layout alone: all options, predictions, outcomes.")
    ] = False,
) -> None:
    """Show what happened in the cluster: instances started, lost and replaced, routes and layouts changed.

    - `pengserve events`
    - `pengserve events --why`
    - `pengserve events --follow --json >> events.jsonl`
    """
    from pengserve.cluster.cli.watch import run_events

    run_events(url, admin_key, after, follow, as_json, why)


@app.command()
def why(
    request_id: Annotated[str, typer.Argument(help="Its `x-request-id`, or the id in its answer.")],
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file whose logs are read.", show_default=False)
    ] = None,
    request_log: Annotated[
        Path | None, typer.Option(help="Request log, where no --config names it.", show_default=False)
    ] = None,
    event_log: Annotated[
        Path | None, typer.Option(help="Event log; else the running application is asked.", show_default=False)
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Tell the life of a request that has ended: where it ran, what moved it, what it waited for.

    Needs the setting `request_log`. Run it on the machine that has the file.

    - `pengserve why 3f2a9c --config serve.yaml`
    - `pengserve why 3f2a9c --request-log requests.jsonl --event-log events.jsonl`
    """
    from pengserve.cluster.cli.why import run_why
    from pengserve.cluster.settings_sources import load_settings
    from pengserve.planners.types.errors import ConfigError

    if config is not None:
        settings = load_settings(config)
        request_log = request_log or (Path(settings.request_log) if settings.request_log else None)
        event_log = event_log or (Path(settings.event_log) if settings.event_log else None)
    if request_log is None:
        raise ConfigError("name the request log: --request-log FILE, or --config with the setting request_log")
    run_why(request_id, request_log, event_log, url, admin_key)


@layout_app.callback()
def layout(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the layout as JSON.")] = False,
) -> None:
    """Show how the instances are grouped, what they could form, who decides, and the last switch.

    A group runs one shape: `dp` is an instance alone, `tp2` two instances that share each request's work. Running
    requests go on when the shape changes.

    - `pengserve layout`
    - `pengserve layout set tp2`
    - `pengserve layout auto`
    """
    if context.invoked_subcommand is None:
        from pengserve.cluster.cli.layout import run_layout

        run_layout(url, admin_key, as_json)


@layout_app.command("set")
def layout_set(
    layout: Annotated[str, typer.Argument(help="The layout, such as `dp`, `tp2`, or `'tp2@(0,1) dp@(2)'`.")],
    strategy: Annotated[
        Strategy, typer.Option(help="What becomes of running requests.", show_default=True)
    ] = Strategy.CARRY,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return before it has happened.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait for it.")] = 60,
) -> None:
    """Change the layout while the cluster serves, and keep it so until `pengserve layout auto`.

    - `pengserve layout set tp2`: every aligned pair of instances becomes a group; a rest stays alone
    - `pengserve layout set 'tp2@(0,1)'`: this pair, and all others alone; quote it, for the shell knows brackets too
    - `pengserve layout set 'tp4@(0..3) tp2@(4,5)'`: several groups
    - `pengserve layout set tp`: the widest groups there are
    - `pengserve layout set pp2`: every aligned pair becomes a pipeline, which has more room for KV; `pp` is the widest
    - `pengserve layout set dp`: every instance alone

    What becomes of running requests:

    - `carry`: their KV moves along and they go on in the new shape; no request waits longer than the switch
    - `hard`: on a merge they pause where they are and go on after the next split; on a split they are carried
    - `sequential`: they finish first, new ones wait for the new shape
    - `soft`: they finish first, idle members run new ones meanwhile
    """
    from pengserve.cluster.cli.layout import run_layout_set

    run_layout_set(url, admin_key, layout, strategy.value, not no_wait, timeout_s)


@layout_app.command("auto")
def layout_auto(url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Let the cluster choose its layout again, from load, priorities, long requests and memory.

    - `pengserve layout auto`
    """
    from pengserve.cluster.cli.layout import run_layout_auto

    run_layout_auto(url, admin_key)


@app.command()
def doctor(
    config: Config = None,
    model: Annotated[str | None, typer.Option(help="Model directory to look at.", show_default=False)] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="HTTP port to look at.", show_default=False)
    ] = None,
) -> None:
    """Look for what would keep PengServe from running here, and say what to do.

    Each line is ok, warn or fail. The exit code is 1 where one fails.

    - `pengserve doctor`
    - `pengserve doctor serve.yaml`
    """
    from pengserve.cluster.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(config, model, port))


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="Where to write the files.")],
) -> None:
    """Write the deployment files and dashboards into a directory, to edit: laptop, Ray cluster, Kubernetes, Grafana.

    - `pengserve init ./my-cluster && pengserve up ./my-cluster/deploy/laptop.yaml`
    """
    from pengserve.cluster.cli.init import run_init

    run_init(directory)


@dashboards_app.command("push")
def dashboards_push(
    grafana: Annotated[str, typer.Argument(metavar="URL", help="Address of Grafana, such as http://localhost:3000.")],
    backend: Annotated[
        list[str] | None, typer.Option(help="prometheus or ray, as `metrics.backend`; else both.", show_default=False)
    ] = None,
) -> None:
    """Send the dashboards to a Grafana server, with the service account's token in `GRAFANA_TOKEN`.

    Needs `pip install 'pengserve[grafana]'`. `pengserve init` writes the same files, to import by hand.

    - `GRAFANA_TOKEN=... pengserve dashboards push http://localhost:3000`
    """
    from pengserve.dashboards.push import run_push

    for address in run_push(grafana, backend or ()):
        typer.echo(address)


@model_app.command("make-demo")
def make_demo(
    directory: Annotated[Path, typer.Argument(help="Where to write the model.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and data order.")] = 0,
) -> None:
    """Train the demo model anew, on text found in every Python (37 minutes on two busy cores).

    `pengserve up --model demo` serves the one that comes with PengServe and needs no training. The result is an
    ordinary Hugging Face directory. A second run with the same seed returns at once.

    - `pengserve model make-demo ./my-demo && pengserve up --model ./my-demo`
    """
    from pengserve.cluster.cli.model import run_make_demo

    run_make_demo(directory, seed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with 0, with 1 and one sentence on stderr, or with 2 for wrong usage."""
    try:
        app(args=list(arguments) if arguments is not None else None)
    except PengServeError as error:
        typer.echo(f"pengserve: {error}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        # `pengserve events | head`: the pipe is closed. Python would complain again when it flushes at exit.
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
