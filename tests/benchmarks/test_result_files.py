"""Laws of the files that a benchmark leaves."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import result_files
from benchmarks.result_files import (
    facts_line,
    machine,
    machine_name,
    plan_data,
    read_result,
    record_text,
    table,
    versions,
    write_result,
)


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
    record = read_result(json_path)
    assert list(record) == ["date", "machine", "versions", "plan", "samples"]
    assert (record["date"], record["machine"], record["versions"]) == ("2000-01-01", machine(), versions())


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        max_leaves=20,
    )
)
def test_a_record_is_read_as_it_was_but_for_digits_that_no_clock_has(tmp_path_factory: Any, value: Any) -> None:
    path = tmp_path_factory.mktemp("record") / "record.json"
    path.write_text(record_text({"value": value}))
    assert same(read_result(path)["value"], value)


def same(found: Any, value: Any) -> bool:
    """Whether both are equal, numbers to nine digits."""
    if isinstance(value, dict):
        return list(found) == list(value) and all(same(found[key], value[key]) for key in value)
    if isinstance(value, list):
        return len(found) == len(value) and all(map(same, found, value))
    if isinstance(value, float):
        return isinstance(found, float) and found == pytest.approx(value, rel=1e-8, abs=0)
    return type(found) is type(value) and bool(found == value)


def test_times_keep_their_microseconds_and_coefficients_nine_digits(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    times = {"at_s": 1_795_278_077.123456, "step_s": 2.123456789123e-08}
    path.write_text(record_text(times))
    assert read_result(path) == {"at_s": 1_795_278_077.123456, "step_s": 2.12345679e-08}


def test_rows_of_one_kind_name_their_fields_once() -> None:
    rows = [{"at_s": float(i), "longest_gap_s": 0.5} for i in range(100)]
    text = record_text({"rows": rows, "one": rows[:1], "deep": [{"a": [1]}, {"a": [2]}]})
    assert text.count("longest_gap_s") == 2
    assert '"deep":[{"a":[1]},{"a":[2]}]' in text


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
