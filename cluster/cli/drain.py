"""`pengserve drain` and `undrain`: one instance leaves while the others serve, and comes back."""

from rich.console import Console

from pengserve.client import PengServe
from pengserve.cluster.cli.output import output_console
from pengserve.cluster.cli.progress import Steps


def run_drain(url: str, admin_key: str | None, instance_id: int, timeout_s: float, wait: bool) -> None:
    """Empty an instance; with `wait`, until nothing of it is left.

    Raises:
        PengServeAPIError: it was refused. PengServeTimeoutError: it takes much longer than `timeout_s`.
    """
    with PengServe(url, admin_key=admin_key) as client:
        name = f"drain instance {instance_id}"
        if not wait:
            operation = client.drain_instance(instance_id, timeout_s, wait=False)
            _print(f"{name}: {operation.phase.value}, {operation.num_left} requests left")
            return
        with Steps(Console(stderr=True)) as steps:
            steps.waiting(name, "its requests move to other instances")
            operation = client.drain_instance(instance_id, timeout_s)
            steps.done(name, "nothing of it is left")
    _print(f"instance {operation.key} may be deleted; `pengserve undrain {instance_id}` starts it again")


def run_undrain(url: str, admin_key: str | None, instance_id: int) -> None:
    """Let a drained slot be filled again. Raises PengServeAPIError."""
    with PengServe(url, admin_key=admin_key) as client:
        client.undrain(instance_id)
    _print(f"instance {instance_id} starts again; `pengserve status` shows when it is ready")


def _print(text: str) -> None:
    output_console().print(text, soft_wrap=True, highlight=False, markup=False)
