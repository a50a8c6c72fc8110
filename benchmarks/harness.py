"""What the benchmarks that serve a model have in common: engine flags, prompts, options, words to a person.

    options = option_parser("switch", __doc__).parse_args()     # --model, --output; each benchmark adds its own
    plan = Plan(model=options.model.resolve(), ...)             # with `engine=engine_flags(max_num_seqs=64)`
    if not has_model(plan.model, console):
        return 2
    with progress_bar(console) as progress: ...
    tell_written(console, write_result(options.output, "switch", today(), record, text))

`figures.py` takes latencies from answers; `client.py` sends requests; `result_files.py` writes what comes of it.
"""

import argparse
import datetime
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pengserve.cluster.demo.shipped import shipped_model

ROOT = Path(__file__).parents[1]
DEMO_MODEL = shipped_model()
RESULTS = ROOT / "benchmarks" / "results"
MIB = 1 << 20
CORE_TIMES = Path("/proc/stat")
_STEAL = 7  # place in its first line, after the name

_TEXT = (
    "the a parse string value of returns list module object file name when if number function with argument default "
    "call class error raised by method used for path to and or each line key index type not none true set option"
)


def engine_flags(**changes: Any) -> dict[str, Any]:
    """vLLM engine arguments that all benchmarks share; `changes` replace some or add others."""
    flags = {
        "dtype": "float32",
        "enforce_eager": True,
        "async_scheduling": False,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 256 * MIB,
        "block_size": 32,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
    }
    return flags | changes


def degrees(num_instances: int) -> tuple[int, ...]:
    """Sizes of the groups that so many instances can form."""
    return tuple(degree for degree in (2, 4, 8) if degree <= num_instances)


def text(source: random.Random, num_words: int) -> str:
    """Random words; one is 1.2 tokens of the demo model."""
    return " ".join(source.choices(_TEXT.split(), k=num_words))


def today() -> str:
    """The date of a result, in UTC."""
    return datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d")


def option_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Command line of `python -m benchmarks.NAME`, with the options that all have."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="model directory")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    return parser


def has_model(model: Path, console: Console) -> bool:
    """Whether there is a model in this folder; says what to do where there is none."""
    if (model / "config.json").exists():
        return True
    console.print(f"{model} holds no model: give another --model")
    return False


def progress_bar(console: Console) -> Progress:
    """A bar with a description, how many samples there are, and the time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def tell_written(console: Console, paths: Iterable[Path]) -> None:
    """Says where a result is."""
    for path in paths:
        console.print(f"wrote {path}", highlight=False)


class Stolen:
    """What share of this machine's core time its host gives to other machines, since it was made. Linux alone."""

    def __init__(self) -> None:
        self._before = _core_times()

    def share(self) -> float:
        """0 to 1; 0 where the kernel does not say. A run with more than a few percent says little."""
        spent = [after - before for before, after in zip(self._before, _core_times(), strict=True)]
        return spent[_STEAL] / max(1, sum(spent)) if len(spent) > _STEAL else 0.0


def _core_times() -> list[int]:
    """Ticks since the machine started, of all cores: user, nice, system, idle, iowait, irq, softirq, steal."""
    try:
        words = CORE_TIMES.read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return []
    return [int(word) for word in words[1 : _STEAL + 2]]
