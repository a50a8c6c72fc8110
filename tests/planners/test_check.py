"""Each law that a switch can break is told in a sentence, and nothing else is."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.check import check_switch
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.layout import Group, GroupKind, Layout
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot, InstanceState, LaneInfo
from tests.planners.clusters import BLOCK_SIZE, DP_TOKENS, NUM_BLOCKS, WEIGHT_BLOCKS, snapshot, stats
from tests.support.layouts import check_layout


def switch(text: str, *, is_merge: bool, epoch: int = 7, parts: str = "") -> SwitchPlan:
    group = Group.parse(text)
    members = tuple(InstanceKey(instance_id=m, incarnation=1) for m in group.members)
    of = tuple(map(Group.parse, parts.split()))
    return SwitchPlan(plan_id="p", epoch=Epoch(epoch), group=group, members=members, is_merge=is_merge, parts=of)


def changed(
    seen: ClusterSnapshot, which: int, change: Callable[[InstanceSnapshot], InstanceSnapshot]
) -> ClusterSnapshot:
    return replace(seen, instances=tuple(change(i) if i.instance_id == which else i for i in seen.instances))


MERGE, SPLIT = switch("tp2@(0,1)", is_merge=True), switch("tp2@(0,1)", is_merge=False)
DROP, RESTORE = switch("pp2@(0,1)", is_merge=True), switch("pp2@(0,1)", is_merge=False)
APART, TOGETHER = snapshot(4, max_stages=2), snapshot(4, "tp2@(0,1)", max_stages=2)
PIPED = snapshot(4, "pp2@(0,1)", max_stages=2)


def test_a_sound_merge_and_a_sound_split_break_no_law() -> None:
    assert check_switch(MERGE, APART) == ()
    assert check_switch(SPLIT, TOGETHER) == ()
    assert check_switch(switch("tp2@(2,3)", is_merge=True), TOGETHER) == ()


def test_a_sound_drop_and_a_sound_restore_break_no_law() -> None:
    assert check_switch(DROP, APART) == ()
    assert check_switch(RESTORE, PIPED) == ()
    assert check_switch(switch("pp2@(2,3)", is_merge=True), PIPED) == ()
    assert check_switch(switch("pp2@(2,3)", is_merge=True), TOGETHER) == ()


@pytest.mark.parametrize("plan", [MERGE, SPLIT])
def test_a_stale_epoch_or_life_is_refused(plan: SwitchPlan) -> None:
    seen = APART if plan.is_merge else TOGETHER
    assert check_switch(replace(plan, epoch=Epoch(6)), seen) == (
        "the plan is for epoch 6, the layout is at 7: plan again",
    )
    reborn = changed(seen, 1, lambda i: replace(i, key=replace(i.key, incarnation=2)))
    assert check_switch(plan, reborn) == ("instance 1.1 was replaced by 1.2",)
    draining = changed(seen, 0, lambda i: replace(i, state=InstanceState.DRAINING))
    assert check_switch(plan, draining) == ("instance 0.1 is draining, not ready",)
    gone = replace(seen, instances=seen.instances[1:])
    assert "there is no instance 0" in check_switch(plan, gone)


def test_a_merge_needs_communicators_and_lanes() -> None:
    assert check_switch(MERGE, replace(APART, groups=())) == (
        "tp2@(0,1) cannot be formed now: its communicators are not ready",
    )
    no_lane = LaneInfo(shape="tp2", capacity=None, why_not="quantised")
    without = changed(APART, 1, lambda i: replace(i, lanes=(i.lanes[0], no_lane)))
    assert check_switch(MERGE, without) == ("instance 1 has no tp2 lane",)


def test_a_merge_takes_instances_that_are_alone() -> None:
    found = check_switch(switch("tp4@(0..3)", is_merge=True), TOGETHER)
    assert found == ("instance 0 is in tp2@(0,1): split that first", "instance 1 is in tp2@(0,1): split that first")
    homeless = replace(APART, layout=Layout(epoch=Epoch(7), groups=APART.layout.groups[1:]))
    assert check_switch(MERGE, homeless) == ("instance 0 is in no group of the layout",)


def test_a_split_ends_a_group_of_the_layout() -> None:
    assert check_switch(SPLIT, APART) == ("tp2@(0,1) is not in the layout",)


@given(st.integers(0, 2 * DP_TOKENS))
def test_a_split_waits_for_a_request_that_fits_nowhere_else(longest: int) -> None:
    seen = snapshot(4, "tp2@(0,1)", {0: stats("tp2", 1, longest_tokens=longest)})
    assert bool(check_switch(SPLIT, seen)) == (longest > DP_TOKENS)


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_a_layout_holds_every_instance_and_nobody_else(grouped: set[int], there: set[int]) -> None:
    layout = Layout.all_dp(tuple(map(InstanceId, grouped)), Epoch(0))
    found = check_layout(layout, map(InstanceId, there))
    assert len(found) == len(grouped ^ there)


def test_a_plan_and_its_inverse_lead_back() -> None:
    assert MERGE.inverse.epoch == MERGE.epoch + 1
    after = replace(TOGETHER, layout=replace(TOGETHER.layout, epoch=MERGE.inverse.epoch))
    assert check_switch(MERGE.inverse, after) == ()


def test_a_drop_needs_communicators_and_lanes_of_its_own() -> None:
    tp_alone = replace(APART, groups=tuple(g for g in APART.groups if g.kind is GroupKind.TP))
    assert check_switch(DROP, tp_alone) == ("pp2@(0,1) cannot be formed now: its communicators are not ready",)
    no_lane = LaneInfo(shape="pp2", capacity=None, why_not="one layer")
    without = changed(APART, 1, lambda i: replace(i, lanes=(i.lanes[0], no_lane)))
    assert check_switch(DROP, without) == ("instance 1 has no pp2 lane",)


def test_each_kind_of_group_must_end_before_its_members_begin_another() -> None:
    assert check_switch(DROP, TOGETHER)[0] == "instance 0 is in tp2@(0,1): split that first"
    assert check_switch(MERGE, PIPED)[0] == "instance 0 is in pp2@(0,1): restore that first"
    assert check_switch(RESTORE, TOGETHER) == ("pp2@(0,1) is not in the layout",)
    assert check_switch(SPLIT, PIPED) == ("tp2@(0,1) is not in the layout",)


@given(st.integers(0, 2 * DP_TOKENS))
def test_a_restore_waits_for_a_request_that_fits_nowhere_else(longest: int) -> None:
    seen = snapshot(4, "pp2@(0,1)", {0: stats("pp2", 1, longest_tokens=longest)}, max_stages=2)
    assert bool(check_switch(RESTORE, seen)) == (longest > DP_TOKENS)


@given(st.lists(st.integers(1, NUM_BLOCKS), max_size=20))
def test_what_may_be_restored_has_room_in_the_members(blocks: list[int]) -> None:
    """Given to the member with most room, whatever the order, none is left over."""
    longest = max(blocks, default=0) * BLOCK_SIZE
    load = stats("pp2", len(blocks), blocks=sum(blocks), longest_tokens=longest)
    if not check_switch(RESTORE, snapshot(4, "pp2@(0,1)", {0: load}, max_stages=2)):
        left = [NUM_BLOCKS, NUM_BLOCKS]
        for wanted in blocks:
            left[left.index(max(left))] -= wanted
        assert min(left) >= 0


def test_a_restore_waits_for_requests_that_do_not_all_fit_and_for_stats_of_the_pipeline() -> None:
    full = snapshot(4, "pp2@(0,1)", {0: stats("pp2", 9, blocks=2 * NUM_BLOCKS + 1)}, max_stages=2)
    assert "holds 129 blocks" in check_switch(RESTORE, full)[0]
    stale = snapshot(4, "pp2@(0,1)", {0: stats("dp")}, max_stages=2)
    assert len(check_switch(RESTORE, stale)) == 1


# Pipelines of pipelines

WIDE = snapshot(4, "pp4@(0..3)", max_stages=4)
HALVES = {
    "pp2@(0,1) pp2@(2,3)": "pp2@(0,1) pp2@(2,3)",
    "pp2@(0,1)": "pp2@(0,1) dp@(2) dp@(3)",
    "pp2@(2,3)": "dp@(0) dp@(1) pp2@(2,3)",
}


@pytest.mark.parametrize(("layout", "parts"), HALVES.items())
def test_a_pipeline_may_be_formed_of_narrower_ones_and_end_in_them(layout: str, parts: str) -> None:
    grow = switch("pp4@(0..3)", is_merge=True, parts=parts)
    assert check_switch(grow, snapshot(4, layout, max_stages=4)) == ()
    assert check_switch(grow.inverse, replace(WIDE, layout=replace(WIDE.layout, epoch=Epoch(8)))) == ()


def test_a_pipeline_is_formed_of_what_runs_and_of_nothing_else() -> None:
    apart, pairs = snapshot(4, max_stages=4), snapshot(4, "pp2@(0,1) pp2@(2,3)", max_stages=4)
    found = check_switch(switch("pp4@(0..3)", is_merge=True), pairs)
    assert found[0] == "instance 0 is in pp2@(0,1): restore that first" and len(found) == 4
    found = check_switch(switch("pp4@(0..3)", is_merge=True, parts="pp2@(0,1) dp@(2) dp@(3)"), apart)
    assert found[0] == "instance 0 is alone, and the plan is for what it ran with others: plan again"


def test_pipelines_that_do_not_nest_are_no_parts() -> None:
    seen = snapshot(4, "pp2@(1,2)", max_stages=4)
    plan = switch("pp4@(0..3)", is_merge=True, parts="dp@(0) pp2@(1,2) dp@(3)")
    assert check_switch(plan, seen) == (
        "dp@(0) pp2@(1,2) dp@(3) do not nest in pp4@(0,1,2,3): each must be a half of it, or of a half",
    )


@pytest.mark.parametrize("layout", ["tp2@(0,1)", "tp2@(2,3)", "tp2@(0,1) tp2@(2,3)"])
def test_a_merge_takes_narrower_groups_and_ends_in_instances_alone(layout: str) -> None:
    seen = snapshot(4, layout)
    parts = " ".join(map(str, seen.layout.groups))
    grow = switch("tp4@(0..3)", is_merge=True, parts=parts)
    assert check_switch(grow, seen) == ()
    wide = snapshot(4, "tp4@(0..3)")
    after = replace(wide, layout=replace(wide.layout, epoch=grow.inverse.epoch))
    assert check_switch(grow.inverse, after) == () and all(part.degree == 1 for part in grow.inverse.parts)
    with pytest.raises(ValueError, match="ends in its members alone"):
        switch("tp4@(0..3)", is_merge=False, parts=parts)


@pytest.mark.parametrize("parts", ["pp2@(0,1)", "pp2@(0,1) dp@(3) dp@(2)", "tp2@(0,1) dp@(2) dp@(3)", "pp4@(0..3)"])
def test_what_are_no_parts_of_a_group_is_no_plan(parts: str) -> None:
    with pytest.raises(ValueError, match=r"pp4@\(0,1,2,3\)"):
        switch("pp4@(0..3)", is_merge=True, parts=parts)


def test_a_pipeline_ends_in_halves_that_are_ready_and_have_room() -> None:
    plan = switch("pp4@(0..3)", is_merge=False, parts="pp2@(0,1) pp2@(2,3)")
    blocks = 2 * (2 * NUM_BLOCKS + WEIGHT_BLOCKS)
    assert check_switch(plan, snapshot(4, "pp4@(0..3)", {0: stats("pp4", 9, blocks=blocks)}, max_stages=4)) == ()
    full = snapshot(4, "pp4@(0..3)", {0: stats("pp4", 9, blocks=blocks + 1)}, max_stages=4)
    assert "may not have room" in check_switch(plan, full)[0]
    long = snapshot(4, "pp4@(0..3)", {0: stats("pp4", 1, longest_tokens=9 * DP_TOKENS)}, max_stages=4)
    assert "and pp2@(0,1) holds" in check_switch(plan, long)[0]
    without = replace(WIDE, groups=tuple(g for g in WIDE.groups if str(g) != "pp2@(2,3)"))
    assert check_switch(plan, without) == ("pp2@(2,3) cannot be formed now: its communicators are not ready",)
