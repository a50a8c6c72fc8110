"""`pengserve init`: the deployment files and dashboards of the installed package, to edit."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from rich.console import Console

from pengserve.planners.types.errors import ConfigError

FOLDERS = ("deploy", "dashboards")
_SUFFIXES = (".yaml", ".yml", ".json", ".md")


def run_init(directory: Path) -> None:
    """Writes the files to `directory`/deploy and `directory`/dashboards.

    Raises:
        ConfigError: one of them is there already; nothing was written.
    """
    found = {Path(folder) / file.name: file for folder in FOLDERS for file in _shipped(folder)}
    taken = [path for path in found if (directory / path).exists()]
    if taken:
        raise ConfigError(f"{directory / taken[0]} exists already: name an empty directory, or remove the file")
    for path, file in found.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    console = Console(stderr=True)
    console.print(f"Wrote {len(found)} files to {directory}; each says at its head how to use it.", highlight=False)
    Console().print(f"pengserve up {directory / 'deploy' / 'laptop.yaml'}", soft_wrap=True, highlight=False)


def _shipped(folder: str) -> list[Traversable]:
    entries = files(f"pengserve.{folder}").iterdir()
    wanted = (entry for entry in entries if entry.name.endswith(_SUFFIXES) or entry.name == "Dockerfile")
    return sorted(wanted, key=lambda entry: entry.name)
