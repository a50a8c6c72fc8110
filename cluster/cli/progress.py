"""What a command waits for, one line a thing, with the time of each of its phases.

On a terminal the lines are redrawn with running times. Elsewhere a line is printed for each change, and at least every
`QUIET_S` seconds one that says what is still waited for: a log never stands still.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

QUIET_S = 5.0


@dataclass
class _Line:
    """One thing that is waited for."""

    state: str = "wait"  # "wait", "done" or "fail"
    text: str = ""
    phases: list[tuple[str, float]] = field(default_factory=list)  # what it did, and since when; the newest last

    def took(self, now_s: float) -> str:
        """How long each phase took until `now_s`."""
        ends_s = [since_s for _, since_s in self.phases[1:]] + [now_s]
        parts = [(text, end_s - since_s) for (text, since_s), end_s in zip(self.phases, ends_s, strict=True) if text]
        if len(parts) == 1:
            return f"{parts[0][1]:.1f} s"
        return ", ".join(f"{text} {seconds:.1f} s" for text, seconds in parts)


class Steps:
    """Things to wait for, in the order they were first named. A context manager: the drawing ends with it."""

    def __init__(
        self, console: Console, *, quiet_s: float = QUIET_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._quiet_s, self._now = console, quiet_s, now
        self._started_s = self._printed_s = now()
        self._lines: dict[str, _Line] = {}
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._table)
        self._reminder = threading.Thread(target=self._remind, name="progress", daemon=True)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first thing was waited for."""
        return self._now() - self._started_s

    def waiting(self, name: str, text: str) -> None:
        """`name` is under way; `text` says what it does: the name of a phase, whose time is shown at the end."""
        with self._lock:
            line = self._lines.setdefault(name, _Line())
            if line.state != "wait":
                line.phases.clear()  # it begins anew
            if not line.phases or line.phases[-1][0] != text:
                line.phases.append((text, self._now()))
            self._set(name, "wait", text)

    def done(self, name: str, text: str = "") -> None:
        """`name` is there."""
        with self._lock:
            line = self._lines.setdefault(name, _Line(phases=[("", self._started_s)]))
            if line.state != "done":
                took = line.took(self._now())
                self._set(name, "done", f"{text} ({took})".strip() if took else text)

    def failed(self, name: str, text: str) -> None:
        """`name` failed, perhaps to be tried again."""
        with self._lock:
            self._set(name, "fail", text)

    def __enter__(self) -> "Steps":
        if self._console.is_terminal:
            self._live.start()
        else:
            self._reminder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._console.is_terminal:
            self._live.stop()

    def _set(self, name: str, state: str, text: str) -> None:
        line = self._lines.setdefault(name, _Line())
        if (line.state, line.text) == (state, text):
            return
        line.state, line.text = state, text
        if not self._console.is_terminal:
            self._print(f"{name:<12} {text}")

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)
        self._printed_s = self._now()

    def _remind(self) -> None:
        while not self._is_over.wait(self._quiet_s / 10):
            with self._lock:
                left = [f"{name} ({line.text})" for name, line in self._lines.items() if line.state != "done"]
                if left and self._now() - self._printed_s >= self._quiet_s * 0.8:
                    self._print(f"{self.elapsed_s:5.0f} s      still waiting for {', '.join(left)}")

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        with self._lock:
            for name, line in self._lines.items():
                mark = {"done": Text("✓", "green"), "fail": Text("✗", "red")}.get(line.state)
                running = f" {self._now() - line.phases[-1][1]:.0f} s" if line.state == "wait" and line.phases else ""
                text = Text(line.text + running, "" if line.state == "done" else "dim")
                table.add_row(mark or Spinner("dots", style="cyan"), Text(name, "bold"), text)
        return table
