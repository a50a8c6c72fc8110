"""Law: a follower schedules exactly what the leader has scheduled."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")
from vllm import SamplingParams

from pengserve.replicas.engine.groups.step_message import ResumedRequest, StepCodec
from pengserve.replicas.engine.vllm_seam import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput

IDS = st.lists(st.integers(1, 1 << 30), max_size=4)
COUNTS = st.integers(0, 1 << 20)


def new_request(name: str, prompt: list[int], block_ids: list[int], computed: int) -> NewRequestData:
    return NewRequestData(
        req_id=name,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.5, seed=3, max_tokens=9),
        pooling_params=None,
        block_ids=(block_ids,),
        num_computed_tokens=computed,
        lora_request=None,
    )


@st.composite
def outputs(draw: st.DrawFn) -> SchedulerOutput:
    """A step of any requests."""
    names = draw(st.lists(st.text("abc", min_size=1, max_size=4), unique=True, max_size=5))
    num_new = draw(st.integers(0, len(names)))
    new, ran = names[:num_new], names[num_new:]
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [new_request(n, draw(IDS), draw(IDS), draw(COUNTS)) for n in new]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=ran,
        resumed_req_ids=set(draw(st.lists(st.sampled_from(ran), unique=True))) if ran else set(),
        new_token_ids=[draw(IDS) for _ in ran],
        all_token_ids={},
        new_block_ids=[(draw(IDS),) if draw(st.booleans()) else None for _ in ran],
        num_computed_tokens=[draw(COUNTS) for _ in ran],
        num_output_tokens=[draw(COUNTS) for _ in ran],
    )
    output.num_scheduled_tokens = {name: draw(st.integers(1, 99)) for name in names}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.finished_req_ids = set(draw(st.lists(st.text("xyz", max_size=3), max_size=3)))
    return output


@given(outputs(), IDS, st.booleans())
def test_a_step_comes_as_it_was_sent(output: SchedulerOutput, lease: list[int], is_first: bool) -> None:
    known = [ResumedRequest("k", [1, 2], SamplingParams(max_tokens=3), [4])]
    found = StepCodec().decode(StepCodec().encode(output, None, lease, ["left"], known, is_first=is_first))
    assert found.output.scheduled_cached_reqs == output.scheduled_cached_reqs
    assert found.output.num_scheduled_tokens == output.num_scheduled_tokens
    assert found.output.total_num_scheduled_tokens == output.total_num_scheduled_tokens
    assert found.output.finished_req_ids == output.finished_req_ids
    assert (found.lease, found.is_first, found.grammar) == (lease, is_first, None)
    assert found.forgotten == ["left"]
    assert [repr(request) for request in found.known] == [repr(request) for request in known]
    for one, other in zip(found.output.scheduled_new_reqs, output.scheduled_new_reqs, strict=True):
        assert repr(one) == repr(other)


def test_the_tokens_that_grammars_allow_come_with_the_step() -> None:
    grammar = GrammarOutput(["a", "b"], np.arange(10, dtype=np.int32).reshape(2, 5))
    found = StepCodec().decode(StepCodec().encode(SchedulerOutput.make_empty(), grammar, (), (), ())).grammar
    assert found is not None and found.structured_output_request_ids == ["a", "b"]
    assert np.array_equal(found.grammar_bitmask, grammar.grammar_bitmask)


@given(st.binary(max_size=30))
def test_junk_raises(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        StepCodec().decode([data])
