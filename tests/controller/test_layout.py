"""Laws of the layout, over merges, splits, late answers and deaths; and how it is read from what instances say."""

import time
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pengserve.controller import directory, recovery, routes
from pengserve.controller import layout as layouts
from pengserve.controller import state as transitions
from pengserve.controller.events import EventDraft
from pengserve.controller.slots import DrainEnded, Gone, Killed, Observation, Slot
from pengserve.controller.state import ClusterState, Transition
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.errors import FenceError
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.layout import Group, GroupKind, parse_groups
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import DeviceInfo, InstanceSnapshot, InstanceState
from tests.controller.fakes import FIRST, answer, life
from tests.support.effort import examples
from tests.support.layouts import check_layout

CONFIG = ControllerConfig(app="laws", num_instances=4, lost_after_s=1000, degrees=(2, 4), restart_backoff_s=0.5)
GROUPS = parse_groups("tp2@(0,1)") + parse_groups("tp2@(2,3)") + parse_groups("tp4@(0..3)")


class LayoutLaws(RuleBasedStateMachine):
    """The world is what each living instance runs; the layout must follow it, whatever comes late or never."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.epochs_told: list[int] = []
        self.world: dict[InstanceKey, InstanceSnapshot] = {}
        self.under_way: list[InstanceSnapshot] = []  # answers that were given and have not arrived
        self.plans = 0
        self.done: dict[str, SwitchReport] = {}  # plans under way that were committed, unknown to the controller
        self.state = transitions.empty(CONFIG, version=FIRST, epoch=Epoch(100))
        self.apply(transitions.create(self.state, [InstanceId(i) for i in range(4)], "begin", 0))
        for slot in self.state.slots:
            self.world[slot.key] = answer(slot.key, InstanceState.READY, degrees=CONFIG.degrees)
        self.hear_all()

    def apply(self, transition: Transition) -> None:
        before, self.state = self.state, transition.state
        told = [change for change in transition.changes if change.kind is EventKind.LAYOUT_CHANGED]
        assert all(change.why for change in told)
        self.epochs_told += [change.data["epoch"] for change in told]
        if told:
            assert self.state.layout.epoch == told[-1].data["epoch"] > before.layout.epoch
        else:
            assert self.state.layout is before.layout
        if self.state.layout is not before.layout:
            assert self.state.routing.version > before.routing.version
            assert self.state.routing.epoch == self.state.layout.epoch

    def observe(self, *seen: tuple[InstanceKey, Observation]) -> None:
        self.now_s += 0.1
        self.apply(transitions.observe(self.state, seen, self.now_s))

    def hear_all(self) -> None:
        """Every instance answers now."""
        self.observe(*((key, said) for key, said in self.world.items()))

    def is_together(self, group: Group) -> bool:
        """Whether all the members run `group`."""
        mine = [said for key, said in self.world.items() if key.instance_id in group.members]
        return len(mine) == len(group.members) and all(said.lane == str(group) for said in mine)

    @rule(data=st.data())
    def an_answer_sets_out(self, data: st.DataObject) -> None:
        if self.world:
            self.under_way.append(self.world[data.draw(st.sampled_from(sorted(self.world)))])

    @rule()
    def answers_arrive(self) -> None:
        """In the order they were given, one of each instance: a second call waits for the first."""
        newest = {said.key: said for said in self.under_way}
        self.under_way.clear()
        before = set(self.state.layout.groups)
        kept = {group for group in before if self.is_together(group)}
        for switch in self.state.switches:
            if all(self.state.slots[i].ready is not None for i in switch.group.members):
                kept |= {group for group in before if set(group.members) & set(switch.group.members)}
        self.observe(*((key, said) for key, said in newest.items()))
        if all(slot.ready is not None for slot in self.state.slots):
            assert kept <= set(self.state.layout.groups), "late words end no group that runs, nor a switch"

    @rule(group=st.sampled_from(GROUPS), late=st.booleans())
    def a_switch_begins(self, group: Group, late: bool) -> None:
        slots = [self.state.slots[member] for member in group.members]
        is_merge = group not in self.state.layout.groups
        self.plans += 1
        plan = SwitchPlan(
            plan_id=str(self.plans),
            epoch=Epoch(self.state.layout.epoch - late),
            group=group,
            members=tuple(slot.key for slot in slots),
            is_merge=is_merge,
            why="wanted",
        )
        stands = all(part in self.state.layout.groups for part in plan.before)
        if late or not stands or not all(plan.is_apart(other) for other in self.state.switches):
            with pytest.raises(FenceError):
                transitions.begin_switch(self.state, plan)
            return
        if all(slot.ready for slot in slots):
            self.apply(transitions.begin_switch(self.state, plan))

    def a_switch(self, data: st.DataObject, *, is_done: bool) -> SwitchPlan | None:
        """One of those under way whose members have committed it, or have not."""
        able = [plan for plan in self.state.switches if (plan.plan_id in self.done) is is_done]
        return data.draw(st.sampled_from(able)) if able else None

    @rule(data=st.data())
    def the_members_commit(self, data: st.DataObject) -> None:
        plan = self.a_switch(data, is_done=False)
        if plan is None or any(key not in self.world for key in plan.members):
            return
        if not plan.is_merge and not self.is_together(plan.group):
            return
        if any(self.world[key].epoch > plan.epoch for key in plan.members):
            return  # its fence: it has committed what this controller has not heard of
        epoch = Epoch(plan.epoch + 1)
        for key in plan.members:
            lane = str(plan.group) if plan.is_merge else "dp"
            self.world[key] = replace(self.world[key], lane=lane, epoch=epoch)
        self.done[plan.plan_id] = SwitchReport(plan_id=plan.plan_id, epoch=epoch)

    @rule(data=st.data())
    def a_switch_ends(self, data: st.DataObject) -> None:
        plan = self.a_switch(data, is_done=True)
        if plan is not None:
            others = [other for other in self.state.switches if other is not plan]
            self.apply(transitions.end_switch(self.state, plan, self.done[plan.plan_id], {}, self.now_s))
            assert list(self.state.switches) == others

    @rule(data=st.data(), group=st.sampled_from(GROUPS))
    def a_whole_switch(self, data: st.DataObject, group: Group) -> None:
        self.a_switch_begins(group, late=False)
        self.the_members_commit(data)
        self.a_switch_ends(data)

    @rule(data=st.data())
    def a_switch_fails_or_its_end_is_lost(self, data: st.DataObject) -> None:
        if self.state.switches:
            self.fail(data.draw(st.sampled_from(self.state.switches)))

    def fail(self, plan: SwitchPlan) -> None:
        """It undoes only itself: what others have formed, and what they are about, stands."""
        others = [other for other in self.state.switches if other is not plan]
        kept = {
            group
            for other in others
            for group in self.state.layout.groups
            if set(group.members) & set(other.group.members)
        }
        self.apply(transitions.fail_switch(self.state, plan, "no answer", self.now_s))
        assert list(self.state.switches) == others
        if all(slot.ready is not None for slot in self.state.slots):
            assert kept <= set(self.state.layout.groups)

    @rule(data=st.data(), seen=st.booleans())
    def an_instance_dies(self, data: st.DataObject, seen: bool) -> None:
        if not self.world:
            return
        key = data.draw(st.sampled_from(sorted(self.world)))
        lane = self.world.pop(key).lane
        for other, said in self.world.items():
            if lane != "dp" and said.lane == lane:
                self.world[other] = replace(said, lane="dp")
        if seen:
            self.observe((key, Gone("SIGKILL")))

    @rule()
    def slots_are_filled(self) -> None:
        gone = [slot.key for slot in self.state.slots if slot.alive and slot.key not in self.world]
        self.observe(*((key, Gone("SIGKILL")) for key in gone))
        self.observe(*((key, Killed()) for slot in self.state.slots for key in slot.doomed))
        self.now_s += 100
        actions = transitions.plan(self.state, self.now_s)
        if actions.replace is not None:
            self.apply(transitions.create(self.state, actions.replace.slots, "again", self.now_s))
            for instance_id in actions.replace.slots:
                key = self.state.slots[instance_id].key
                self.world[key] = answer(key, InstanceState.READY, degrees=CONFIG.degrees)

    @rule()
    def a_new_controller_comes(self) -> None:
        """It knows nothing but what the instances say, and its clock may stand still."""
        self.under_way.clear()
        newest = [slot.key for slot in self.state.slots]
        state = transitions.empty(CONFIG, version=self.state.routing.version.next, epoch=Epoch(101))
        self.state = transitions.adopt(state, dict(self.world), [], newest, self.now_s).state
        assert all(self.state.layout.epoch >= said.epoch for said in self.world.values())
        assert not self.state.switches
        self.epochs_told = [self.state.layout.epoch]
        self.follows_the_world()

    @rule()
    def quiet(self) -> None:
        """Once all has been heard, and nothing is under way, the layout is what the instances run."""
        for plan in self.state.switches:
            self.fail(plan)
        self.under_way.clear()
        self.slots_are_filled()
        self.hear_all()
        self.hear_all()
        self.follows_the_world()

    def follows_the_world(self) -> None:
        wide = {str(group) for group in self.state.layout.groups if group.kind is GroupKind.TP}
        assert wide == {str(group) for group in GROUPS if self.is_together(group)}

    @invariant()
    def every_instance_is_in_one_group(self) -> None:
        assert check_layout(self.state.layout, range(4)) == ()  # type: ignore[arg-type]

    @invariant()
    def a_group_has_all_its_members(self) -> None:
        for group in self.state.layout.groups:
            if group.kind is GroupKind.TP:
                assert all(self.state.slots[member].ready is not None for member in group.members)

    @invariant()
    def no_instance_is_in_two_switches(self) -> None:
        members = [member for plan in self.state.switches for member in plan.group.members]
        assert len(members) == len(set(members))

    @invariant()
    def each_epoch_is_told_once(self) -> None:
        assert self.epochs_told == sorted(set(self.epochs_told))

    @invariant()
    def requests_go_to_leaders_alone(self) -> None:
        leaders = {group.leader for group in self.state.layout.groups}
        assert {route.key.instance_id for route in self.state.routing.routes} <= leaders
        ready = {slot.key for slot in self.state.slots if slot.ready is not None}
        assert {address.key for address in self.state.routing.addresses} == ready
        parts = [routes.part(slot) for slot in self.state.slots]
        anew = routes.table(self.state.routing, parts, self.state.layout, (), is_draining=self.state.closing)
        assert anew.routes == self.state.routing.routes


LayoutLaws.TestCase.settings = settings(max_examples=examples(250), stateful_step_count=40)
TestLayoutLaws = LayoutLaws.TestCase


def slots(lanes: Sequence[str], epoch: int = 7) -> list[Slot]:
    """READY slots that say they run `lanes`."""
    said = [answer(life(i), InstanceState.READY, degrees=CONFIG.degrees) for i in range(len(lanes))]
    return [
        Slot(key=a.key, state=InstanceState.READY, snapshot=replace(a, lane=lane, epoch=Epoch(epoch)))
        for a, lane in zip(said, lanes, strict=True)
    ]


def started(config: ControllerConfig, place: str = "") -> ClusterState:
    """All slots READY; `place` gives their nodes, one letter a slot."""
    state = transitions.empty(config, version=FIRST, epoch=Epoch(1))
    ids = [slot.key.instance_id for slot in state.slots]
    state = transitions.create(state, ids, "begin", 0).state
    seen: list[tuple[InstanceKey, Observation]] = []
    for slot in state.slots:
        i = slot.key.instance_id
        device = DeviceInfo(node_id=place[i] if place else "n", device=f"cuda:{i}")
        said = answer(slot.key, InstanceState.READY, degrees=config.degrees)
        seen.append((slot.key, replace(said, device=device)))
    return transitions.observe(state, seen, 0).state


def connected(state: ClusterState, broken: frozenset[str] = frozenset()) -> list[tuple[InstanceKey, Observation]]:
    """What the instances say once they have the directory."""
    seen: list[tuple[InstanceKey, Observation]] = []
    names: dict[InstanceKey, list[str]] = {slot.key: [] for slot in state.slots}
    for spec, name in zip(state.wiring.directory.groups, state.wiring.names, strict=True):
        for key in spec.members:
            names[key].append(name)
    for slot in state.slots:
        if slot.snapshot is not None:
            ready = tuple(name for name in names[slot.key] if name not in broken)
            failed = tuple(name for name in names[slot.key] if name in broken)
            said = replace(slot.snapshot, groups_ready=ready, groups_failed=failed)
            seen.append((slot.key, said))
    return seen


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        (["dp", "dp"], "dp@(0), dp@(1)"),
        (["tp2@(0,1)", "tp2@(0,1)"], "tp2@(0,1)"),
        (["tp2@(0,1)", "dp"], "dp@(0), dp@(1)"),
        (["tp2@(0,7)", "tp2@(0,7)"], "dp@(0), dp@(1)"),
        (["what is that", "tp2@(0"], "dp@(0), dp@(1)"),
        (["tp2@(0,1)", "tp2@(0,1)", "tp2@(2,3)", "dp"], "tp2@(0,1), dp@(2), dp@(3)"),
    ],
)
def test_a_group_is_what_all_its_members_say_they_run(lanes: list[str], expected: str) -> None:
    members = slots(lanes)
    alone = layouts.Layout.all_dp(tuple(slot.key.instance_id for slot in members), Epoch(7))
    layout, _ = layouts.follow(alone, members)
    assert layouts.describe(layout) == expected
    assert layouts.follow(alone, members, busy=range(9))[0] is alone  # type: ignore[arg-type]


def test_words_from_before_a_switch_count_for_nothing() -> None:
    said = slots(["dp", "dp"], epoch=7)
    group = layouts.Layout(epoch=Epoch(8), groups=parse_groups("tp2@(0,1)"))
    assert layouts.follow(group, [replace(slot, switched=Epoch(8)) for slot in said])[0] is group
    assert layouts.follow(group, said)[0] is not group


def test_an_epoch_that_an_instance_knows_is_never_given_out_again() -> None:
    alone = layouts.Layout.all_dp((InstanceId(0), InstanceId(1)), Epoch(7))
    layout, why = layouts.follow(alone, slots(["dp", "dp"], epoch=30))
    assert layout.epoch == 31 and why
    assert layouts.follow(alone, slots(["dp", "dp"], epoch=30), alone.groups[0].members)[0].epoch == 31
    both = [InstanceId(0), InstanceId(1)]
    assert layouts.follow(alone, slots(["dp", "dp"], epoch=30), both)[0] is alone, "the ends of their switches tell"


def test_a_new_controller_begins_above_all_that_was_committed() -> None:
    state = transitions.empty(replace(CONFIG, num_instances=2), version=FIRST, epoch=Epoch(5))
    living = {slot.key: slot.snapshot for slot in slots(["tp2@(0,1)", "tp2@(0,1)"], epoch=40)}
    adopted = transitions.adopt(state, living, [], [], 0).state
    assert adopted.layout.epoch == 41 and layouts.describe(adopted.layout) == "tp2@(0,1)"
    assert [route.shape for route in adopted.routing.routes] == ["tp2"]


def test_a_follower_that_the_layout_takes_for_a_lone_instance_gets_no_requests() -> None:
    """A leader that has not answered a new controller yet may still lead."""
    living = {slot.key: slot.snapshot for slot in slots(["tp2@(0,1)", "tp2@(0,1)"])}
    living[life(0)] = None
    state = transitions.empty(replace(CONFIG, num_instances=2), version=FIRST, epoch=Epoch(5))
    assert transitions.adopt(state, living, [], [], 0).state.routing.routes == ()


def test_groups_are_runs_of_neighbours_on_a_node() -> None:
    state = started(CONFIG, place="abab")
    assert [str(s.group) for s in state.wiring.directory.groups] == ["tp2@(0,2)", "tp2@(1,3)"]
    state = transitions.observe(state, connected(state), 1).state
    snapshot = transitions.snapshot(state, time_s=0, started_s=0)
    assert [str(group) for group in snapshot.groups] == ["tp2@(0,2)", "tp2@(1,3)"]
    assert snapshot.ranks == (0, 2, 1, 3) and state.routing.max_model_len == 2048


def test_a_group_that_runs_keeps_its_communicators_where_ranks_shift_under_it() -> None:
    state = started(CONFIG)
    group = GROUPS[1]
    plan = SwitchPlan(
        plan_id="1", epoch=state.layout.epoch, group=group, members=(life(2), life(3)), is_merge=True, why="x"
    )
    state = transitions.begin_switch(state, plan).state
    state = transitions.end_switch(state, plan, SwitchReport(plan_id="1", epoch=Epoch(2)), {}, 1).state
    elsewhere = replace(answer(life(1, 2), InstanceState.READY, degrees=CONFIG.degrees), device=DeviceInfo(node_id="z"))
    state = transitions.observe(state, [(life(1), Gone("SIGKILL")), (life(1), Killed())], 2).state
    state = transitions.create(state, [InstanceId(1)], "again", 2).state
    state = transitions.observe(state, [(life(1, 2), elsewhere)], 2).state
    assert state.wiring.topology.ranks == (0, 2, 3, 1)
    assert [str(spec.group) for spec in state.wiring.directory.groups] == ["tp2@(0,2)", "tp2@(2,3)"]


def test_an_empty_slot_keeps_its_rank_and_no_ready_group_has_it() -> None:
    state = started(CONFIG)
    state = transitions.observe(state, connected(state), 1).state
    state = transitions.observe(state, [(life(1), Gone("SIGKILL"))], 2).state
    snapshot = transitions.snapshot(state, time_s=0, started_s=0)
    assert snapshot.ranks == (0, 1, 2, 3) and [str(g) for g in snapshot.groups] == ["tp2@(2,3)"]
    assert state.routing.max_model_len == 4096, "the slot is filled again, and then a long request fits"


def test_no_groups_before_all_slots_have_a_place_but_not_for_ever() -> None:
    state = transitions.empty(CONFIG, version=FIRST, epoch=Epoch(1))
    state = transitions.create(state, [InstanceId(i) for i in range(4)], "begin", 0).state
    three: list[tuple[InstanceKey, Observation]] = [
        (life(i), answer(life(i), InstanceState.READY, degrees=CONFIG.degrees)) for i in (0, 1, 3)
    ]
    state = transitions.observe(state, three, 1).state
    assert len(state.wiring.directory.peers) == 3 and state.wiring.directory.groups == ()
    state = transitions.observe(state, [], 2 + directory.PLACE_PATIENCE_S).state
    assert [str(s.group) for s in state.wiring.directory.groups] == ["tp2@(0,1)"]


def test_a_failed_group_waits_longer_each_time_and_never_uses_a_name_twice() -> None:
    state, now_s, waits = started(CONFIG), 0.0, []
    seen_names = set()
    for _ in range(4):
        name = state.wiring.names[0]
        assert name not in seen_names
        seen_names.add(name)
        state = transitions.observe(state, connected(state, frozenset({name})), now_s).state
        began_s = now_s
        while state.wiring.names[0] == name:
            now_s += 0.25
            state = transitions.observe(state, [], now_s).state
        waits.append(now_s - began_s)
    assert waits == [0.5, 1, 2, 4]


def test_a_new_controller_goes_on_with_the_rounds() -> None:
    said = {slot.key: slot.snapshot for slot in slots(["dp", "dp"])}
    ready, failed = "tp2@(0,1)/0.1-1.1/3", "tp2@(0,1)/0.1-1.1/2"
    living = {k: replace(s, groups_ready=(ready,), groups_failed=(failed,)) for k, s in said.items() if s is not None}
    state = transitions.empty(replace(CONFIG, num_instances=2), version=FIRST, epoch=Epoch(5))
    assert transitions.adopt(state, living, [], [], 0).state.wiring.names == (ready,)
    living = {k: replace(s, groups_failed=(failed, ready)) for k, s in living.items()}
    assert transitions.adopt(state, living, [], [], 0).state.wiring.names == ("tp2@(0,1)/0.1-1.1/4",)


def test_a_layout_of_an_earlier_controller_ends_its_open_switch_in_the_log() -> None:
    assert recovery._ERROR_OF[EventKind.TRANSITION_START] is EventKind.TRANSITION_ERROR
    assert set(recovery._ERROR_OF) == {kind for kind in EventKind if kind.value.endswith("_start")}


def test_a_tick_over_a_thousand_instances_with_groups_is_cheap(capsys: pytest.CaptureFixture[str]) -> None:
    """The pure part of a quiet tick, with the look at what can be formed. 15-20 ms on one core of a 2020s server."""
    state = started(replace(CONFIG, num_instances=1000, degrees=(2, 4, 8)))
    state = transitions.observe(state, connected(state), 1).state
    seen = connected(state)
    times_s = []
    for now_s in range(2, 8):
        began_s = time.process_time()
        transition = transitions.observe(state, seen, now_s)
        groups = transitions.snapshot(transition.state, time_s=0, started_s=0).groups
        times_s.append(time.process_time() - began_s)
        assert not transition.changes and transition.state.wiring is state.wiring
        assert len(groups) == 500 + 250 + 125
        state = transition.state
    with capsys.disabled():
        print(f"\n  1,000 instances, 875 groups: {min(times_s) * 1e3:.1f} ms a tick")
    assert min(times_s) < 0.08


def changes_of(transition: Transition) -> list[EventDraft]:
    return [change for change in transition.changes if change.kind is EventKind.LAYOUT_CHANGED]


@pytest.mark.parametrize("is_filled", [False, True])
def test_a_report_of_a_switch_whose_member_died_meanwhile_changes_no_layout(is_filled: bool) -> None:
    state = started(CONFIG)
    plan = SwitchPlan(
        plan_id="1", epoch=state.layout.epoch, group=GROUPS[0], members=(life(0), life(1)), is_merge=True, why="x"
    )
    state = transitions.begin_switch(state, plan).state
    state = transitions.observe(state, [(life(1), Gone("SIGKILL"))], 1).state
    if is_filled:
        state = transitions.observe(state, [(life(1), Killed())], 1).state
        state = transitions.create(state, [InstanceId(1)], "again", 1).state
        again = answer(life(1, 2), InstanceState.READY, degrees=CONFIG.degrees)
        state = transitions.observe(state, [(life(1, 2), again)], 1).state
    report = SwitchReport(plan_id="1", epoch=Epoch(plan.epoch + 1))
    ended = transitions.end_switch(state, plan, report, {}, 2)
    assert changes_of(ended) == [] and len(ended.state.layout.groups) == 4
    assert ended.changes[0].kind is EventKind.TRANSITION_END


def merged(state: ClusterState, group: Group) -> ClusterState:
    """The state after `group` was merged, and its members have said so."""
    members = tuple(state.slots[i].key for i in group.members)
    plan = SwitchPlan(
        plan_id=f"m{group}", epoch=state.layout.epoch, group=group, members=members, is_merge=True, why="x"
    )
    state = transitions.begin_switch(state, plan).state
    report = SwitchReport(plan_id=plan.plan_id, epoch=Epoch(plan.epoch + 1))
    state = transitions.end_switch(state, plan, report, {}, 1).state
    return transitions.observe(state, words(state, group, str(group), report.epoch), 1).state


def words(state: ClusterState, group: Group, lane: str, epoch: Epoch) -> list[tuple[InstanceKey, Observation]]:
    """The members of `group` say that they run `lane`."""
    said = [answer(state.slots[i].key, InstanceState.READY, degrees=CONFIG.degrees) for i in group.members]
    return [(a.key, replace(a, lane=lane, epoch=epoch)) for a in said]


def test_a_follower_stays_until_its_leader_has_finished() -> None:
    state = merged(started(CONFIG), GROUPS[0])
    state = transitions.drain_all(state, "the end", 60, 2).state
    assert state.routing.routes == () and transitions.plan(state, 2).drains == (life(0), life(2), life(3))
    state = transitions.observe(state, [(life(0), DrainEnded(complete=True))], 3).state
    assert life(1) in transitions.plan(state, 3).drains
    state = transitions.observe(state, [(life(1), DrainEnded(complete=True))], 4).state
    assert {key.instance_id for key in transitions.plan(state, 4).kills} == {0, 1}


def test_while_a_switch_is_under_way_its_end_alone_moves_its_members() -> None:
    state = merged(started(CONFIG), GROUPS[0])
    members = (life(0), life(1))
    plan = SwitchPlan(plan_id="s", epoch=state.layout.epoch, group=GROUPS[0], members=members, is_merge=False, why="x")
    state = transitions.begin_switch(state, plan).state
    epoch = Epoch(plan.epoch + 1)
    early = transitions.observe(state, words(state, GROUPS[0], "dp", epoch), 2)
    assert early.state.layout is state.layout
    ended = transitions.end_switch(early.state, plan, SwitchReport(plan_id="s", epoch=epoch), {}, 3)
    assert [change.data["epoch"] for change in changes_of(ended)] == [epoch]


def test_a_switch_that_ends_after_another_group_broke_gets_an_epoch_of_its_own() -> None:
    state = merged(started(CONFIG), GROUPS[1])
    members = (life(0), life(1))
    plan = SwitchPlan(plan_id="m", epoch=state.layout.epoch, group=GROUPS[0], members=members, is_merge=True, why="x")
    state = transitions.begin_switch(state, plan).state
    broken = transitions.observe(state, [(life(3), Gone("SIGKILL"))], 2)
    assert [change.data["epoch"] for change in changes_of(broken)] == [plan.epoch + 1]
    report = SwitchReport(plan_id="m", epoch=Epoch(plan.epoch + 1))
    ended = transitions.end_switch(broken.state, plan, report, {}, 3)
    assert [change.data["epoch"] for change in changes_of(ended)] == [plan.epoch + 2]
