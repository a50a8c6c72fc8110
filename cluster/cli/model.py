"""`pengserve model`."""

import logging
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from pengserve.planners.types.errors import ConfigError

_INSTALL = "run `pip install 'pengserve[cpu]'` (or `[gpu]` on a machine with CUDA)"


def run_make_demo(directory: Path, seed: int) -> None:
    """Make the demo model in `directory`, with a bar for each phase and the loss of every hundredth step."""
    from pengserve.cluster.demo.make import make_demo

    console = Console(stderr=True)
    losses = logging.getLogger("pengserve.cluster.demo")
    losses.addHandler(RichHandler(console=console, show_time=False, show_level=False, show_path=False))
    losses.setLevel(logging.INFO)
    columns = (TextColumn("{task.description:<10}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks = {}

        def report(phase: str, done: float) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=1.0)
            progress.update(tasks[phase], completed=done)

        try:
            path = make_demo(directory, seed=seed, progress=report)
        except ImportError as error:
            raise ConfigError(f"making a model needs {error.name}, which is not installed: {_INSTALL}") from None
    console.print(f"The model is in {path}. Serve it:")
    Console().print(f"pengserve up --model {path}", soft_wrap=True, highlight=False)
