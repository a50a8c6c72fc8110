"""What the live page is told: a delta leads from one view to the next, and sizes are those of the shape that runs."""

import asyncio
import json
from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from pengserve.cluster.ui.view import apply_delta, delta_of, view_of
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceState
from tests.support.simulated import SimulatedCluster


def snapshot(num_instances: int, groups: str = "", **changes: object) -> ClusterSnapshot:
    cluster = SimulatedCluster(num_instances, groups=groups)
    for name, value in changes.items():
        setattr(cluster, name, value)
    return asyncio.run(cluster.snapshot())


@st.composite
def snapshots(draw: st.DrawFn) -> ClusterSnapshot:
    count = draw(st.integers(0, 6))
    groups = draw(st.sampled_from(["", "tp2@(0,1)", "pp2@(0,1)", "tp2@(2,3)"])) if count >= 4 else ""
    states = draw(st.dictionaries(st.integers(0, 5), st.sampled_from(InstanceState)))
    return snapshot(count, groups, num_looks=draw(st.integers(0, 90)), states=states)


@given(snapshots(), snapshots())
def test_a_delta_leads_from_one_view_to_the_next(before: ClusterSnapshot, after: ClusterSnapshot) -> None:
    old, new = view_of(before), view_of(after)
    assert apply_delta(old, json.loads(json.dumps(delta_of(old, new)))) == json.loads(json.dumps(new))


def test_what_is_as_it_was_is_not_told() -> None:
    view = view_of(snapshot(4, "tp2@(0,1)"))
    assert delta_of(view, view) == {}
    one_more = {**view["instances"]["2"], "running": 99}
    assert delta_of(view, view | {"instances": view["instances"] | {"2": one_more}}) == {
        "instances": {"2": {"running": 99}}
    }


def test_a_pipeline_holds_half_of_the_weights_and_has_the_rest_for_kv() -> None:
    alone, dropped = view_of(snapshot(2)), view_of(snapshot(2, "pp2@(0,1)"))
    for name in ("0", "1"):
        before, after = alone["instances"][name], dropped["instances"][name]
        assert after["weights"] * 2 == before["weights"]
        assert after["weights"] + after["kv"] == before["weights"] + before["kv"]
    follower = dropped["instances"]["1"]
    assert follower["leader"] == 0 and follower["kv_used"] == dropped["instances"]["0"]["kv_used"]


def test_a_member_that_leaves_its_group_is_told_as_leaving() -> None:
    view = view_of(replace(snapshot(2, "tp2@(0,1)"), leaving=(1,)))
    assert [view["instances"][name]["leaving"] for name in ("0", "1")] == [False, True]


def test_parked_requests_are_not_counted_as_waiting_too() -> None:
    told = snapshot(1)
    (instance,) = told.instances
    stats = replace(instance.stats, num_waiting=5, num_parked=3)
    view = view_of(replace(told, instances=(replace(instance, stats=stats),)))
    assert (view["instances"]["0"]["waiting"], view["instances"]["0"]["parked"]) == (2, 3)


def test_no_field_of_a_view_can_hold_a_text_of_a_request() -> None:
    """Texts in a view are names, states and reasons of the controller: no snapshot has any other."""
    texts = {f.name for f in fields(ClusterSnapshot) if f.type in ("str", str)}
    assert texts == {"app"}
