"""Laws of the restore planner: parameters come back when memory is plenty for long enough, the cheapest first."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.check import check_switch
from pengserve.planners.overload import DemandHistory, predict_demand
from pengserve.planners.restore import GAP_S, RestoreHistory, RestorePlan, Way, plan_restore
from pengserve.planners.steps import halves_of, make_plan
from pengserve.planners.types.config import DropConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, alone
from pengserve.planners.types.snapshot import ClusterSnapshot, Demand
from pengserve.planners.types.strategy import SwitchStrategy
from tests.planners.clusters import BLOCK_BYTES, BLOCK_SIZE, DP_TOKENS, NUM_BLOCKS, T0_S, WEIGHT_BLOCKS, snapshot, stats

CONFIG = DropConfig(max_stages=4)
PAIR = Group.parse("pp2@(0,1)")
DUE = RestoreHistory(
    since_s={PAIR: T0_S - 60}, low_since_s={Way(PAIR, alone(PAIR.members)): T0_S - 60}, seen_s=T0_S - 0.5
)


def pair(blocks: int = 10, longest: int = 0, **more: object) -> ClusterSnapshot:
    """One pipeline of two that holds so many blocks, among two instances that are alone."""
    load = stats("pp2", 4, blocks=blocks, longest_tokens=longest)
    return snapshot(4, "pp2@(0,1)", {0: load}, max_stages=4, **more)  # type: ignore[arg-type]


def plan(
    seen: ClusterSnapshot, history: RestoreHistory = DUE, claimed: set[int] | None = None
) -> tuple[RestorePlan | None, RestoreHistory]:
    demand, _ = predict_demand(seen, CONFIG, DemandHistory())
    return plan_restore(seen, demand, CONFIG, history, claimed=set(map(InstanceId, claimed or ())))


def when(blocks: list[int], tick_s: float = 0.5) -> list[float]:
    """Seconds after the first look at which a restore is planned, of a pipeline that held so many blocks then."""
    history, found = RestoreHistory(), []
    for i, used in enumerate(blocks):
        seen = pair(used, time_s=T0_S + i * tick_s, since_s=T0_S)
        restored, history = plan(seen, history)
        found += [i * tick_s] if restored is not None else []
    return found


@given(st.integers(0, 200))
def test_parameters_come_back_below_the_threshold_alone(blocks: int) -> None:
    restored, _ = plan(pair(blocks))
    assert (restored is not None) == (blocks < CONFIG.restore_below * 2 * NUM_BLOCKS)


def test_memory_must_have_been_plenty_for_a_while_and_the_pipeline_stand_for_a_dwell() -> None:
    assert when([10] * 8)[0] == CONFIG.min_dwell_s
    assert when([100] * 8 + [10] * 8)[0] == 8 * 0.5 + CONFIG.quiet_s
    assert when([100] * 8 + [10, 100] * 8) == []


def test_a_gap_between_looks_measures_anew() -> None:
    restored, history = plan(pair(), replace(DUE, seen_s=T0_S - max(GAP_S, CONFIG.quiet_s) - 0.1))
    assert restored is None and history.low_since_s == {Way(PAIR, alone(PAIR.members)): T0_S}


def test_looks_may_be_further_apart_than_memory_must_have_been_plenty() -> None:
    """A busy controller looks seldom; parameters come back all the same."""
    assert when([10] * 4, tick_s=1.5 * CONFIG.quiet_s)[0] == 3.0


@given(st.integers(0, 2 * NUM_BLOCKS), st.integers(0, NUM_BLOCKS))
def test_a_restore_overloads_no_member_whatever_the_lengths(blocks: int, longest: int) -> None:
    """The next look would drop again. The worst that can happen to the fullest member: all alike, and one more."""
    seen = pair(blocks, min(longest, blocks) * BLOCK_SIZE)
    restored, _ = plan(seen)
    if restored is not None:
        longest = min(longest, blocks)
        assert longest + (blocks - longest) / 2 <= CONFIG.drop_above * NUM_BLOCKS
        switch = make_plan(
            seen, {i.instance_id: i for i in seen.instances}, PAIR, False, SwitchStrategy.CARRY, restored.why
        )
        assert check_switch(switch, seen) == ()


def test_a_running_request_that_is_too_long_keeps_its_pipeline() -> None:
    assert plan(pair(10, DP_TOKENS + 1))[0] is None
    assert plan(pair(10, 10 * BLOCK_SIZE))[0] is not None


@pytest.mark.parametrize(("num_tokens", "is_kept"), [(0, False), (DP_TOKENS + 1, True), (99 * DP_TOKENS, False)])
def test_a_waiting_request_that_only_the_pipeline_holds_keeps_it(num_tokens: int, is_kept: bool) -> None:
    seen = pair(demands=[Demand(num_waiting=1, longest_waiting_tokens=num_tokens)])
    assert (plan(seen)[0] is None) == is_kept


def test_nothing_is_restored_while_memory_is_short_anywhere() -> None:
    loads = {0: stats("pp2", 1, blocks=10), 3: stats("dp", 9, blocks=NUM_BLOCKS)}
    assert plan(snapshot(4, "pp2@(0,1)", loads, max_stages=4))[0] is None


def test_claimed_members_stale_stats_and_lost_members_wait() -> None:
    assert plan(pair(), claimed={1})[0] is None
    stale = snapshot(4, "pp2@(0,1)", {0: stats("dp")}, max_stages=4)
    restored, history = plan(stale)
    assert restored is None and history.low_since_s == DUE.low_since_s, "what was known stands"
    assert plan(pair(without=[InstanceId(1)]))[0] is None


def test_the_cheapest_comes_first_and_ties_go_to_the_lowest_rank() -> None:
    text = "pp4@(0..3) pp2@(4,5) pp2@(6,7)"
    groups = [Group.parse(word) for word in text.split()]
    history = RestoreHistory(
        since_s=dict.fromkeys(groups, T0_S - 60),
        low_since_s={Way(g, alone(g.members)): T0_S - 60 for g in groups},
        seen_s=T0_S - 0.5,
    )

    def first(blocks: tuple[int, int, int]) -> str:
        loads = {g.leader: stats(g.shape, 1, blocks=b) for g, b in zip(groups, blocks, strict=True)}
        restored, _ = plan(snapshot(8, text, loads, max_stages=4), history)
        assert restored is not None
        return str(restored.group)

    assert first((0, 20, 10)) == "pp2@(6,7)"
    assert first((0, 20, 20)) == "pp2@(4,5)"
    assert first((0, 63, 99)) == "pp2@(4,5)", "three copies of the parameters cost more"
    assert first((0, 99, 99)) == "pp4@(0,1,2,3)", "the others are in use"


WIDE = Group.parse("pp4@(0..3)")
HALVES = halves_of(WIDE)


def wide(blocks: int, **more: object) -> ClusterSnapshot:
    """A pipeline of four that holds so many blocks."""
    return snapshot(4, "pp4@(0..3)", {0: stats("pp4", 4, blocks=blocks)}, max_stages=4, **more)  # type: ignore[arg-type]


def ends(blocks: int, low_for_s: dict[tuple[Group, ...], float], **more: object) -> str:
    """What the pipeline ends in, where memory has been plenty for so long for these ways."""
    low_since_s = {Way(WIDE, parts): T0_S - low_s for parts, low_s in low_for_s.items()}
    history = RestoreHistory(since_s={WIDE: T0_S - 60}, low_since_s=low_since_s, seen_s=T0_S - 0.5)
    restored, _ = plan(wide(blocks, **more), history)
    return "" if restored is None else " ".join(map(str, restored.parts or alone(WIDE.members)))


def test_a_pipeline_ends_in_its_halves_where_its_members_alone_would_be_too_small() -> None:
    long_ago = {alone(WIDE.members): 60.0, HALVES: 60.0}
    assert ends(100, long_ago) == "dp@(0) dp@(1) dp@(2) dp@(3)"
    assert ends(150, long_ago) == "pp2@(0,1) pp2@(2,3)"
    assert ends(170, long_ago) == "", "halves would be too small as well"
    assert ends(100, {alone(WIDE.members): 0.5, HALVES: 60.0}) == "", "soon all parameters may come back"


@given(st.integers(0, 400), st.integers(0, NUM_BLOCKS))
def test_halves_that_a_pipeline_ends_in_are_not_short_of_memory(blocks: int, longest: int) -> None:
    load = stats("pp4", 4, blocks=blocks, longest_tokens=min(longest, blocks) * BLOCK_SIZE)
    seen = snapshot(4, "pp4@(0..3)", {0: load}, max_stages=4)
    history = RestoreHistory(since_s={WIDE: T0_S - 60}, low_since_s={Way(WIDE, HALVES): T0_S - 60}, seen_s=T0_S - 0.5)
    restored, _ = plan(seen, history)
    if restored is not None and restored.parts:
        longest = min(longest, blocks)
        half = 2 * NUM_BLOCKS + WEIGHT_BLOCKS
        assert longest + (blocks - longest) / 2 <= CONFIG.drop_above * half
        instances = {i.instance_id: i for i in seen.instances}
        switch = make_plan(seen, instances, WIDE, False, SwitchStrategy.CARRY, restored.why, restored.parts)
        assert check_switch(switch, seen) == ()
        assert restored.weight_bytes == WEIGHT_BLOCKS * BLOCK_BYTES, "each of the four brings a quarter back"


def test_a_plan_tells_what_it_moves() -> None:
    restored, _ = plan(pair(20))
    assert restored is not None
    assert restored.weight_bytes == WEIGHT_BLOCKS * BLOCK_BYTES, "each of the two brings half of them back"
    assert restored.kv_bytes == 10 * BLOCK_BYTES, "half of each request's layers are on the other one"
    assert restored.why == (
        "memory: demand 0.16 of what its members hold alone for 60.0 s, 32.0 MiB of parameters come back"
    )


@given(st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_the_same_looks_plan_the_same_and_never_within_the_dwell(blocks: list[int]) -> None:
    found = when(blocks)
    assert found == when(blocks)
    assert all(at_s >= CONFIG.min_dwell_s for at_s in found)


def test_a_half_holds_what_its_narrowest_member_can() -> None:
    """The four alone hold 256 blocks, the halves 320, or less where one member of theirs has a narrower lane."""
    used = int(CONFIG.restore_below * 290)
    seen = snapshot(4, "pp4@(0..3)", {0: stats("pp4", 4, 0, used)}, max_stages=4)
    assert {way.is_alone for way in plan(seen)[1].low_since_s} == {False}
    narrow = tuple(
        replace(lane, capacity=replace(lane.capacity, num_blocks=70)) if lane.shape == "pp2" and lane.capacity else lane
        for lane in seen.instances[1].lanes
    )
    few = replace(seen.instances[1], lanes=narrow)
    seen = replace(seen, instances=(seen.instances[0], few, *seen.instances[2:]))
    assert plan(seen)[1].low_since_s == {}
