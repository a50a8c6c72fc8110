"""Short prompts overtake long ones over vLLM's own scheduler, without a model."""

import pytest

pytest.importorskip("vllm")

from pengserve.replicas.engine.scheduling.short_prompts import ShortPrompts
from tests.support.vllm_requests import scheduled_request
from tests.support.vllm_schedulers import capacity_of, give_tokens, scheduler_handle

STEP_TOKENS, BLOCK_SIZE, LONG, SHORT = 128, 16, 800, 16
POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority"])


class Engine:
    """Steps of a scheduler in which short prompts overtake, or with `is_plain` as vLLM makes them."""

    def __init__(self, policy: str = "fcfs", *, num_blocks: int = 400, is_plain: bool = False) -> None:
        capacity = capacity_of(num_blocks, BLOCK_SIZE, max_num_seqs=8, max_model_len=4000)
        self.handle = scheduler_handle(capacity, max_num_batched_tokens=STEP_TOKENS, policy=policy)
        self.shorts = ShortPrompts(self.handle, BLOCK_SIZE)
        self.is_plain = is_plain
        self.num_added = 0

    def add(self, name: str, num_tokens: int, max_tokens: int = 50, band: int = 0) -> None:
        request = scheduled_request(name, num_tokens, max_tokens=max_tokens)
        request.priority, request.arrival_time = band, float(self.num_added)
        self.num_added += 1
        self.handle.add(request)

    def step(self) -> dict[str, int]:
        """Tokens of each request in one step."""
        if self.shorts.is_on and not self.is_plain:
            with self.shorts.step():
                output = self.handle.schedule()
        else:
            output = self.handle.schedule()
        give_tokens(self.handle, output)
        return dict(output.num_scheduled_tokens)

    def waiting(self) -> list[str]:
        return [request.request_id for request in self.handle.waiting]


@POLICIES
def test_a_short_prompt_that_comes_behind_a_long_one_is_read_in_the_next_step(policy: str) -> None:
    engine, plain = Engine(policy), Engine(policy, is_plain=True)
    for each in (engine, plain):
        each.add("long", LONG)
        assert each.step() == {"long": STEP_TOKENS}
        each.add("short", SHORT)
    assert engine.step() == {"long": STEP_TOKENS - SHORT, "short": SHORT}
    assert plain.step() == {"long": STEP_TOKENS}


@POLICIES
def test_its_answer_goes_on_while_the_long_prompt_is_read(policy: str) -> None:
    """vLLM gives tokens out in the order of the batch, in which the long prompt comes before it."""
    engine = Engine(policy)
    engine.add("long", LONG)
    engine.step()
    engine.add("short", SHORT)
    engine.step()
    while not engine.handle.request("long").num_output_tokens:
        assert not engine.waiting()
        step = engine.step()
        assert step["short"] == 1
    assert engine.handle.departures.by_length == 0, "it began behind the long one"


@POLICIES
def test_prompts_that_wait_begin_before_a_long_one_which_has_the_rest_of_the_step(policy: str) -> None:
    engine = Engine(policy)
    engine.add("long", LONG)
    engine.add("next", LONG)
    engine.add("a", SHORT)
    engine.add("b", SHORT - 1)
    assert engine.step() == {"a": SHORT, "b": SHORT - 1, "long": STEP_TOKENS - 2 * SHORT + 1}
    assert engine.waiting() == ["next"] and engine.handle.departures.by_length == 1
    assert [engine.handle.request(name).arrival_time for name in ("a", "b")] == [2.0, 3.0]


@POLICIES
def test_a_flood_of_short_prompts_holds_a_long_one_up_no_longer_than_twice(policy: str) -> None:
    def steps(is_plain: bool) -> int:
        engine = Engine(policy, is_plain=is_plain)
        engine.add("long", LONG, max_tokens=2)
        for count in range(100):
            for index in range(8):
                engine.add(f"{count}.{index}", SHORT, max_tokens=1)
            engine.step()
            if engine.handle.request("long").num_output_tokens:
                return count + 1
        raise AssertionError("the long prompt starves")

    assert steps(True) == 7 and steps(False) <= 14


@POLICIES
def test_a_long_prompt_that_waits_for_blocks_is_not_overtaken(policy: str) -> None:
    engine = Engine(policy, num_blocks=70)
    engine.add("runs", 320)
    while not engine.handle.request("runs").num_output_tokens:
        engine.step()
    engine.step()
    engine.add("long", LONG)
    engine.add("short", SHORT)
    assert not engine.shorts.is_on, "what waits cannot begin"
    assert engine.step() == {"runs": 1}
    engine.handle.end(["runs"])
    assert engine.shorts.is_on
    engine.step()
    assert engine.handle.request("long").num_computed_tokens and engine.handle.request("short").num_computed_tokens


@POLICIES
def test_what_could_not_begin_has_its_place_again(policy: str) -> None:
    engine = Engine(policy)
    for name, size in (("a", LONG), ("b", SHORT), ("c", LONG), ("d", SHORT)):
        engine.add(name, size)
    chosen = [engine.handle.request(name) for name in ("b", "d")]
    with engine.handle.beginning_first(chosen):
        assert engine.waiting() == ["b", "d", "a", "c"]
    assert engine.waiting() == ["a", "b", "c", "d"]
    with engine.handle.beginning_first(chosen), engine.handle.limited(max_tokens=SHORT):
        engine.handle.schedule()
    assert engine.waiting() == ["a", "c", "d"]


def test_bands_are_left_to_their_own_rule() -> None:
    engine = Engine("priority")
    engine.add("long", LONG)
    engine.step()
    engine.add("short", SHORT, band=1)
    assert engine.step() == {"long": STEP_TOKENS}
    by_arrival = Engine("fcfs")
    by_arrival.add("long", LONG)
    by_arrival.step()
    by_arrival.add("short", SHORT, band=1)
    assert by_arrival.step() == {"long": STEP_TOKENS - SHORT, "short": SHORT}, "vLLM's queue knows no bands"


def test_nothing_is_looked_at_while_no_prompt_waits_or_is_long() -> None:
    engine = Engine()
    assert not engine.shorts.is_on
    engine.add("a", LONG)
    assert engine.shorts.is_on
    while not engine.handle.request("a").num_output_tokens:
        engine.step()
    engine.step()
    assert not engine.shorts.is_on
    engine.handle.pause_new(True)
    engine.add("b", SHORT)
    assert not engine.shorts.is_on


def test_a_limit_of_chunks_that_vllm_was_given_stays() -> None:
    handle = Engine().handle
    config = handle._scheduler.scheduler_config
    config.long_prefill_token_threshold = 40
    with handle.chunks_of(70):
        assert config.long_prefill_token_threshold == 40
    with handle.chunks_of(30):
        assert config.long_prefill_token_threshold == 30
    assert config.long_prefill_token_threshold == 40
