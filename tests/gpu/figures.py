"""Figures that tests on a GPU have taken, as a file that can be committed."""

import datetime
import os
from pathlib import Path

import torch

_figures: list[tuple[str, float, str]] = []


def note_figure(what: str, value: float, unit: str) -> None:
    """Keeps a figure and prints it. `$PENGSERVE_GPU_RESULT` names the file that all figures so far are written to."""
    _figures.append((what, value, unit))
    print(f"\n  {what}: {value:.4g} {unit}", flush=True)
    if path := os.environ.get("PENGSERVE_GPU_RESULT"):
        Path(path).write_text(report())


def report() -> str:
    """All figures as a table in Markdown."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    today = datetime.datetime.now(datetime.UTC).date()
    rows = "\n".join(f"| {what} | {value:.4g} {unit} |" for what, value, unit in _figures)
    return f"# {device}, torch {torch.__version__}, {today}\n\n| what | figure |\n|---|---|\n{rows}\n"
