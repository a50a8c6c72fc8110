"""`pengserve down`: drain and remove what `pengserve up --detach` or `serve deploy` left running."""

from rich.console import Console

from pengserve.client import PengServe, PengServeError
from pengserve.cluster.cli import ray_local


def run_down(app: str, url: str, admin_key: str | None, timeout_s: float) -> None:
    """Drain the application at `url`, then remove `app` from the Ray cluster with all it left there.

    An application that cannot be reached is removed without draining, and that is said. Where `app` does not run,
    nothing is drained: another application may answer at `url`.
    """
    console = Console(stderr=True)
    ray_local.join_ray()
    if ray_local.is_deployed(app):
        _drain(console, app, url, admin_key, timeout_s)
    else:
        console.print(f"No application {app!r} runs in this Ray cluster.", highlight=False)
    console.print("Removing what is there; Serve gives connections time to close.", highlight=False)
    num_left = ray_local.remove_application(app)
    console.print(
        f"Removed {app!r}" + (f" and {num_left} instances it had left." if num_left else "."), highlight=False
    )


def _drain(console: Console, app: str, url: str, admin_key: str | None, timeout_s: float) -> None:
    console.print(f"Draining {app!r}: running answers finish (at most {timeout_s:g} s).", highlight=False)
    with PengServe(url, admin_key=admin_key, cluster_id=ray_local.identity(app)) as client:
        try:
            if not client.drain(timeout_s):
                console.print(f"Some answers were not finished after {timeout_s:g} s.")
        except PengServeError as error:
            console.print(f"Not drained: {error}", soft_wrap=True, highlight=False)
