"""Writes reports: a JSON file for each run, and one page."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.reports.html_report import write_page
from pengserve.simulator.reports.json_report import write_json
from pengserve.simulator.reports.runs import Run


def file_stem(name: str) -> str:
    """`name` as the first part of a file name: letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"


def check_folder(folder: Path) -> None:
    """Raise ConfigError where nothing can be written to `folder`: better now than after an hour. Creates nothing."""
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigError(f"cannot write to {folder}: {above} is no folder to write to; give another --output")


def save_run(run: Run, folder: Path) -> Path:
    """Writes NAME.json; its path.

    Raises:
        ConfigError: the folder cannot be written.
    """
    return _write(folder / f"{file_stem(run.title)}.json", write_json(run.result, run.figures))


def save_page(runs: Sequence[Run], folder: Path, name: str) -> Path:
    """Writes NAME.html, of all runs; its path.

    Raises:
        ConfigError: the folder cannot be written.
    """
    return _write(folder / f"{file_stem(name)}.html", write_page(runs))


def _write(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give another --output") from None
    return path
