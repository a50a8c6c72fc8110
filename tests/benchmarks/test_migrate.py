"""Laws of the migration benchmark's figures, and one small run of it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.harness import engine_flags
from benchmarks.migrate import report
from benchmarks.migrate.link import bytes_per_s, shape_of
from benchmarks.migrate.measure import DRAIN, ONE, Plan, Sample, measure
from benchmarks.result_files import read_result
from tests.support.models import tiny_model

PLAN = Plan(model=Path("model"))
SAMPLE = Sample(
    what=DRAIN,
    repetition=0,
    num_streams=16,
    num_moved=16,
    moved_bytes=32 << 20,
    moving_s=0.03,
    done_s=0.5,
    need_s=0.02,
    gap_s=0.05,
    quiet_gap_s=0.03,
    step_s=0.01,
)


def test_the_aims_are_two_steps_and_one_and_a_half_times_the_need() -> None:
    assert report.is_within_aim(SAMPLE)  # 30 + 2 * 10 ms
    assert not report.is_within_aim(replace(SAMPLE, gap_s=0.0501))
    assert report.is_within_aim(replace(SAMPLE, gap_s=None)) is None
    late = replace(SAMPLE, moving_s=0.031, num_moved=15)
    sentences = " ".join(report.aims([SAMPLE, late]))
    assert "none fails: 1 of 2" in sentences and "need alone: 1 of 2" in sentences


def test_a_row_has_a_cell_for_each_heading_and_takes_repetitions_together() -> None:
    samples = [SAMPLE, replace(SAMPLE, moving_s=0.05), replace(SAMPLE, what=ONE, done_s=0.0, gap_s=None)]
    one, drain = report.rows(samples)
    assert len(one) == len(drain) == len(report.HEADING)
    assert drain[5] == "40.0 / 50.0" and one[7] == one[8] == "-"


def test_a_result_can_be_read_and_names_what_failed(tmp_path: Path) -> None:
    samples = [SAMPLE, replace(SAMPLE, repetition=1, errors=("lost",))]
    json_path, text_path, picture = report.write(tmp_path, PLAN, samples, 1e9, "2000-01-01")
    assert read_result(json_path)["samples"] == json.loads(json.dumps([asdict(s) for s in samples]))
    assert "drain of an instance, repetition 1: lost" in text_path.read_text()
    assert picture.read_text().count("drain ") == 2 and picture.read_text().endswith("</svg>\n")


@pytest.mark.slow
def test_the_link_is_measured_with_the_models_blocks() -> None:
    shape = shape_of(tiny_model(), engine_flags(), 4 << 20)
    assert shape.num_bytes <= 4 << 20 < shape.num_bytes + shape.num_bytes // shape.num_blocks
    assert bytes_per_s(shape) > 1 << 20


@pytest.mark.validation
def test_a_small_run_moves_every_stream() -> None:
    plan = Plan(model=tiny_model(), repetitions=1, drains=1, streams=2, prompt_words=60, output_tokens=400)
    samples: list[Sample] = []
    measure(plan, samples.append)
    assert [sample.what for sample in samples] == [ONE, DRAIN]
    assert report.failures(samples) == []
    assert all(sample.num_moved == sample.num_streams > 0 and sample.gap_s for sample in samples)
