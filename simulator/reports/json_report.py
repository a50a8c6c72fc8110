"""One run as one JSON file: figures to read, and the whole `Result` in columns, so that it can be compared later.

    {"schema": "pengserve-simulation", "version": 1, "figures": {...}, "result": {...}}

Keys stand in a fixed order and numbers are written in full: the same result gives the same bytes, and reading them back
gives the same result.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pengserve.planners.types.codec import from_data, to_data
from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.events import Event
from pengserve.simulator.reports.figures import Figures
from pengserve.simulator.requests import Outcome
from pengserve.simulator.result import Gaps, Moment, Result

SCHEMA, VERSION = "pengserve-simulation", 1


def write_json(result: Result, figures: Figures) -> str:
    """The text of the file.

    Raises:
        ValueError: a figure is not a number.
    """
    data = {"schema": SCHEMA, "version": VERSION, "figures": to_data(figures), "result": _result_data(result)}
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path) -> Result:
    """The run that `write_json` wrote to `path`.

    Raises:
        ConfigError: it cannot be read, or is no such file; names the file, and the field where one is wrong.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}): give a file that `pengserve simulate` wrote") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ConfigError(f"{path} is no simulation: give a JSON file that `pengserve simulate` or `replay` wrote")
    if data.get("version") != VERSION:
        raise ConfigError(
            f"{path} has version {data.get('version')!r} and this PengServe reads {VERSION}: run the simulation again"
        )
    try:
        return _result(data["result"])
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path}: result: {what}; run the simulation again") from None


def _result_data(result: Result) -> dict[str, Any]:
    layouts = list(dict.fromkeys(moment.groups for moment in result.moments))
    moments = _columns(Moment, result.moments)
    number_of = {groups: number for number, groups in enumerate(layouts)}
    moments["groups"] = [number_of[groups] for groups in moments["groups"]]
    return {
        "name": result.name,
        "policy": result.policy,
        "seed": result.seed,
        "config": _sorted(to_data(result.config)),
        "assumptions": list(result.assumptions),
        "end_s": result.end_s,
        "num_instances": result.num_instances,
        "outcomes": _columns(Outcome, result.outcomes),
        "layouts": layouts,  # what `moments.groups` counts
        "moments": moments,
        "gaps": to_data(result.gaps),
        "events": [{**to_data(event), "data": _sorted(to_data(event.data))} for event in result.events],
        "copied": [list(pair) for pair in result.copied],
        "instance_kv": [list(row) for row in result.instance_kv],
    }


def _result(data: Mapping[str, Any]) -> Result:
    layouts = [str(groups) for groups in data["layouts"]]
    moments = dict(data["moments"])
    moments["groups"] = [layouts[number] for number in moments["groups"]]
    return Result(
        name=str(data["name"]),
        policy=str(data["policy"]),
        seed=int(data["seed"]),
        config=dict(data["config"]),
        assumptions=tuple(str(words) for words in data["assumptions"]),
        end_s=data["end_s"],
        num_instances=int(data["num_instances"]),
        outcomes=_rows(Outcome, data["outcomes"], "outcomes"),
        moments=_rows(Moment, moments, "moments"),
        gaps=from_data(Gaps, data["gaps"]),
        events=tuple(from_data(Event, event) for event in data["events"]),
        copied=tuple((str(name), float(value)) for name, value in data.get("copied", ())),
        instance_kv=tuple(tuple(row) for row in data["instance_kv"]),
    )


def _columns(kind: type, rows: Sequence[Any]) -> dict[str, list[Any]]:
    """A list for each field: names once, and not once a row."""
    return {field.name: [getattr(row, field.name) for row in rows] for field in dataclasses.fields(kind)}


def _rows(kind: type, columns: Mapping[str, Sequence[Any]], where: str) -> tuple[Any, ...]:
    names = [field.name for field in dataclasses.fields(kind) if field.name in columns]
    lengths = {len(columns[name]) for name in names}
    if len(lengths) > 1:
        raise ValueError(f"{where} has columns of different lengths")
    return tuple(
        kind(**dict(zip(names, values, strict=True))) for values in zip(*(columns[name] for name in names), strict=True)
    )


def _sorted(value: Any) -> Any:
    """Keys of what users wrote, sorted, so that the order in which users wrote them does not matter."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value
