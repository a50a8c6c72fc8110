"""Laws of turns: KV times slack, urgency, and that none waits for ever."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.placement.pausing import is_overdue
from pengserve.planners.placement.turns import coming, is_better_victim, leaving, making_way
from pengserve.planners.placement.values import Decode, PlacementConfig

CONFIG = PlacementConfig(lead_steps=8)
LEAD_S = 0.4
DEEP = 16  # tokens of a deposit that bears making way


@st.composite
def decodes(draw: st.DrawFn, *, is_paused: bool = False) -> list[Decode]:
    """Requests that run, or that are paused."""
    return [
        Decode(
            request_id=f"r{i}",
            num_tokens=draw(st.integers(1, 5000)),
            slo_s=draw(st.sampled_from([None, 0.05, 0.1])),
            deposit_tokens=draw(st.sampled_from([0, 3, 20, 200])),
            paused_s=draw(st.floats(0, 30)) if is_paused else None,
            may_pause=draw(st.booleans()),
            rank=(draw(st.integers(-1, 1)), float(i)),
        )
        for i in range(draw(st.integers(1, 8)))
    ]


def stepped(name: str, num_tokens: int, *, deposit: int = 0, **more: object) -> Decode:
    request = Decode(request_id=name, num_tokens=num_tokens, slo_s=0.1, deposit_tokens=deposit)
    return replace(request, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("requests", "first"),
    [
        ([stepped("small", 100), stepped("large", 900)], "large"),
        ([stepped("in store", 100, deposit=50), stepped("none", 2000)], "in store"),  # whose client does not notice
        ([stepped("more", 100, deposit=50), stepped("less", 400, deposit=9)], "more"),  # 5,100 and 4,000 token steps
        ([stepped("less", 400, deposit=20), stepped("more", 100, deposit=50)], "less"),
        ([stepped("flex", 10, rank=(1, 0.0)), stepped("urgent", 900, deposit=50)], "flex"),
        ([stepped("came back", 900, deposit=50, may_pause=False), stepped("other", 10)], "other"),
    ],
)
def test_who_leaves_first(requests: list[Decode], first: str) -> None:
    assert max(requests, key=lambda request: leaving(request, LEAD_S)).request_id == first


@given(decodes(is_paused=True))
def test_who_was_paused_too_long_comes_back_first_and_of_those_the_longest(requests: list[Decode]) -> None:
    found = sorted(requests, key=lambda request: coming(request, CONFIG))
    overdue = [request for request in requests if is_overdue(request, CONFIG)]
    assert found[: len(overdue)] == sorted(overdue, key=lambda r: (-(r.paused_s or 0), r.rank[1], r.request_id))
    bands = [request.rank[0] for request in found[len(overdue) :]]
    assert bands == sorted(bands)


@given(decodes())
def test_all_that_may_make_way_for_one_that_was_paused_too_long(running: list[Decode]) -> None:
    waiting = stepped("w", 100, paused_s=CONFIG.max_paused_s, rank=(9, 0.0))
    found = making_way(waiting, running, CONFIG, LEAD_S)
    assert {r.request_id for r in found} == {r.request_id for r in running if r.may_pause}
    assert found == sorted(found, key=lambda request: leaving(request, LEAD_S), reverse=True)


@given(decodes(), st.sampled_from([0, 1, 4, 50]), st.booleans())
def test_for_a_deposit_that_is_nearly_spent_only_deeper_ones_make_way(
    running: list[Decode], deposit: int, has_slo: bool
) -> None:
    waiting = stepped("w", 100, deposit=deposit, paused_s=1.0, slo_s=0.1 if has_slo else None)
    found = making_way(waiting, running, CONFIG, LEAD_S)
    if not has_slo or deposit not in (1, 4):  # 0: missed already; 50: bears 5 s
        assert found == []
    assert all(r.may_pause and r.deposit_tokens >= DEEP and r.rank[0] >= 0 for r in found)
    if has_slo and deposit == 4:
        assert len(found) == sum(r.may_pause and r.deposit_tokens >= DEEP and r.rank[0] >= 0 for r in running)


@given(decodes(), decodes())
def test_a_step_is_waited_for_only_where_that_is_of_use(victims: list[Decode], others: list[Decode]) -> None:
    for victim, other in zip(victims, others, strict=False):
        if is_better_victim(other, victim, LEAD_S):
            assert other.may_pause and other.rank[0] >= victim.rank[0]
            assert not is_better_victim(victim, other, LEAD_S), "neither waits for the other"
