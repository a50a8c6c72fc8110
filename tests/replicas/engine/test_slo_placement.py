"""Laws of placements by SLOs, over vLLM's own scheduler and real tiers; time is virtual, and no model runs."""

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
from pengserve.planners.placement.latency import stall_s
from pengserve.planners.placement.solver import solve
from pengserve.planners.placement.values import Decode, Machine, PlacementConfig, Solution
from pengserve.planners.placement.worth import solve_where_it_pays
from pengserve.planners.preemption import QUANTUM_TOKENS
from pengserve.planners.types.contract import NO_CONTRACT, Contract, Slo
from pengserve.replicas.engine.placement.early_offload import EarlyOffload
from pengserve.replicas.engine.placement.placement_notes import PlacementNotes
from pengserve.replicas.engine.placement.placement_search import PlacementSearch, Searched
from pengserve.replicas.engine.placement.slo_placement import SloPlacement
from pengserve.replicas.engine.vllm_seam import Request
from tests.replicas.engine.test_residency import DEVICE, LAYERS, Engine
from tests.replicas.kv.tiered_world import BLOCK_SIZE
from tests.support.vllm_requests import scheduled_request
from tests.support.waiting import until

pytestmark = pytest.mark.slow

STEP_S = 0.02
CELL_BYTES = BLOCK_SIZE * 1024
FAST, SLOW = 1e6, 500.0  # cells a second: a step computes for 20,000 of them, and for 10


class Known:
    """The contracts of requests, all alike, and their deposits."""

    def __init__(self, slo_s: float | None) -> None:
        self.slo_s, self.num_paced, self.deposits = slo_s, 0, dict[str, int]()
        self.median_tokens = 0

    def contract(self, request_id: str) -> Contract:
        return (
            NO_CONTRACT if self.slo_s is None else Contract(slo=Slo(tbt_s=self.slo_s), median_tokens=self.median_tokens)
        )

    def deposit_tokens(self, request_id: str) -> int:
        return self.deposits.get(request_id, 0)


class AtOnce(PlacementSearch):
    """Ends within the step that it begins in, and takes no time."""

    def begin(self, requests: Sequence[Decode], machine: Machine, config: PlacementConfig, reason: str) -> None:
        self._under_way = Future()
        self._under_way.set_result(replace(self._run(requests, machine, config, reason), took_s=0.0))


class PlacedEngine(Engine):
    """Steps take what computing and waiting for copies takes, by the planner's own model of a link."""

    def __init__(self, cells_per_s: float, *, slo_s: float | None = 0.05, max_paused_s: float = 10.0) -> None:
        super().__init__()
        self.cells_per_s, self.known, self.notes = cells_per_s, Known(slo_s), PlacementNotes()
        self.world.tiers.engine.speed = lambda *, to_host: cells_per_s * CELL_BYTES  # type: ignore[method-assign]
        self.solver, self.token_s = solve_where_it_pays, 0.001
        self.placement = SloPlacement(
            self.handle,
            self.residency,
            self.known,
            self.notes,
            EarlyOffload(self.handle, self.residency, self.known, lambda num_tokens: self.token_s * num_tokens),
            config=PlacementConfig(max_paused_s=max_paused_s),
            search=AtOnce(lambda *given: self.solver(*given)),
            clock=lambda: self.now_s,
        )
        self.most_away = 0  # layers of a request
        self.most_decoding = 0
        self.pauses_s: list[float] = []

    def add(self, *lengths: int, max_tokens: int = 60) -> list[Request]:
        requests = [scheduled_request(str(i), length, max_tokens=max_tokens) for i, length in enumerate(lengths)]
        for request in requests:
            self.handle.add(request)
            self.known.num_paced += self.known.slo_s is not None
        return requests

    def step(self) -> None:
        self.num_steps += 1
        with self.placement.step() if self.placement.is_on else contextlib.nullcontext():
            self._choose()
        # The planner is told how fast the link is. How soon a thread of this machine gets a processor is no part of it.
        until(self._have_copies_ended, period_s=0.0002)

    def _have_copies_ended(self) -> bool:
        engine = self.world.tiers.engine
        with engine._changed:
            return not any(copy.is_ready for queue in engine._queues for copy in queue)

    def _choose(self) -> None:
        self.now_s += STEP_S
        with self.residency.choosing():
            self._step()
        self.pauses_s += [pause.seconds for pause in self.residency.take_pauses()]

    def _forward(self, ids: list[str], num_tokens: dict[str, int]) -> None:
        counts, before = self.world.tiers.counts, self.world.tiers.counts.stall_s
        placement = self.world.tiers.placement
        super()._forward(ids, num_tokens)
        if all(count == 1 for count in num_tokens.values()):
            self.most_decoding = max(self.most_decoding, len(ids))
        blocks = np.array([block for name in ids for block in self.handle.block_ids(name)])
        staged = [int((placement.index[layer, blocks] == 0).sum()) for layer in range(LAYERS)]
        waited_s = stall_s(staged, STEP_S / LAYERS, self.cells_per_s, max(placement.num_free, *staged))
        counts.stall_s = before + waited_s
        self.now_s += waited_s
        self.most_away = max([self.most_away, *(len(self.residency.layers.layers(name)) for name in ids)])

    def run(self, most: int = 4000) -> None:
        while self.handle.has_unfinished or self.residency.has_work():
            self.step()
            assert self.num_steps < most, "the requests do not come on"


def finished(engine: PlacedEngine, requests: list[Request], num_tokens: int = 60) -> None:
    assert [request.num_output_tokens for request in requests] == [num_tokens] * len(requests)
    assert {request.num_preemptions for request in requests} == {0}, "nothing is computed again"
    engine.world.close()


def test_over_a_fast_link_layers_are_away_and_all_go_on_together() -> None:
    engine = PlacedEngine(FAST)
    requests = engine.add(30, 30, 30, 30)
    engine.run()
    assert engine.placement.num_changes > 0 and engine.most_away > 0
    assert engine.most_decoding == 4, "more than the device holds in all layers"
    assert any(note.num_away and note.num_stepped for note in engine.notes.newest)
    finished(engine, requests)


def test_over_a_slow_link_no_layer_is_away_and_an_event_says_so() -> None:
    engine = PlacedEngine(SLOW)
    requests = engine.add(30, 30, 30, 30)
    engine.run()
    notes = [note for note in engine.notes.newest if note.num_paused]
    assert notes and all(note.num_away == 0 for note in engine.notes.newest)
    assert any("no layer away" in note.why for note in notes)
    assert engine.most_away == 0
    finished(engine, requests)


def test_without_an_slo_nothing_is_measured_and_nothing_changes() -> None:
    engine, plain = PlacedEngine(FAST, slo_s=None), Engine()
    requests, others = engine.add(30, 30, 30, 30), [scheduled_request(str(i), 30, max_tokens=60) for i in range(4)]
    for request in others:
        plain.handle.add(request)
    engine.run()
    while plain.handle.has_unfinished or plain.residency.has_work():
        plain.step()
    assert engine.num_steps == plain.num_steps
    assert engine.placement._figures._machine is None and engine.notes.newest == ()
    assert engine.world.tiers.counts.parks == plain.world.tiers.counts.parks > 0
    plain.world.close()
    finished(engine, requests)


@pytest.mark.parametrize("cells_per_s", [FAST, SLOW])
def test_a_search_that_fails_leaves_the_fallback(cells_per_s: float) -> None:
    engine = PlacedEngine(cells_per_s)

    def broken(requests: Sequence[Decode], machine: Machine, config: PlacementConfig) -> Solution:
        raise ZeroDivisionError("there are no cells")

    engine.solver = broken
    requests = engine.add(30, 30, 30, 30)
    engine.run()
    assert engine.placement.num_changes == 0
    failed = "the search failed (ZeroDivisionError: there are no cells)"
    assert any(failed in note.why for note in engine.notes.newest)
    assert engine.world.tiers.counts.parks > 0, "those that do not fit whole are paused"
    finished(engine, requests)


@pytest.mark.parametrize("device_blocks", [DEVICE, DEVICE - 3])
@pytest.mark.parametrize("cells_per_s", [FAST, SLOW])
def test_none_starves_also_where_only_one_fits(cells_per_s: float, device_blocks: int) -> None:
    """A request that was paused for `max_paused_s` goes on next, or after those that were paused for longer. So it is
    in a group, which has as many blocks as the smallest device of its members.
    """
    engine, limit_s = PlacedEngine(cells_per_s, slo_s=0.03, max_paused_s=0.5), 0.5
    engine.residency.limit(device_blocks)
    requests = engine.add(*[50] * 6, max_tokens=90)
    engine.run()
    turn = QUANTUM_TOKENS + PlacementConfig().min_window  # steps until another has its turn
    assert max(engine.pauses_s, default=0.0) <= limit_s + len(requests) * turn * STEP_S
    assert cells_per_s == FAST or engine.pauses_s
    finished(engine, requests, 90)


def test_who_has_tokens_in_store_is_paused_rather_than_others() -> None:
    engine = PlacedEngine(SLOW)
    requests = engine.add(30, 30, 30, 30)
    engine.known.deposits = {"1": 500}
    while not engine.residency.paused:
        engine.step()
    assert engine.residency.paused == {"1"}
    engine.run()
    finished(engine, requests)


def test_when_the_last_slo_has_gone_all_is_as_without() -> None:
    engine = PlacedEngine(FAST)
    requests = engine.add(30, 30, 30, 30)
    while not engine.most_away:
        engine.step()
    engine.known.num_paced, engine.known.slo_s = 0, None
    engine.step()
    assert not engine.placement.is_on and not len(engine.residency.layers) and not engine.residency.paused
    engine.run()
    finished(engine, requests)


def test_a_request_that_an_order_has_placed_is_left_alone() -> None:
    engine = PlacedEngine(FAST)
    requests = engine.add(30, 30, 30, 30)
    while engine.handle.prefilling_tokens() or engine.handle.queued_tokens():
        engine.step()
    engine.residency.place("2", [0, 1])
    for _ in range(20):
        engine.step()
        assert engine.residency.layers.layers("2") == (0, 1)
    engine.run()
    finished(engine, requests)


def reasons(engine: PlacedEngine, equation: str) -> list[str]:
    return [note.why for note in engine.notes.newest if equation in note.reason]


@pytest.mark.parametrize(
    ("cells_per_s", "median_tokens", "leaves"), [(FAST, 0, True), (SLOW, 0, False), (FAST, 20, False)]
)
def test_layers_leave_before_kv_is_short(cells_per_s: float, median_tokens: int, leaves: bool) -> None:
    """LayerKV Eq. 5: not where steps would wait for them, nor where the median says that requests end before."""
    engine = PlacedEngine(cells_per_s)
    engine.known.median_tokens = median_tokens
    requests = engine.add(30, 30, 30)
    while engine.num_steps < 12 and not engine.most_away:
        engine.step()
        assert not engine.placement._force, "KV is not short yet"
    assert bool(reasons(engine, "Eq. 5")) is leaves
    assert (engine.most_away > 0) is leaves
    engine.run()
    finished(engine, requests)


@pytest.mark.parametrize(("token_s", "layers"), [(0.001, 4), (0.0, 0)])
def test_layers_of_a_prompt_leave_while_it_is_computed(token_s: float, layers: int) -> None:
    """LayerKV Eq. 4: all of them where a prompt takes long enough, none where it takes no time."""
    engine = PlacedEngine(FAST)
    engine.token_s = token_s
    requests = engine.add(60, 60)
    for _ in range(12):
        engine.step()
    [late] = [scheduled_request("late", 90, max_tokens=60)]
    engine.handle.add(late)
    while not late.num_computed_tokens:
        engine.step()
    engine.step()
    assert late.num_computed_tokens < 90
    assert len(engine.residency.layers.layers("late")) == layers
    assert len(reasons(engine, "Eq. 4")) == (layers > 0)
    engine.run()
    finished(engine, [*requests, late])


def test_a_search_runs_beside_the_steps_and_may_fail_or_be_given_up() -> None:
    machine = Machine(num_layers=4, block_size=4, num_cells=400, step_s=0.01, context_s=0.0, cells_per_s=1e5)
    requests, answers = [Decode(request_id="a", num_tokens=40)], list[str]()
    may_go_on = threading.Event()

    def slow(*given: Any) -> Solution:
        assert may_go_on.wait(30.0)
        answers.append(threading.current_thread().name)
        return solve(*given)

    search = PlacementSearch(slow)
    search.begin(requests, machine, PlacementConfig(), "another batch")
    assert search.is_busy and search.take() is None, "nothing waits for it"
    may_go_on.set()
    found = list[Searched | None]()
    until(lambda: found.append(search.take()) or found[-1] is not None)  # type: ignore[func-returns-value]
    assert found[-1] is not None and found[-1].solution == solve(requests, machine)
    assert answers[0].startswith("placement") and not search.is_busy
    search.begin(requests, machine, PlacementConfig(), "another batch")
    search.close()
    assert not search.is_busy and search.take() is None


def test_who_has_come_back_keeps_its_place_for_a_while() -> None:
    engine = PlacedEngine(FAST)
    requests = engine.add(10, 10)
    while engine.num_steps < 5:
        engine.step()
    engine.residency.park(["0"])
    engine.step()
    engine.residency.resume(["0"])
    while "0" not in {request.request_id for request in engine.handle.running}:
        engine.step()
    seen = []
    for _ in range(QUANTUM_TOKENS + 2):
        engine.step()
        seen.append({r.request_id: r.may_pause for r in engine.placement._view.decodes({})})
    assert all(here["1"] for here in seen)
    assert [here["0"] for here in seen] == sorted(here["0"] for here in seen), "protected, and then as others"
    assert not seen[0]["0"] and seen[-1]["0"]
    engine.run()
    finished(engine, requests)
