"""Laws of paced streams over any interleaving of tokens, ends and readers, in virtual time; and some on a real loop."""

import asyncio
from dataclasses import dataclass
from time import monotonic
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.outputs import CompletionOutput

from pengserve.cluster.ingress.slo.deposit import DepositCollector
from pengserve.cluster.ingress.vllm_openai_seam import RequestOutput, RequestOutputCollector, RequestOutputKind

INTERVAL_MS = 50.0

Step = tuple[int, int, int]


def output(index: int, tokens: list[int], *, finish: str | None = None, is_last: bool = False) -> RequestOutput:
    """What the output processor makes of some tokens of one sequence."""
    completion = CompletionOutput(
        index=index,
        text="".join(f"{token} " for token in tokens),
        token_ids=tokens,
        cumulative_logprob=None,
        logprobs=[{token: token} for token in tokens],  # type: ignore[list-item]
        finish_reason=finish,
        stop_reason="stop" if finish == "stop" else None,
    )
    return RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[1], prompt_logprobs=None, outputs=[completion], finished=is_last
    )


@dataclass
class Clock:
    """Virtual time."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Reader:
    """What a client has seen: (time, token) of each sequence."""

    def __init__(self, collector: DepositCollector, clock: Clock) -> None:
        self.collector, self.clock = collector, clock
        self.seen: dict[int, list[tuple[float, int]]] = {}
        self.text: dict[int, str] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.finished: dict[int, str] = {}
        self.is_over = False

    def read(self) -> None:
        """Takes what is due."""
        while (found := self.collector.get_nowait()) is not None:
            self.is_over |= found.finished
            for each in found.outputs:
                self.seen.setdefault(each.index, []).extend((self.clock.now, token) for token in each.token_ids)
                self.text[each.index] = self.text.get(each.index, "") + each.text
                self.logprobs.setdefault(each.index, []).extend(each.logprobs or ())
                if each.finish_reason is not None:
                    self.finished[each.index] = each.finish_reason

    def read_until(self, then: float) -> None:
        """Reads whenever something is due, until `then`."""
        while (due := self.collector.next_due_s) is not None and due <= then:
            self.clock.now = max(self.clock.now, due)
            self.read()
        self.clock.now = then


# Steps: (pause in ms, sequence, tokens). Then each sequence ends, in the order of their indices.
STEPS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2), st.integers(1, 2)), min_size=1, max_size=40)


def play(steps: list[Step], end_pause: int, has_last_token: bool) -> tuple[Reader, dict[int, list[Any]]]:
    """Plays `steps` into a collector that is read when something is due; what came, as (time, token), by sequence."""
    clock = Clock()
    collector = DepositCollector(RequestOutputKind.DELTA, "r", INTERVAL_MS, clock)
    reader, came = Reader(collector, clock), dict[int, list[Any]]()
    number = 0
    for pause, index, count in steps:
        reader.read_until(clock.now + pause)
        tokens = list(range(number, number + count))
        number += count
        came.setdefault(index, []).extend((clock.now, token) for token in tokens)
        collector.put(output(index, tokens))
        reader.read()
    for place, index in enumerate(sorted(came)):
        reader.read_until(clock.now + end_pause)
        tokens = [number + index] if has_last_token else []
        came[index].extend((clock.now, token) for token in tokens)
        collector.put(output(index, tokens, finish="stop", is_last=place == len(came) - 1))
        reader.read()
        assert reader.seen[index] and len(reader.seen[index]) == len(came[index]), "what is finished goes at once"
        assert reader.finished[index] == "stop"
    return reader, came


@given(steps=STEPS, end_pause=st.integers(0, 200), has_last_token=st.booleans())
def test_tokens_are_the_same_and_none_goes_early(steps: list[Step], end_pause: int, has_last_token: bool) -> None:
    reader, came = play(steps, end_pause, has_last_token)
    assert reader.is_over
    for index, tokens in came.items():
        numbers = [token for _, token in tokens]
        assert [token for _, token in reader.seen[index]] == numbers
        assert reader.text[index] == "".join(f"{token} " for token in numbers)
        assert reader.logprobs[index] == [{token: token} for token in numbers]
        end = reader.clock.now if not tokens else max(when for when, _ in reader.seen[index])
        released = [when for when, _ in reader.seen[index]]
        assert all(sent >= made for (sent, _), (made, _) in zip(reader.seen[index], tokens, strict=True))
        for count, when in enumerate(released[1:], start=1):
            before = released[count - 1]
            if when < end and when != before:  # the burst at the end goes as one
                assert when - before >= INTERVAL_MS, "never early while the deposit lasts"


@given(steps=STEPS, end_pause=st.integers(0, 200))
def test_none_goes_later_than_it_must(steps: list[Step], end_pause: int) -> None:
    reader, came = play(steps, end_pause, has_last_token=True)
    for index, tokens in came.items():
        due = float("-inf")
        for (sent, _), (made, _) in zip(reader.seen[index], tokens, strict=True):
            due = max(made, due + INTERVAL_MS)
            assert sent <= due + INTERVAL_MS, "a step of two tokens goes when the second is due"


def test_an_error_lets_what_came_before_go_first() -> None:
    clock = Clock()
    collector = DepositCollector(RequestOutputKind.DELTA, "r", INTERVAL_MS, clock)
    for token in range(3):
        collector.put(output(0, [token]))
    assert collector.get_nowait() is not None and collector.get_nowait() is None
    collector.put(ValueError("the instance is gone"))
    rest = collector.get_nowait()
    assert rest is not None and list(rest.outputs[0].token_ids) == [1, 2]
    with pytest.raises(ValueError, match="gone"):
        collector.get_nowait()


async def test_a_real_loop_hands_tokens_on_in_time() -> None:
    interval_s = 0.03
    collector = DepositCollector(RequestOutputKind.DELTA, "r", interval_s)
    started_s = monotonic()
    for token in range(5):
        collector.put(output(0, [token]))
    seen: list[int] = []
    while len(seen) < 5:
        seen += (await collector.get()).outputs[0].token_ids
        # How far apart two of them come is the machine's affair: after one that woke late the next comes sooner.
        assert monotonic() - started_s >= (len(seen) - 1) * interval_s - 1e-6, "never early"
    assert seen == [0, 1, 2, 3, 4]
    for token in range(5, 8):
        collector.put(output(0, [token]))
    asyncio.get_running_loop().call_later(0.01, collector.put, output(0, [8], finish="length", is_last=True))
    seen = []
    started_s = monotonic()
    while not seen or seen[-1] != 8:
        seen += list((await collector.get()).outputs[0].token_ids)
    assert seen == [5, 6, 7, 8] and monotonic() - started_s < 10
    collector.close()


async def test_it_stands_in_for_vllms_own() -> None:
    """With no interval it does what the one does that vLLM uses."""
    own = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    paced = DepositCollector(RequestOutputKind.DELTA, "r", 0.0)
    assert set(vars(own)) <= set(vars(paced))
    for collector in (own, paced):
        collector.put(output(0, [1]))
        collector.put(output(0, [2], finish="stop", is_last=True))
        found = await collector.get()
        assert list(found.outputs[0].token_ids) == [1, 2] and found.finished
