"""Workloads and outcomes as files of JSON lines, in forms that other tools read too (docs/workloads.md).

trace.jsonl      timestamp (ms), input_length, output_length, hash_ids: what Mooncake's traces have. Read by aiperf
                 (`--custom-dataset-type mooncake_trace`) and by `vllm bench serve --dataset-name timed_trace`.
requests.jsonl   the same requests, line by line, with tenant, session, turn and priority
updates.jsonl    timestamp (ms), session, priority
plan.json        what they were made of
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.fair.workload import Plan, Turn, Update, Workload, make

TRACE, REQUESTS, UPDATES, PLAN = "trace.jsonl", "requests.jsonl", "updates.jsonl", "plan.json"


def write(directory: Path, plan: Plan) -> Workload:
    """Makes the workload of a plan and writes it."""
    found = make(plan)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / PLAN).write_text(json.dumps(asdict(plan), indent=1) + "\n")
    _write(directory / TRACE, (_trace(turn) for turn in found.turns))
    _write(directory / REQUESTS, (_trace(turn) | _marks(turn) for turn in found.turns))
    _write(directory / UPDATES, (_update(update) for update in found.updates))
    return found


def read(directory: Path) -> tuple[Plan, Workload]:
    """What `write` wrote.

    Raises:
        ValueError: a file is missing, or is not such a file.
    """
    try:
        plan = Plan(**json.loads((directory / PLAN).read_text()))
        turns = tuple(_turn(row) for row in rows(directory / REQUESTS))
        updates = tuple(
            Update(at_s=row["timestamp"] / 1e3, session=row["session"], priority=row["priority"])
            for row in rows(directory / UPDATES)
        )
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{directory} has no workload: {error}") from error
    return plan, Workload(turns=turns, updates=updates)


def rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def _write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _trace(turn: Turn) -> dict[str, Any]:
    return {
        "timestamp": round(turn.at_s * 1e3, 1),
        "input_length": turn.input_length,
        "output_length": turn.output_length,
        "hash_ids": list(turn.hash_ids),
    }


def _marks(turn: Turn) -> dict[str, Any]:
    return {"tenant": turn.tenant, "session": turn.session, "turn": turn.turn, "priority": turn.priority}


def _update(update: Update) -> dict[str, Any]:
    return {"timestamp": round(update.at_s * 1e3, 1), "session": update.session, "priority": update.priority}


def _turn(row: Mapping[str, Any]) -> Turn:
    given = {field.name: row[field.name] for field in fields(Turn) if field.name not in ("at_s", "hash_ids")}
    return Turn(at_s=row["timestamp"] / 1e3, hash_ids=tuple(row["hash_ids"]), **given)
