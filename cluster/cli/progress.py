"""What `pengserve up` waits for, one line a thing: redrawn on a terminal, printed once a change elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text


class Steps:
    """Things to wait for, in the order they were first named. A context manager: the drawing ends with it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()
        self._lines: dict[str, tuple[str, str]] = {}  # name -> (state, text)
        self._live = Live(console=console, auto_refresh=True, refresh_per_second=8) if console.is_terminal else None

    def waiting(self, name: str, text: str) -> None:
        """`name` is under way; `text` says what it does."""
        self._set(name, "wait", text)

    def done(self, name: str, text: str = "") -> None:
        """`name` is there."""
        if self._lines.get(name, ("", ""))[0] != "done":
            self._set(name, "done", f"{text} ({time.monotonic() - self._started_s:.1f} s)".strip())

    def failed(self, name: str, text: str) -> None:
        """`name` failed, perhaps to be tried again."""
        self._set(name, "fail", text)

    def __enter__(self) -> "Steps":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.update(self._table())
            self._live.stop()

    def _set(self, name: str, state: str, text: str) -> None:
        if self._lines.get(name) == (state, text):
            return
        self._lines[name] = (state, text)
        if self._live:
            self._live.update(self._table())
        else:
            self._console.print(f"{name:<12} {text}", soft_wrap=True, highlight=False)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for name, (state, text) in self._lines.items():
            mark = {"done": Text("✓", "green"), "fail": Text("✗", "red")}.get(state) or Spinner("dots", style="cyan")
            table.add_row(mark, Text(name, "bold"), Text(text, "" if state == "done" else "dim"))
        return table
