"""Laws of the files that a benchmark leaves."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks import result_files
from benchmarks.result_files import facts_line, machine, machine_name, plan_data, table, versions, write_result


@dataclass(frozen=True)
class Level:
    clients: int


@dataclass(frozen=True)
class Plan:
    model: Path
    levels: tuple[Level, ...] = (Level(1), Level(8))
    engine: dict[str, Any] = field(default_factory=lambda: {"block_size": 32})


def test_a_result_is_a_record_and_a_text_of_one_name(tmp_path: Path) -> None:
    json_path, text_path = write_result(tmp_path / "new", "some", "2000-01-01", {"samples": [1]}, "# Some\n")
    assert json_path.with_suffix("") == text_path.with_suffix("")
    assert json_path.name == f"some-{machine_name()}-2000-01-01.json"
    assert text_path.read_text() == "# Some\n"


def test_a_record_begins_with_what_it_was_measured_on(tmp_path: Path) -> None:
    json_path, _ = write_result(tmp_path, "some", "2000-01-01", {"plan": {}, "samples": [1]}, "")
    record = json.loads(json_path.read_text())
    assert list(record) == ["date", "machine", "versions", "plan", "samples"]
    assert (record["date"], record["machine"], record["versions"]) == ("2000-01-01", machine(), versions())


def test_a_plan_is_recorded_whole_and_without_the_models_folder() -> None:
    assert plan_data(Plan(model=Path("/home/somebody/model"))) == {
        "model": "model",
        "levels": ({"clients": 1}, {"clients": 8}),
        "engine": {"block_size": 32},
    }


@pytest.mark.parametrize("num_words", [0, 1, 2, 3])
def test_a_table_has_a_line_for_each_row_and_numbers_to_the_right(num_words: int) -> None:
    heading, ruler, *rows = table(["a", "b", "c"], [["1", "2", "3"], ["4", "5", "6"]], num_words)
    assert (heading, rows) == ("| a | b | c |", ["| 1 | 2 | 3 |", "| 4 | 5 | 6 |"])
    assert ruler.strip("|").split("|") == ["---"] * num_words + ["---:"] * (3 - num_words)


def test_the_facts_name_every_one_of_machine_and_versions() -> None:
    assert facts_line().split("; ") == [f"{key}: {value}" for key, value in (machine() | versions()).items()]


@pytest.mark.parametrize(
    ("cpu", "name"),
    [
        ("Intel(R) Xeon(R) Platinum 8488C CPU @ 2.40GHz", "intel-xeon-platinum-8488c"),
        ("AMD EPYC 7B13 64-Core Processor", "amd-epyc-7b13-64-core"),
        ("Some.Thing/else", "some-thing-else"),
    ],
)
def test_a_machines_name_is_part_of_a_file_name(cpu: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_files, "cpu_model", lambda: cpu)
    monkeypatch.setattr(result_files.os, "cpu_count", lambda: 2)
    assert machine_name() == f"{name}-2c"
