"""What commands print on standard output: a value once, as JSON or as a view of it."""

import contextlib
import json
import sys
from collections.abc import Callable
from typing import IO, Any, TypeVar, cast

from rich.console import Console, RenderableType

from pengserve.planners.types.codec import to_data

T = TypeVar("T")


def output_console() -> Console:
    """Standard output, as wide as the terminal."""
    console = Console()
    # Into a pipe or a file, rich would wrap at 80 columns; tables that people grep stay on one line instead.
    return console if console.is_terminal else Console(width=200)


def error_console() -> Console:
    """Standard error for a command that must end what it began, even where its terminal is gone."""
    return Console(file=cast(IO[str], _Unbroken(sys.stderr)))


class _Unbroken:
    """A text stream that loses what cannot be written."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As a stream's; `len(text)` whether it was written or not."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As a stream's."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_value(value: T, view: Callable[[T], RenderableType], as_json: bool) -> None:
    """Print `value` as JSON, or what `view` makes of it."""
    if as_json:
        print(json.dumps(to_data(value), indent=2))
    else:
        output_console().print(view(value))
