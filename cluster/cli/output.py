"""What commands print on standard output: a value once, as JSON or as a view of it."""

import json
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console, RenderableType

from pengserve.planners.types.codec import to_data

T = TypeVar("T")


def output_console() -> Console:
    """Standard output, as wide as the terminal."""
    console = Console()
    # Into a pipe or a file, rich would wrap at 80 columns; tables that people grep stay on one line instead.
    return console if console.is_terminal else Console(width=200)


def print_value(value: T, view: Callable[[T], RenderableType], as_json: bool) -> None:
    """Print `value` as JSON, or what `view` makes of it."""
    if as_json:
        print(json.dumps(to_data(value), indent=2))
    else:
        output_console().print(view(value))
