"""How far a simulation is, on a terminal: virtual time, and requests that have ended. Elsewhere nothing is drawn."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pengserve.simulator.reports import words


class Advance:
    """What a simulation calls as it goes on."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=1.0, detail="")

    def __call__(self, now_s: float, end_s: float, num_ended: int, num_requests: int) -> None:
        """`now_s` of the `end_s` virtual seconds until the last arrival, and so many requests, have passed.

        The bar follows the slower of the two: under overload requests end long after the last one came.
        """
        by_time = min(1.0, now_s / end_s) if end_s > 0 else 1.0
        by_requests = num_ended / num_requests if num_requests else 1.0
        detail = f"{words.seconds(now_s)} simulated, {num_ended:,} of {num_requests:,} requests"
        self._progress.update(self._task, completed=min(by_time, by_requests), detail=detail)

    def done(self) -> None:
        """It has ended, whatever is left."""
        self._progress.update(self._task, completed=1.0)


@contextmanager
def progress_on(console: Console) -> Iterator[Progress]:
    """Bars on `console` until the end of the block; they vanish with it."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[detail]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
