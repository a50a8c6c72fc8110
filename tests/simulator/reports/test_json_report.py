"""Laws of the JSON file: the same bytes, the same run read back, one sentence for a wrong file."""

import json
from pathlib import Path

import pytest

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.reports.figures import figures_of
from pengserve.simulator.reports.json_report import read_json, write_json
from pengserve.simulator.result import Result
from tests.simulator.reports.results import large_result, result


def text_of(run: Result) -> str:
    return write_json(run, figures_of(run))


def test_the_same_result_gives_the_same_bytes() -> None:
    assert text_of(large_result(300, 120.0)) == text_of(large_result(300, 120.0))


def test_the_order_in_which_a_configuration_was_written_does_not_matter() -> None:
    one, other = ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1})
    assert text_of(result(config=one)) == text_of(result(config=other))


@pytest.mark.parametrize("run", [result(), result(outcomes=(), moments=(), events=()), large_result(200, 100.0)])
def test_what_is_read_back_is_what_was_written(tmp_path: Path, run: Result) -> None:
    path = tmp_path / "run.json"
    path.write_text(text_of(run))
    assert read_json(path) == run
    assert text_of(read_json(path)) == text_of(run)


def test_figures_stand_before_the_rows() -> None:
    data = json.loads(text_of(result()))
    assert list(data) == ["schema", "version", "figures", "result"]
    assert data["figures"]["ttft_s"]["p50"] == 0.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "no simulation"),
        ('{"schema": "other"}', "no simulation"),
        ('{"schema": "pengserve-simulation", "version": 99}', "version 99"),
        ('{"schema": "pengserve-simulation", "version": 1, "result": {"layouts": []}}', "moments"),
    ],
)
def test_a_wrong_file_is_named_in_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        read_json(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_columns_of_different_lengths_are_refused(tmp_path: Path) -> None:
    data = json.loads(text_of(result()))
    del data["result"]["outcomes"]["priority"][0]
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="outcomes has columns of different lengths"):
        read_json(tmp_path / "run.json")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.json"):
        read_json(Path("nowhere.json"))
