"""Long answers give way to prompts that wait for memory, over vLLM's own scheduler, without a model."""

from contextlib import nullcontext

import pytest

pytest.importorskip("vllm")

from pengserve.planners.long_answers import GivingWay
from pengserve.replicas.engine.scheduling.late_prompts import LatePrompts
from pengserve.replicas.engine.scheduling.long_answers import LongAnswers
from pengserve.replicas.engine.vllm_seam import RequestStatus
from tests.support.vllm_requests import scheduled_request
from tests.support.vllm_schedulers import Hurried, capacity_of, give_tokens, scheduler_handle

BLOCK_SIZE, NUM_BLOCKS = 16, 20
RULES = GivingWay(gone=0.1, min_tokens=20, max_preemptions=2, worth=2.0, again=10.0, spare=0.1, wait_s=0.1)
POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority"])


class Engine(Hurried):
    """Steps of a scheduler. Prompts of `add` have an SLO of a second, those of `begin` have none."""

    def __init__(self, policy: str = "fcfs") -> None:
        super().__init__()
        capacity = capacity_of(NUM_BLOCKS, BLOCK_SIZE, max_num_seqs=8)
        self.handle = scheduler_handle(capacity, max_num_batched_tokens=512, policy=policy)
        self.paced = set[str]()
        self.answers = LongAnswers(
            self.handle, self, BLOCK_SIZE, self.handle.num_free, lambda: NUM_BLOCKS, rules=RULES, clock=self.clock
        )
        self.lates = LatePrompts(self.handle, self, self.clock)

    def clock(self) -> float:
        return self.now_s

    def is_paced(self, request_id: str) -> bool:
        return request_id in self.paced

    def begin(self, name: str, num_tokens: int, steps: int = 0, *, max_tokens: int = 200, band: int = 0) -> None:
        request = scheduled_request(name, num_tokens, max_tokens=max_tokens)
        request.priority, request.arrival_time = band, self.now_s + 1e-3 * len(self.handle.requests())
        self.handle.add(request)
        for _ in range(steps):
            self.step()

    def add(self, name: str, num_tokens: int, *, band: int = 0, max_tokens: int = 2) -> None:
        self.came_s[name] = self.now_s
        self.begin(name, num_tokens, max_tokens=max_tokens, band=band)

    def step(self) -> list[str]:
        """Who computes in one step."""
        with self.answers.stepping() or nullcontext():
            self.lates.renew()
            output = self.handle.schedule()
        give_tokens(self.handle, output)
        return list(output.num_scheduled_tokens)

    def waiting(self) -> list[str]:
        return [request.request_id for request in self.handle.waiting]


def crowded(policy: str = "fcfs") -> Engine:
    """Three blocks are free: a long answer has 12, a short one 5. A prompt waits that needs 6."""
    engine = Engine(policy)
    engine.begin("long", 160, steps=30)
    engine.begin("short", 70, steps=2)
    engine.add("prompt", 96)
    assert engine.handle.num_free() == 3
    return engine


@POLICIES
def test_the_longest_gives_way_once_time_is_gone(policy: str) -> None:
    engine = crowded(policy)
    assert engine.step() == ["long", "short"], "there is time"
    engine.now_s = 0.2
    assert engine.step() == ["short", "prompt"]
    assert engine.waiting() == ["long"] and engine.handle.departures.by_memory == 1
    assert engine.handle.request("long").status is RequestStatus.PREEMPTED
    assert engine.handle.num_blocks_of("long") == 0


@POLICIES
def test_it_stands_behind_all_prompts_and_goes_on_after_them(policy: str) -> None:
    engine = crowded(policy)
    engine.now_s = 0.2
    engine.step()
    engine.add("next", 96, max_tokens=30)
    assert engine.step() == ["short", "prompt", "next"], "not the one that came first of all"
    assert engine.step() == ["short", "next"] and engine.waiting() == ["long"], "a block must stay free beside it"
    engine.handle.end(["next"])
    num_tokens = engine.handle.request("long").num_output_tokens
    assert engine.step() == ["short", "long"], "and nothing waits any more"
    assert engine.handle.request("long").num_output_tokens == num_tokens + 1
    assert engine.waiting() == []


@POLICIES
def test_it_goes_on_before_all_prompts_when_it_has_waited_long(policy: str) -> None:
    engine = crowded(policy)
    engine.now_s = 0.2
    engine.step()
    engine.handle.end(["short"])
    generated = engine.handle.request("long").num_output_tokens
    engine.now_s = 0.2 + RULES.wait_s * generated + 0.1
    engine.add("next", 16)
    assert engine.step() == ["prompt", "long", "next"]


def test_without_others_it_goes_on_whatever_is_to_stay_free() -> None:
    engine = crowded()
    engine.now_s = 0.2
    engine.step()
    engine.handle.end(["short", "prompt"])
    engine.handle.withhold(NUM_BLOCKS - 13)
    assert engine.step() == ["long"]


@pytest.mark.parametrize("kind", ["paced", "young", "no slo", "paused", "often"])
def test_none_gives_way(kind: str) -> None:
    engine = Engine()
    engine.begin("long", 160, steps=10 if kind == "young" else 30)
    engine.begin("short", 70, steps=2)
    engine.add("prompt", 120)
    if kind == "paced":
        engine.paced.add("long")
    elif kind == "no slo":
        engine.came_s = {"other": 0.0}
    elif kind == "paused":
        engine.handle.pause_new(True)
    elif kind == "often":
        engine.handle.request("long").num_preemptions = RULES.max_preemptions + 1
    engine.now_s = 5.0
    assert engine.step() == ["long", "short"] and engine.waiting() == ["prompt"]
    assert engine.handle.departures.by_memory == 0


def test_none_gives_way_to_a_less_urgent_prompt() -> None:
    engine = Engine("priority")
    engine.begin("long", 160, steps=30, band=-1)
    engine.begin("short", 70, steps=2)
    engine.add("prompt", 96)
    engine.now_s = 5.0
    assert engine.step() == ["long", "short"]
    engine.add("urgent", 96, band=-1)
    engine.now_s = 6.0
    assert engine.step() == ["short", "urgent", "prompt"], "and to one of its own band it does"


def test_what_others_hold_too_frees_nothing() -> None:
    engine = crowded()
    request = engine.handle.request("long")
    shared = engine.handle.block_ids("long")[:9]
    engine.handle._pool.touch([engine.handle._pool.blocks[i] for i in shared])
    engine.now_s = 5.0
    assert engine.step() == ["long", "short"], "three of its twelve blocks are its own, and six would have to be"
    engine.handle.unpin(shared)
    assert engine.step() == ["short", "prompt"] and request.status is RequestStatus.PREEMPTED


def test_one_that_ended_or_left_meanwhile_is_forgotten() -> None:
    engine = crowded()
    engine.now_s = 0.2
    engine.step()
    engine.handle.end(["long"])
    assert engine.waiting() == [] and not engine.handle.knows("long")
    engine.step()
    assert engine.answers.stepping() is None
    assert engine.waiting() == []


def test_a_last_token_that_was_on_its_way_ends_it() -> None:
    """As with steps under way: what ends while a step is scheduled does not wait again."""
    engine = crowded()
    engine.now_s = 0.2
    engine.step()
    stepping = engine.answers.stepping()
    assert stepping is not None
    with stepping:
        engine.handle.end(["long"])
    assert engine.waiting() == []


def test_nothing_is_looked_at_while_no_request_has_an_slo_or_none_waits() -> None:
    engine = Engine()
    engine.begin("long", 160, steps=30)
    engine.begin("short", 70, steps=2)
    engine.begin("prompt", 120)
    engine.now_s = 5.0
    engine.step()
    assert engine.num_asked == 0
