"""Law: no block that a microbatch under way reads or writes is given to weights, or to KV from elsewhere.

A pipeline's leader runs a microbatch when it comes back. Until then blocks of its requests may have become free.
"""

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from pengserve.planners.types.errors import EngineError, StepError
from pengserve.replicas.engine.groups.pp_lane import PpLane
from pengserve.replicas.engine.groups.step_message import StepCodec
from pengserve.replicas.engine.lanes.lane_totals import LaneTotals
from pengserve.replicas.engine.scheduling.departures import Departures
from pengserve.replicas.engine.scheduling.microbatches import Microbatches
from pengserve.replicas.engine.vllm_seam import ModelRunnerOutput, Request, RequestStatus
from tests.support.vllm_requests import scheduled_request
from tests.support.vllm_schedulers import capacity_of, scheduler_handle

BLOCK_SIZE, NUM_BLOCKS, STAGES, PARTS = 16, 12, 3, None


class Stage(PpLane):
    """A member that follows, without a model: what its runner is told, in that order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []
        self._codec, self._totals = StepCodec(), LaneTotals(departures=Departures())
        self._told_uses = self._lane_tiers = None

    def adopt(self, request: Request) -> None:
        self.told.append(("adopt", request.request_id))

    def forget(self, request_ids: Any) -> None:
        self.told.append(("forget", *sorted(request_ids)))

    def _execute(self, microbatch: Any, grammar: Any = None) -> Any:
        output = microbatch.output
        self.told.append(("step", *output.num_scheduled_tokens, "ended", *sorted(output.finished_req_ids)))


class Leader(Stage):
    """A pipeline's leader with vLLM's scheduler and no model. Each microbatch gives its requests a token."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []
        capacity = capacity_of(NUM_BLOCKS, BLOCK_SIZE, max_num_seqs=8)
        self._handle, self.capacity = scheduler_handle(capacity, max_num_batched_tokens=4 * BLOCK_SIZE), capacity
        self._block_hasher, self._added, self._is_held, self._slo_gate = None, 0, False, None
        self._run: Any = SimpleNamespace(send_step=self.sent.append)
        self._known, self._forgotten, self._was_empty = [], [], True
        self._in_flight, self._withheld, self._ended = deque(), [], []
        self._arriving, self._arriving_parked = {}, set()
        self.residency = self.tiers = self._lane_tiers = self._slo_placement = None
        self._beyond, self._host_rows = [], 0
        self.sizes: Any = SimpleNamespace(smallest=NUM_BLOCKS + 1, num_usable=lambda columns, host_rows: columns - 1)
        self.max_in_flight, self._stage_s, self._counted_s = STAGES, 0.0, (0.0, 0.0)
        self._clock: Any = SimpleNamespace(busy_s=0.0, idle_s=0.0)
        self.group: Any = SimpleNamespace(world_size=STAGES)
        self._microbatches = Microbatches(self.scheduler, STAGES)
        self.scheduler.watch_frees(self._note_freed)
        self.num_given_up = 4  # blocks
        self._memory: Any = SimpleNamespace(
            sizes=SimpleNamespace(num_blocks_left=lambda parts: NUM_BLOCKS + 1 - self.num_given_up)
        )
        self.used: dict[int, set[int]] = {}  # blocks by microbatch under way
        self.num_preempted = 0

    def _schedule(self) -> Any:
        output = super()._schedule()
        self.used[id(output)] = {b for name in output.num_scheduled_tokens for b in self.block_ids(name)}
        self.num_preempted += len(output.preempted_req_ids or ())
        return output

    def _execute(self, microbatch: Any, grammar: Any = None) -> Any:
        super()._execute(microbatch)
        ids = list(microbatch.output.num_scheduled_tokens)
        del self.used[id(microbatch.output)]
        ends = [self.knows(i) and self.request(i).num_computed_tokens >= self.request(i).num_tokens for i in ids]
        return ModelRunnerOutput(ids, {name: k for k, name in enumerate(ids)}, [[5] if end else [] for end in ends])

    def _count(self, *given: Any) -> None:
        """No figures."""

    def under_way(self) -> set[int]:
        """Blocks that this member has still to read or write."""
        return set[int]().union(*(self.used[id(microbatch.output)] for microbatch in self._in_flight))


@pytest.fixture
def leader() -> Leader:
    return Leader()


def coming(name: str, num_tokens: int) -> Request:
    request = scheduled_request(name, num_tokens)
    request.append_output_token_ids([7])
    request.status = RequestStatus.PREEMPTED
    return request


def test_weights_get_no_memory_that_a_microbatch_has_still(leader: Leader) -> None:
    """Also where the wait for room has timed out: a microbatch would read weights, or write over them."""
    leader.scheduler.add(scheduled_request("a", 4 * BLOCK_SIZE))
    assert leader._begin()
    leader.abort(["a"])
    leader.num_given_up = NUM_BLOCKS - 1
    assert leader.makes_room(PARTS), "worth a wait"
    with pytest.raises(StepError, match=r"11 blocks must be free .* 10 are"):
        leader.give_up_blocks(PARTS)
    assert not leader._withheld and leader.num_free() == NUM_BLOCKS, "all is as it was"
    leader.num_given_up = 2
    assert not leader.makes_room(PARTS), "there is enough beside what the microbatch has"
    assert leader.under_way().isdisjoint(leader.give_up_blocks(PARTS))
    leader.offer_all()
    leader.num_given_up = NUM_BLOCKS - 1
    leader.hold(True)
    leader.step()
    assert not leader.makes_room(PARTS) and len(leader.give_up_blocks(PARTS)) == NUM_BLOCKS - 1


def test_an_aborted_requests_blocks_are_not_written_while_its_microbatch_is_under_way(leader: Leader) -> None:
    leader.scheduler.add(scheduled_request("a", 3 * BLOCK_SIZE))
    assert leader._begin()
    written = set(leader.block_ids("a"))
    leader.abort(["a"])
    assert leader.num_free() == NUM_BLOCKS, "a new request, whose microbatch comes later, may have them"
    for name in "bc":
        assert leader.admit(coming(name, 2 * BLOCK_SIZE), 2 * BLOCK_SIZE) is not None
        assert written.isdisjoint(leader.block_ids(name))
    leader.num_given_up = 3
    assert written.isdisjoint(leader.give_up_blocks(PARTS))


def test_a_request_leaves_all_members_before_the_same_microbatch(leader: Leader) -> None:
    """Forgetting empties a runner's batch. Where the leader did so at once, a microbatch that the others had run before
    found the batch in another order there, and its requests got each other's hidden states.
    """
    for name in "abc":
        leader.scheduler.add(scheduled_request(name, 8))
    assert leader._begin()
    leader.scheduler.add(scheduled_request("d", 8))
    assert leader._begin()
    assert leader.admit(coming("e", BLOCK_SIZE), BLOCK_SIZE) is not None
    leader.release(["a", "e"])  # of which "e" is in no microbatch
    assert not leader.told
    leader.step()
    leader.step()
    steps = [what for what, *_ in leader.told]
    assert steps == ["step", "step"], "both had begun before"
    leader.step()
    assert leader.told[2] == ("forget", "e")


def test_a_request_does_not_come_back_while_a_microbatch_has_one_of_its_id(leader: Leader) -> None:
    """Its scheduler would take that one's token. Senders use an id once; a migration may bring it back."""
    leader.scheduler.add(scheduled_request("a", 8))
    assert leader._begin()
    leader.release(["a"])
    num_tokens = BLOCK_SIZE
    assert leader.reserve(coming("a", num_tokens), num_tokens, num_tokens) is None
    assert leader.admit(coming("a", num_tokens), num_tokens) is None
    with pytest.raises(EngineError, match="request a is in a step still"):
        leader.add(coming("a", num_tokens))
    assert not leader.knows("a")
    leader.hold(True)
    leader.step()
    request = coming("a", num_tokens)
    assert leader.reserve(request, num_tokens, num_tokens) == 0
    assert list(request.output_token_ids) == [7], "the token of the other one is not its own"


@pytest.mark.parametrize("seed", range(20))
def test_requests_come_and_go_between_steps(seed: int) -> None:
    """Aborts, preemption under way, migrations that grow or are called off, and restores that are called off."""
    rng, leader, moving = random.Random(seed), Leader(), dict[str, Request]()
    for number in range(250):
        match rng.randrange(7):
            case 0 | 1 if len(leader.requests()) < 6:
                sizes = rng.randrange(8, 70), rng.randrange(1, 60)
                leader.scheduler.add(scheduled_request(f"r{number}", sizes[0], max_tokens=sizes[1]))
            case 2 if ids := [r.request_id for r in leader.requests() if r.request_id not in moving]:
                leader.abort([rng.choice(ids)])
            case 3:
                request, count = coming(f"m{number}", rng.randrange(16, 64)), rng.randrange(1, 4)
                if leader.reserve(request, count * BLOCK_SIZE, count * BLOCK_SIZE) is not None:
                    moving[request.request_id] = request
                    assert leader.under_way().isdisjoint(leader.block_ids(request.request_id))
            case 4 if moving:
                request = rng.choice(list(moving.values()))
                before = set(leader.block_ids(request.request_id))
                if leader.enlarge(request, request.num_computed_tokens + BLOCK_SIZE):
                    request.num_computed_tokens += BLOCK_SIZE
                    assert leader.under_way().isdisjoint(set(leader.block_ids(request.request_id)) - before)
            case 5 if moving and rng.random() < 0.3:
                request = moving.pop(next(iter(moving)))
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
                leader.take_over(request)
                leader.go_on(request)
            case 5 if moving:
                leader.release([name := rng.choice(list(moving))])
                del moving[name]
            case 6 if not leader._withheld and leader.num_free() >= 6:
                try:
                    leader.give_up_blocks(PARTS)
                except StepError:
                    assert leader.makes_room(PARTS)
                assert leader.under_way().isdisjoint(leader._withheld)
                if rng.random() < 0.9:
                    leader.offer_all()
        leader.step()
        if leader._withheld and rng.random() < 0.2:
            leader.offer_all()
    assert leader.num_preempted, "the seed shows little"
    leader.offer_all()
    leader.abort([request.request_id for request in leader.requests()])
    while leader._in_flight:
        leader.step()
    assert leader.num_free() == NUM_BLOCKS
    follower = Stage()
    for parts in leader.sent:
        follower.follow(parts)
    assert follower.told == leader.told, "members hand each other rows: their batches must be filled in the same order"
