"""Commands that floors beside this one bring: entry points of the group `pengserve.commands`, loaded when asked for.

    [project.entry-points."pengserve.commands"]
    profile = "pengserve.simulator.cli_profile:profile"

Each names a function as Typer takes it, in a module that imports nothing heavy before it is called.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from pengserve.planners.types.errors import ConfigError

GROUP = "pengserve.commands"


class Commands(TyperGroup):
    """The commands of this floor, then those of entry points. No entry point takes the name of a command here."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in the order in which `--help` shows them."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in sorted(_points()) if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; None where there is none.

        Raises:
            ConfigError: its module cannot be imported.
        """
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in _points():
            return own
        return _command(_points()[cmd_name])


@cache
def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _command(point: EntryPoint) -> Any:
    try:
        function = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the command {point.name} cannot be loaded from {point.value} ({error}): install its package again"
        ) from error
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command(point.name)(function)
    return typer.main.get_command(app)
