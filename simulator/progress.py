"""How far a simulation is, on a terminal: virtual time, and requests that have ended. Elsewhere nothing is drawn."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pengserve.simulator.reports import words
from pengserve.simulator.run import Progress


class Advance:
    """What a simulation calls as it goes on."""

    def __init__(self, progress: bars.Progress, name: str) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=1.0, detail="")

    def __call__(self, now: Progress) -> None:
        """So much virtual time has passed, and so many requests have ended.

        The bar follows the slower of the two: under overload requests end long after the last one came.
        """
        by_time = min(1.0, now.at_s / now.span_s) if now.span_s > 0 else 1.0
        by_requests = now.num_ended / now.num_requests if now.num_requests else 1.0
        detail = f"{words.seconds(now.at_s)} simulated, {now.num_ended:,} of {now.num_requests:,} requests"
        self._progress.update(self._task, completed=min(by_time, by_requests), detail=detail)

    def done(self) -> None:
        """Fills the bar: the run has ended, also where requests are left."""
        self._progress.update(self._task, completed=1.0)


@contextmanager
def progress_on(console: Console) -> Iterator[bars.Progress]:
    """Bars on `console` until the end of the block; they vanish with it."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[detail]}"),
    )  # fmt: skip
    with bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
