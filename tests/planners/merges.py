"""What the tests of the merge planner share: one look, and random ones."""

from hypothesis import strategies as st

from pengserve.planners.merge.history import LoadHistory, Reason, StandingGroup
from pengserve.planners.types.config import MergeConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import ClusterSnapshot, Demand
from tests.planners.clusters import DP_TOKENS, T0_S, plan_switch, snapshot, stats

CONFIG = MergeConfig()
DWELL_S, QUIET_S = CONFIG.min_dwell_s, CONFIG.quiet_s


def plan(seen: ClusterSnapshot, history: LoadHistory | None = None, config: MergeConfig = CONFIG) -> SwitchPlan | None:
    return plan_switch(seen, config, history or LoadHistory())[0]


def what(found: SwitchPlan | None) -> str:
    return "" if found is None else f"{'merge' if found.is_merge else 'split'} {found.group}"


def running_group(text: str, reason: Reason, since_s: float = T0_S - 50) -> LoadHistory:
    return LoadHistory(
        running_groups={Group.parse(text): StandingGroup(since_s=since_s, reason=reason)}, seen_s=T0_S - 0.5
    )


LAYOUTS = ["", "tp2@(0,1)", "tp2@(2,3)", "tp2@(0,1) tp2@(2,3)", "tp4@(0..3)", "tp4@(4..7)", "tp2@(0,1) tp4@(4..7)"]
LAYOUTS += ["pp2@(0,1)", "pp2@(0,1) tp2@(2,3)", "tp2@(0,1) pp4@(4..7)"]
SMALL = [layout for layout in LAYOUTS if "4.." not in layout]
DEMANDS = st.builds(
    Demand,
    longest_waiting_tokens=st.sampled_from([0, 0, DP_TOKENS, DP_TOKENS + 1, 3 * DP_TOKENS, 9 * DP_TOKENS]),
    wanted_degrees=st.sampled_from([(), (), ((1, 1),), ((2, 1),), ((4, 2),), ((1, 1), (4, 1)), ((2, 1), (8, 1))]),
    num_priority=st.integers(0, 1),
)


@st.composite
def snapshots(draw: st.DrawFn, num_instances: int = 0, time_s: float = T0_S) -> ClusterSnapshot:
    n = num_instances or draw(st.sampled_from([1, 2, 4, 8]))
    layout = draw(st.sampled_from(LAYOUTS if n == 8 else SMALL if n == 4 else LAYOUTS[:n]))
    shape = {m: g.shape for g in map(Group.parse, layout.split()) for m in g.members}
    loads = {
        i: stats(
            draw(st.sampled_from([shape.get(InstanceId(i), "dp")] * 3 + ["dp"])),
            draw(st.sampled_from([0, 0, 1, 3, 30])),
            draw(st.sampled_from([0, 0, 1, 9])),
            draw(st.integers(0, 64)),
            longest_tokens=draw(st.sampled_from([0, 100, DP_TOKENS, DP_TOKENS + 1])),
            num_paused=draw(st.sampled_from([0, 0, 0, 2])),
        )
        for i in range(n)
    }
    without = draw(st.lists(st.integers(0, n - 1), max_size=1))
    return snapshot(
        n,
        layout,
        loads,
        demands=draw(st.lists(DEMANDS, max_size=2)),
        time_s=time_s,
        since_s=time_s - draw(st.sampled_from([0.0, 0.5, 3.0, 100.0])),
        degrees=(2, 4, 8),
        without=[InstanceId(i) for i in without],
        max_stages=4,
    )


@st.composite
def looks(draw: st.DrawFn) -> list[ClusterSnapshot]:
    """What a controller might see in a row, also if layout and load jump."""
    n = draw(st.sampled_from([2, 4, 8]))
    gaps = draw(st.lists(st.sampled_from([0.1, 0.5, 2.0, 6.0]), min_size=1, max_size=6))
    return [draw(snapshots(n, T0_S + sum(gaps[: i + 1]))) for i in range(len(gaps))]
