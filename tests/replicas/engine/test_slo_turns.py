"""Laws of pauses by SLOs in a pipeline, over vLLM's own scheduler and real host rows; time is virtual."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")
from pengserve.planners.placement.values import PlacementConfig
from pengserve.planners.preemption import QUANTUM_TOKENS
from pengserve.replicas.engine.placement.placement_notes import PlacementNotes
from pengserve.replicas.engine.placement.slo_turns import SloTurns
from pengserve.replicas.engine.vllm_seam import Request
from tests.replicas.engine.test_slo_placement import Known
from tests.replicas.engine.test_swapping import STAGES_IN_FLIGHT, Pipeline, a_request

pytestmark = pytest.mark.slow

STEP_S = 0.05  # of `Pipeline`
SLO_S = 0.1
MAX_PAUSED_S = 2.0


class PacedPipeline(Pipeline):
    """Copies take no virtual time, so that a slow machine changes nothing."""

    def __init__(self, *, slo_s: float | None = SLO_S, by_slo: bool = True) -> None:
        super().__init__()
        self.known, self.notes = Known(slo_s), PlacementNotes()
        self.pauses_s: list[float] = []
        self.most_away = 0
        config = PlacementConfig(lead_steps=4, max_paused_s=MAX_PAUSED_S)
        if by_slo:
            self.parked.order = SloTurns(
                self.handle, self.parked, self.known, self.notes, lambda: STEP_S, config=config
            )

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.handle.add(request)
            self.known.num_paced += self.known.slo_s is not None

    def step(self) -> None:
        super().step()
        self.pauses_s += [pause.seconds for pause in self.parked.take_pauses()]
        self.most_away = max(self.most_away, len(self.parked.parked))

    def run_member(self, number: int, is_alone: bool, *microbatch: Any) -> None:
        super().run_member(number, is_alone, *microbatch)
        self.members[number].host.settle()

    def until_away(self) -> set[str]:
        while not self.away():
            self.step()
        return self.away()

    def away(self) -> set[str]:
        return {request.request_id for request in self.parked.parked if self.parked.rows_of(request)}


@pytest.fixture
def pipeline() -> Iterator[PacedPipeline]:
    pipeline = PacedPipeline()
    yield pipeline
    pipeline.close()


def growing(count: int, max_tokens: int = 150) -> list[Request]:
    """All begin at once, and in the end the devices hold one of them."""
    return [a_request(str(i), [3 + i] * 5, max_tokens) for i in range(count)]


def finished(requests: list[Request]) -> None:
    assert {request.num_preemptions for request in requests} == {0}, "nothing is computed again"
    assert {request.num_output_tokens for request in requests} == {150}


@pytest.mark.parametrize("count", [2, 3, 6])
def test_none_is_paused_for_longer_than_the_bound(pipeline: PacedPipeline, count: int) -> None:
    """10 s, and a turn for each other one. By age the youngest would wait until all others have ended."""
    requests = growing(count)
    pipeline.add(*requests)
    pipeline.run(40_000)
    turn = (2 * QUANTUM_TOKENS) * STAGES_IN_FLIGHT
    assert pipeline.most_away == count - 1
    assert MAX_PAUSED_S / 2 < max(pipeline.pauses_s) <= MAX_PAUSED_S + count * turn * STEP_S
    finished(requests)


def test_who_has_tokens_in_store_is_paused_rather_than_others(pipeline: PacedPipeline) -> None:
    requests = growing(4)
    pipeline.add(*requests)
    pipeline.known.deposits = {"0": 500}
    assert pipeline.until_away() == {"0"}, "the oldest, which is the last one by age"


def test_of_those_with_tokens_in_store_the_one_with_the_most_kv_is_paused(pipeline: PacedPipeline) -> None:
    requests = [a_request("0", [3] * 5, 95), a_request("1", [4] * 60, 95), a_request("2", [5] * 5, 95)]
    pipeline.add(*requests)
    pipeline.known.deposits = dict.fromkeys("012", 100)
    assert pipeline.until_away() == {"1"}


def test_another_makes_way_when_a_deposit_is_nearly_spent(pipeline: PacedPipeline) -> None:
    requests = growing(3)
    pipeline.add(*requests)
    pipeline.known.deposits = {"0": 500}
    pipeline.until_away()
    for _ in range(4):
        pipeline.step()
        assert "0" in pipeline.away()
    pipeline.known.deposits = {"0": 2, "1": 400, "2": 400}
    for _ in range(2 * STAGES_IN_FLIGHT):
        pipeline.step()
    assert "0" not in pipeline.away() and pipeline.away()
    assert "nearly spent" in pipeline.notes.newest[-1].reason
    pipeline.known.deposits = {}
    pipeline.run(40_000)
    finished(requests)


def test_none_makes_way_where_all_would_notice(pipeline: PacedPipeline) -> None:
    requests = growing(3)
    pipeline.add(*requests)
    pipeline.known.deposits = {"0": 500}
    pipeline.until_away()
    pipeline.known.deposits = {"0": 2}
    for _ in range(10):
        pipeline.step()
        assert "0" in pipeline.away()
    assert not pipeline.notes.newest


def test_without_an_slo_nothing_changes() -> None:
    found = []
    for by_slo in (False, True):
        pipeline = PacedPipeline(slo_s=None, by_slo=by_slo)
        requests = growing(6, 120)
        pipeline.add(*requests)
        seen = []
        while pipeline.handle.has_unfinished or pipeline.parked.has_work() or pipeline.in_flight:
            pipeline.step()
            seen.append((tuple(sorted(pipeline.away())), tuple(r.num_output_tokens for r in requests)))
        found.append(seen)
        assert not pipeline.notes.newest
        pipeline.close()
    assert found[0] == found[1]
    assert any(away for away, _ in found[0])
