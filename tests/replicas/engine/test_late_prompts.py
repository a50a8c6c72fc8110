"""Late prompts yield to those that can be in time, over vLLM's own scheduler, without a model."""

import pytest

pytest.importorskip("vllm")

from pengserve.planners.late_prompts import LATE, PERIOD_S, TURN
from pengserve.replicas.engine.scheduling.late_prompts import LatePrompts
from tests.support.vllm_requests import scheduled_request
from tests.support.vllm_schedulers import Hurried, capacity_of, give_tokens, scheduler_handle

STEP_TOKENS, BLOCK_SIZE, PROMPT, SLO_S = 64, 16, 64, Hurried.SLO_S
POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority"])


class Engine(Hurried):
    """Steps of a scheduler, each of which reads one prompt. Requests have an SLO of a second, but where told."""

    def __init__(self, policy: str, num_blocks: int = 400) -> None:
        super().__init__()
        capacity = capacity_of(num_blocks, BLOCK_SIZE, max_num_seqs=32, max_model_len=1000)
        self.handle = scheduler_handle(capacity, max_num_batched_tokens=STEP_TOKENS, policy=policy)
        self.lates = LatePrompts(self.handle, self, lambda: self.now_s)

    def add(self, *names: str, has_slo: bool = True, band: int = 0) -> None:
        for name in names:
            request = scheduled_request(name, PROMPT, max_tokens=1)
            request.priority, request.arrival_time = band, self.now_s + 1e-3 * len(self.handle.waiting)
            if has_slo:
                self.came_s[name] = self.now_s
            self.handle.add(request)

    def step(self) -> list[str]:
        """Who is read in one step."""
        self.lates.renew()
        output = self.handle.schedule()
        give_tokens(self.handle, output)
        return list(output.num_scheduled_tokens)

    def waiting(self) -> list[str]:
        return [request.request_id for request in self.handle.waiting]


@POLICIES
def test_new_prompts_begin_before_those_that_are_very_late(policy: str) -> None:
    engine = Engine(policy)
    engine.add("a", "b", "c")
    engine.now_s = LATE * SLO_S - 0.1
    engine.add("new")
    assert engine.step() == ["a"], "a little late is late for all: nothing changes"
    engine.now_s += 0.2
    engine.add("newer")
    assert [engine.step() for _ in range(4)] == [["new"], ["newer"], ["b"], ["c"]]


@POLICIES
def test_late_ones_have_their_turn_and_the_order_of_arrival_comes_back(policy: str) -> None:
    engine = Engine(policy)
    engine.add("a", "b")
    engine.now_s = 2 * LATE
    engine.add(*(f"n{at}" for at in range(9)))
    read = []
    for _ in range(TURN):
        read += engine.step()
        engine.now_s += PERIOD_S
    assert read == ["n0", "n1", "n2", "a"]
    engine.handle.end(["b"])
    read = [engine.step() for _ in range(6)]
    assert read == [[f"n{at}"] for at in range(3, 9)]


@POLICIES
def test_those_without_an_slo_keep_their_places_among_those_in_time(policy: str) -> None:
    engine = Engine(policy)
    engine.add("late")
    engine.add("free", has_slo=False)
    engine.now_s = 2 * LATE
    engine.add("new")
    assert [engine.step() for _ in range(3)] == [["free"], ["new"], ["late"]]


def test_no_prompt_goes_before_one_of_a_more_urgent_band() -> None:
    engine = Engine("priority")
    engine.add("urgent", band=-1)
    engine.add("late")
    engine.now_s = 2 * LATE
    engine.add("new")
    assert [engine.step() for _ in range(3)] == [["urgent"], ["new"], ["late"]]
    assert engine.handle.goes_by_priority


@POLICIES
def test_one_that_was_preempted_goes_on_before_all_others(policy: str) -> None:
    engine = Engine(policy)
    engine.add("begun")
    engine.step()
    request = scheduled_request("back", PROMPT, max_tokens=5)
    request.arrival_time, engine.came_s["back"] = -1.0, 0.0
    engine.handle.add(request)
    engine.step()
    engine.handle.hold(request)
    engine.handle.preempt(request)
    engine.add("late")
    engine.now_s = 2 * LATE
    engine.add("new")
    engine.lates.renew()
    assert engine.waiting() == ["back", "late", "new"], "the first that waits has begun: it is not late"
    engine.handle.end(["back"])
    engine.lates.renew()
    assert engine.waiting() == ["new", "late"]


def test_nothing_is_looked_at_while_no_request_has_an_slo_or_none_waits() -> None:
    engine = Engine("fcfs")
    engine.lates.renew()
    engine.add("a", "b", has_slo=False)
    engine.step()
    engine.now_s = 100.0
    engine.step()
    assert engine.num_asked == 0 and engine.handle.departures.by_lateness == 0
