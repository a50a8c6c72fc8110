"""Simulations of a recorded run of vLLM under overload: TTFT, TPOT and the KV in use are within 15 %."""

import pytest

from benchmarks.validation.recorded_run import FOLDER, RecordedRun, compare, replay
from pengserve.simulator.result import Result

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the recorded run is not here")


@pytest.fixture(scope="module")
def run() -> RecordedRun:
    return RecordedRun.read()


def assert_near(run: RecordedRun, result: Result) -> None:
    missed = [f"{figure.what}: {figure.error:+.1%}" for figure in compare(run, result) if not figure.is_met]
    assert not missed


def test_the_fast_scheduler_comes_within_the_bars(run: RecordedRun) -> None:
    assert_near(run, replay(run, "fast"))


@pytest.mark.validation
def test_vllm_s_scheduler_comes_within_the_bars(run: RecordedRun) -> None:
    assert_near(run, replay(run, "vllm"))


def test_what_was_assumed_is_said(run: RecordedRun) -> None:
    assert any("RTX-4090" in sentence for sentence in replay(run, "fast").assumptions)


def test_memory_of_another_size_is_noticed(run: RecordedRun) -> None:
    result = replay(run, "fast", kv_tokens=2 * 41_392)
    assert not all(figure.is_met for figure in compare(run, result))
