"""Steps that a change of shape waits for read a little of prompts."""

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.short_steps import SHARE, first_step_tokens, meeting_step_tokens


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 15))
def test_a_long_prompt_takes_one_step_more_at_most_and_others_as_many(num_tokens: int, step_tokens: int) -> None:
    first = first_step_tokens(num_tokens, step_tokens)
    if num_tokens <= step_tokens:
        assert first is None
        return
    assert first is not None and 1 <= first <= max(1, step_tokens / SHARE)
    alone, kept_short = -(-num_tokens // step_tokens), 1 + -(-(num_tokens - first) // step_tokens)
    assert alone <= kept_short <= alone + 1


@given(st.integers(0, 512), st.integers(1, 1 << 15))
def test_while_members_meet_all_that_decodes_has_room_and_prompts_have_a_little(decodes: int, step_tokens: int) -> None:
    most = meeting_step_tokens(decodes, step_tokens)
    assert min(step_tokens, decodes + 1) <= most <= step_tokens
    assert most <= decodes + max(1, step_tokens / SHARE)
