"""Laws of one look of the merge planner."""

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.load import ClusterView
from pengserve.planners.merge.history import LoadHistory
from pengserve.planners.merge.look import Look
from pengserve.planners.types.layout import Group
from pengserve.planners.types.snapshot import ClusterSnapshot
from pengserve.planners.urgency import ANY_GROUP
from tests.planners.clusters import snapshot
from tests.planners.merges import CONFIG, snapshots


def look_at(seen: ClusterSnapshot) -> Look:
    view = ClusterView.of(seen, CONFIG.busy_requests)
    return Look(view=view, config=CONFIG, history=LoadHistory(), claimed={}, urgency=ANY_GROUP)


@given(snapshots(), st.sampled_from([2, 4, 8]), st.data())
def test_the_least_costly_group_is_that_of_all(seen: ClusterSnapshot, degree: int, data: st.DataObject) -> None:
    """Though few are looked at."""
    look = look_at(seen)
    groups = [group for group in look.view.tp_groups if group.degree == degree]
    able = set(data.draw(st.lists(st.sampled_from(groups)))) if groups else set()
    found = look.least_costly(degree, able.__contains__)
    assert found == min(able, key=look.cost, default=None)


def test_of_idle_groups_one_is_looked_at() -> None:
    asked = list[Group]()
    assert look_at(snapshot(64, "", degrees=(2,))).least_costly(2, lambda group: not asked.append(group))
    assert asked == [Group.parse("tp2@(0,1)")]
