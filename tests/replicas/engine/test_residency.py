"""Laws of parked requests over vLLM's own scheduler and real tiers, without a model."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("vllm")
from pengserve.planners.preemption import QUANTUM_TOKENS
from pengserve.replicas.engine.scheduling.scheduler_handle import is_prefilling
from pengserve.replicas.engine.tiers.lane_tiers import LaneTiers
from pengserve.replicas.engine.tiers.residency import ResidentRequests
from tests.replicas.kv.tiered_world import BLOCK_SIZE, TieredWorld
from tests.support.vllm_requests import scheduled_request
from tests.support.vllm_schedulers import capacity_of, give_tokens, scheduler_handle

pytestmark = pytest.mark.slow

LAYERS, DEVICE, HOST, RESERVED = 4, 40, 200, 12


class Engine:
    """A scheduler, tiers and the choice between them. Each step gives each request that it computes a token."""

    def __init__(self, host: int = HOST, *, max_seqs: int = 16, by_priority: bool = False) -> None:
        self.world = TieredWorld(LAYERS, DEVICE, host, RESERVED)
        num_blocks = self.world.num_blocks - 1
        capacity = capacity_of(
            num_blocks, BLOCK_SIZE, max_num_seqs=max_seqs, max_model_len=min(160, num_blocks * BLOCK_SIZE)
        )
        self.handle = scheduler_handle(
            capacity, max_num_batched_tokens=32, policy="priority" if by_priority else "fcfs"
        )
        self.world.tiers.watch_uses(self.handle.uses)
        self.now_s = 0.0
        self.residency = ResidentRequests(
            self.handle, LaneTiers(self.world.tiers), max(0, num_blocks - host), self, lambda: self.now_s
        )
        self.num_steps = self.num_choices = 0

    def num_used(self) -> int:
        return self.handle.num_blocks - 1 - self.handle.num_free()

    def num_available(self) -> int:
        return self.handle.num_free()

    def moved_bytes(self) -> int:
        return sum(self.world.tiers.engine.moved_bytes.values())

    def end(self, name: str) -> None:
        """As `Lane.abort`."""
        self.handle.end([name])
        self.residency.forget([name])

    def step(self) -> None:
        """As `DpLane.step`, every 50 ms."""
        self.num_steps += 1
        self.now_s += 0.05
        with self.residency.choosing():
            self._step()
        self.num_choices += self.residency.has_chosen

    def _step(self) -> None:
        output = self.handle.schedule()
        ids = list(output.num_scheduled_tokens)
        if ids:
            self._forward(ids, output.num_scheduled_tokens)
        give_tokens(self.handle, output)

    def _forward(self, ids: list[str], num_tokens: dict[str, int]) -> None:
        tiers = self.world.tiers
        stops = np.array([self.handle.request(name).num_computed_tokens for name in ids])  # vLLM has counted the step
        starts = stops - np.array([num_tokens[name] for name in ids])
        counts = -(-stops // BLOCK_SIZE)
        tables = np.zeros((len(ids), int(counts.max())), dtype=np.int32)
        for row, name in enumerate(ids):
            tables[row, : counts[row]] = self.handle.block_ids(name)[: counts[row]]
        step = tiers.begin_step(tables, counts, starts)
        if step is not None and step.waits:
            for layer in range(LAYERS):
                tiers.wait_layer(layer)
                tiers.read_layer(layer)
            tiers.end_step()
        assert tiers.check() == ()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.world.close()


def run(engine: Engine, most: int = 5000) -> None:
    while engine.handle.has_unfinished or engine.residency.has_work():
        engine.step()
        assert engine.num_steps < most, "the requests do not come on"


def test_requests_of_several_times_the_device_all_end_without_recompute(engine: Engine) -> None:
    rng = random.Random(1)
    requests = [scheduled_request(str(i), rng.choice([5, 30, 90]), max_tokens=60) for i in range(12)]
    for request in requests:
        engine.handle.add(request)
    run(engine)
    assert [request.num_output_tokens for request in requests] == [60] * 12
    assert {request.num_preemptions for request in requests} == {0}
    swapped_bytes = sum(pause.swapped_bytes for pause in engine.residency.take_pauses())
    assert 0 < swapped_bytes <= engine.moved_bytes(), "what was copied for pauses, and nothing twice"
    assert engine.world.tiers.counts.parks > 0 and engine.residency.num_given_up == 0
    assert engine.num_choices < engine.num_steps, "while nothing changes, the choice stands"


def test_parked_by_an_order_means_until_an_order(engine: Engine) -> None:
    for name in "ab":
        engine.handle.add(scheduled_request(name, 10, max_tokens=20))
    engine.step()
    assert engine.residency.park(["a", "unknown"]) == ["a"]
    run(engine)
    assert engine.handle.knows("a") and not engine.handle.knows("b") and engine.residency.num_parked() == 1
    assert engine.residency.resume(["a"]) == ["a"]
    run(engine)
    assert not engine.handle.knows("a")


def test_a_pause_tells_what_was_copied_for_it(engine: Engine) -> None:
    requests = [scheduled_request(name, 40, max_tokens=60) for name in "abcd"]
    engine.handle.add(requests[0])
    for _ in range(5):
        engine.step()
    engine.residency.park(["a"])
    engine.residency.resume(["a"])
    engine.step()
    (unmoved,) = engine.residency.take_pauses()
    assert unmoved.request is requests[0] and unmoved.swapped_bytes <= engine.moved_bytes()
    engine.residency.park(["a"])
    for request in requests[1:]:
        engine.handle.add(request)
    run(engine)
    full = requests[0].num_computed_tokens // BLOCK_SIZE
    assert engine.world.tiers.num_away(np.array(engine.handle.block_ids("a")[:full])) > 0, "the others took its cells"
    engine.residency.resume(["a"])
    run(engine)
    pauses = engine.residency.take_pauses()
    (own,) = [pause for pause in pauses if pause.request is requests[0]]
    assert own.swapped_bytes >= full * engine.world.tiers.pool.block_bytes, "it came back"
    assert sum(pause.swapped_bytes for pause in (unmoved, *pauses)) <= engine.moved_bytes()


def test_a_parked_request_that_is_aborted_is_gone(engine: Engine) -> None:
    engine.handle.add(scheduled_request("a", 10, max_tokens=20))
    engine.step()
    engine.residency.park(["a"])
    engine.end("a")
    assert engine.residency.num_parked() == 0 and not engine.residency.has_work()


def test_a_request_that_comes_again_under_its_id_is_not_parked(engine: Engine) -> None:
    """As one that migrates away while it is parked, and back: no step may be between."""
    engine.handle.add(scheduled_request("a", 10, max_tokens=20))
    engine.step()
    engine.residency.park(["a"])
    engine.residency.place("a", [0])
    engine.end("a")
    again = scheduled_request("a", 10, max_tokens=20)
    engine.handle.add(again)
    assert not engine.residency.is_ordered(again) and engine.residency.parked_s(again) is None
    assert not engine.residency.layers.is_ordered("a") and not engine.residency.let_go(again)


def test_where_the_host_is_full_the_youngest_gives_up_its_kv() -> None:
    engine = Engine(host=20)
    requests = [scheduled_request(str(i), 40, max_tokens=60) for i in range(6)]
    for request in requests:
        engine.handle.add(request)
    run(engine)
    assert [request.num_output_tokens for request in requests] == [60] * 6
    assert sum(request.num_preemptions for request in requests) > 0
    assert requests[0].num_preemptions == 0, "the oldest goes on"
    engine.world.close()


def test_an_urgent_request_takes_a_place_at_once_and_nothing_is_computed_again() -> None:
    engine = Engine(max_seqs=2, by_priority=True)
    calm = [scheduled_request(name, 10, max_tokens=60) for name in "ab"]
    for request in calm:
        engine.handle.add(request)
    for _ in range(10):
        engine.step()
    urgent = scheduled_request("urgent", 10, max_tokens=20)
    urgent.priority = -1
    engine.handle.add(urgent)
    for _ in range(3):
        engine.step()
    assert urgent.num_output_tokens > 0 and engine.world.tiers.counts.displaced == 1
    assert engine.residency.num_parked() == 1
    run(engine)
    assert [request.num_output_tokens for request in (*calm, urgent)] == [60, 60, 20]
    assert {request.num_preemptions for request in (*calm, urgent)} == {0}
    assert engine.world.tiers.counts.displaced == 1, "it came back once"
    engine.world.close()


def test_a_parked_request_does_not_starve_behind_urgent_ones_that_never_end() -> None:
    engine = Engine(max_seqs=2, by_priority=True)
    calm = scheduled_request("calm", 10, max_tokens=60)
    engine.handle.add(calm)
    for _ in range(5):
        engine.step()
    for index in range(400):
        if index % 10 == 0:  # of 20 tokens each: two at a time, for ever
            urgent = scheduled_request(f"urgent{index}", 10, max_tokens=20)
            urgent.priority = -1
            engine.handle.add(urgent)
        engine.step()
        if calm.num_output_tokens == 60:
            break
    assert calm.num_output_tokens == 60 and calm.num_preemptions == 0
    assert engine.world.tiers.counts.displaced > 2, "it went to and fro, a quantum at a time"
    engine.world.close()


def test_a_request_that_comes_back_to_a_full_device_has_its_turn_there() -> None:
    """Places are there for all, and KV of some of the urgent ones alone: it would leave again with the next step."""
    engine = Engine(600, by_priority=True)
    calm = scheduled_request("calm", 10, max_tokens=60)
    engine.handle.add(calm)
    for _ in range(5):
        engine.step()
    for index in range(3000):
        while len(engine.handle.requests()) < 9:
            urgent = scheduled_request(f"urgent{index}.{len(engine.handle.requests())}", 60, max_tokens=60)
            urgent.priority = -1
            engine.handle.add(urgent)
        engine.step()
        if calm.num_output_tokens == 60:
            break
    assert calm.num_output_tokens == 60 and calm.num_preemptions == 0
    pauses = [pause for pause in engine.residency.take_pauses() if pause.request is calm]
    assert 1 < len(pauses) <= 1 + 60 // QUANTUM_TOKENS, "a turn is as many tokens; one pause is before the first"
    engine.world.close()


def test_while_requests_wait_for_memory_others_are_stepped_without_a_new_choice() -> None:
    """Places are free, so that one could begin with any step if there were room."""
    engine = Engine(600, by_priority=True)
    for index in range(12):
        request = scheduled_request(str(index), 60, max_tokens=60)
        request.priority = index // 4
        engine.handle.add(request)
    num_still = 0  # steps in which requests wait for memory, and none that runs has a prompt or begins a block
    while engine.handle.has_unfinished or engine.residency.has_work():
        waits = bool(engine.handle.waiting and engine.handle.new_slots and engine.handle.running)
        begins = [r.num_computed_tokens % BLOCK_SIZE == 0 or is_prefilling(r) for r in engine.handle.running]
        engine.step()
        num_still += waits and not any(begins)
    assert num_still > 0.3 * engine.num_steps
    assert engine.num_choices < 0.6 * engine.num_steps
    engine.world.close()


def test_where_requests_begin_as_they_come_nothing_gives_way() -> None:
    engine = Engine(max_seqs=2)
    for name in "abc":
        engine.handle.add(scheduled_request(name, 10, max_tokens=30))
    engine.handle.request("c").priority = -1
    run(engine)
    assert engine.world.tiers.counts.displaced == 0
    engine.world.close()


@pytest.mark.parametrize("seed", range(4))
def test_under_any_churn_of_priorities_all_end_and_none_goes_to_and_fro(seed: int) -> None:
    engine, rng = Engine(600, max_seqs=3, by_priority=True), random.Random(seed)  # the host has room for all
    requests = [scheduled_request(str(i), rng.choice([5, 30, 90]), max_tokens=60) for i in range(12)]
    for request in requests:
        engine.handle.add(request)
    while engine.handle.has_unfinished or engine.residency.has_work():
        if rng.random() < 0.5:
            name = str(rng.randrange(12))
            engine.handle.reorder({name: (rng.randrange(-2, 3), rng.random())})
            engine.residency.unsettle()
        engine.step()
        assert len(engine.handle.running) <= 3
        assert engine.num_steps < 3000, "the requests do not come on"
    assert [request.num_output_tokens for request in requests] == [60] * 12
    assert {request.num_preemptions for request in requests} == {0}
    assert 0 < engine.world.tiers.counts.displaced <= 12 * (1 + 60 // QUANTUM_TOKENS)
    engine.world.close()
