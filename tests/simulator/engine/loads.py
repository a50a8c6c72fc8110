"""Loads for schedulers and lanes, and step times that tests can compute by hand."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from pengserve.planners.cost_model import CostModel
from pengserve.planners.long_answers import GivingWay
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.requests import Arrival, LiveRequest
from pengserve.simulator.timing.steps import Batch

MODEL = CostModel(prefix_attention_s=1e-9, self_attention_s=1e-9, kv_read_s=1e-8, ffn_s=2e-5, other_s=1e-5, load_s=5e-3)

# Answers of some tokens are long: the loads are small.
GIVING_WAY = GivingWay(gone=0.5, min_tokens=3, max_preemptions=2, worth=1.0, again=3.0, spare=0.1, wait_s=0.02)


class LinearTimes:
    """`StepTimes` by a cost model, in which a decode costs the same for every token of its context."""

    def __init__(self, model: CostModel = MODEL) -> None:
        self.model = model
        self._token_s = model.prefix_attention_s + model.kv_read_s

    def step_s(self, batch: Batch) -> float:
        model = self.model
        decodes_s = (model.ffn_s + model.other_s) * batch.num_decodes + self._token_s * batch.context_tokens
        return model.load_s + decodes_s + sum(model.chunk_s(chunk) for chunk in batch.prefills)

    def decodes_s(self, batch: Batch, num_steps: int) -> float:
        growth_s = self._token_s * batch.num_decodes
        return num_steps * self.step_s(batch) + growth_s * num_steps * (num_steps - 1) / 2

    def steps_within(self, batch: Batch, seconds: float) -> int:
        half_s = self._token_s * batch.num_decodes / 2
        first_s = self.step_s(batch) - half_s
        return int((math.sqrt(first_s * first_s + 4 * half_s * seconds) - first_s) / (2 * half_s))


def capacity(num_blocks: int = 100, block_size: int = 4, max_num_seqs: int = 8, max_model_len: int = 0) -> KvCapacity:
    """A lane's; by default a request may have all of it."""
    return KvCapacity(
        num_blocks=num_blocks,
        block_size=block_size,
        bytes_per_block=1000,
        max_model_len=max_model_len or num_blocks * block_size,
        max_num_seqs=max_num_seqs,
        weight_bytes=0,
    )


def live(name: str, prompt: int, output: int, at_s: float = 0.0, **fields: Any) -> LiveRequest:
    """A request that has just arrived."""
    arrival = Arrival(request_id=name, at_s=at_s, prompt_tokens=prompt, output_tokens=output, **fields)
    return LiveRequest(arrival=arrival)


@dataclass(frozen=True)
class Load:
    """What happens to a scheduler: at the boundary before step `tick` something is done to request `index`."""

    capacity: KvCapacity
    options: SchedulerOptions
    requests: tuple[tuple[int, int, int, float | None], ...]  # prompt, output, priority, SLO of the first token
    events: tuple[tuple[int, str, int], ...]  # tick, what, index

    def lives(self) -> list[LiveRequest]:
        """New requests of this load."""
        return [
            live(f"r{index}", prompt, output, at_s=float(index), priority=priority, ttft_s=ttft_s)
            for index, (prompt, output, priority, ttft_s) in enumerate(self.requests)
        ]


@st.composite
def loads(
    draw: st.DrawFn,
    *,
    min_stages: int = 1,
    max_stages: int = 1,
    kinds: Sequence[str] = ("add",),
    meets: bool = False,
    hurries: bool = False,
    **fixed: Any,
) -> Load:
    """Small pools, so that requests are preempted; small budgets, so that prompts are cut.

    Where it `meets`, other members of a switch wait for the ends of some steps. Where it `hurries`, each request has an
    SLO for its first token, and prompts come while long answers run.
    """
    max_num_seqs = draw(st.integers(4 if hurries else 1, 8))
    num_stages = draw(st.integers(min_stages, max_stages))
    room = capacity(draw(st.integers(4, 40)), draw(st.sampled_from([1, 4, 16])), max_num_seqs)
    options = SchedulerOptions(
        **{
            "max_num_batched_tokens": draw(st.integers(max_num_seqs, 64)),
            "policy": draw(st.sampled_from(["fcfs", "priority"])),
            "watermark": draw(st.sampled_from([0.0, 0.0, 0.1])),
            "short_prompts": draw(st.booleans()),
            "late_prompts": draw(st.booleans()),
            "long_answers": draw(st.sampled_from([None, GIVING_WAY, GIVING_WAY])),
            "short_first_steps": draw(st.booleans()),
            "num_stages": num_stages,
            "lookahead": draw(st.sampled_from([None, MODEL])) if num_stages > 1 else None,
            **fixed,
        }
    )
    requests, events = [], []
    for index in range(draw(st.integers(1, 14))):
        prompt = draw(st.integers(1, min(60, room.num_tokens - 1)))
        output = draw(st.integers(1, min(40, room.num_tokens - prompt)))
        if hurries and index % 3 == 0:
            prompt, output = max(1, prompt // 4), min(40, room.num_tokens - prompt)
        elif hurries:
            output = min(output, 3)
        slos = [0.02, 0.06] if hurries else [None, 0.02, 0.06]
        requests.append((prompt, output, draw(st.integers(-1, 1)), draw(st.sampled_from(slos))))
        tick = draw(st.integers(0, 30)) + (10 if hurries and index % 3 else 0)
        events.append((tick, draw(st.sampled_from(kinds)), index))
    if "add" not in kinds or len(kinds) > 1:
        events += [(draw(st.integers(0, 60)), "remove", index) for index in range(len(requests)) if draw(st.booleans())]
    for begin in draw(st.lists(st.integers(0, 60), max_size=3)) if meets else ():
        events += [(begin, "meet", 0), (begin + draw(st.integers(1, 10)), "go on", 0)]
    return Load(room, options, tuple(requests), tuple(sorted(events)))
