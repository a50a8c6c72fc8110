"""Laws of the cluster's state, over all that can happen to it."""

import time
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pengserve.controller import state as transitions
from pengserve.controller.events import EventDraft, open_starts
from pengserve.controller.recovery import bases, close_open_spans
from pengserve.controller.slots import DrainEnded, Gone, Killed, Observation, span
from pengserve.controller.state import Transition
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey, Version
from pengserve.planners.types.placements import PlacementNote
from pengserve.planners.types.snapshot import InstanceState
from tests.controller.fakes import FIRST, answer, life
from tests.support.effort import examples

NOTE = PlacementNote(
    number=1, reason="another batch", why="2 requests keep layers away, 0 are paused", shape="dp", num_stepped=3,
    num_away=2, num_paused=0, step_s=0.02, num_late=0, moved_bytes=0, solved_s=0.003,
)  # fmt: skip
CONFIG = ControllerConfig(app="laws", num_instances=3, lost_after_s=10, start_timeout_s=100)


class ClusterLaws(RuleBasedStateMachine):
    """The world is `living`, the lives that run, and `reserved`, the resources they hold; the state must follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.wall_s = 0.0, 1_700_000_000.0
        self.living: dict[InstanceKey, InstanceState] = {}
        self.reserved: set[InstanceKey] = set()
        self.silent: set[InstanceKey] = set()
        self.used: set[InstanceKey] = set()
        self.kills_under_way: set[InstanceKey] = set()
        self.log: list[Event] = []
        self.versions: list[Version] = []
        self.term = 1
        base = bases(self.term, ())
        self.state = transitions.empty(CONFIG, version=base.version, epoch=base.epoch)
        self.recovered()

    def apply(self, transition: Transition) -> None:
        before, self.state = self.state, transition.state
        assert (self.state.routing.routes != before.routing.routes) == (
            self.state.routing.version != before.routing.version
        ), "the version changes exactly with the routes"
        self.note(transition.changes)

    def note(self, changes: tuple[EventDraft, ...]) -> None:
        for c in changes:
            seq = len(self.log) + 1
            self.log.append(Event(seq=seq, time_s=self.wall_s, kind=c.kind, why=c.why, span=c.span, data=c.data))

    def recovered(self) -> None:
        """What each controller logs of its numbers, for the next one."""
        table = self.state.routing
        data = {"term": table.version.term, "version": table.version.counter, "epoch": table.epoch}
        self.note((EventDraft(kind=EventKind.CONTROLLER_RECOVERED, data=data),))

    def observe(self, *seen: tuple[InstanceKey, Observation]) -> None:
        self.apply(transitions.observe(self.state, seen, self.now_s))

    @rule()
    def act(self) -> None:
        actions = transitions.plan(self.state, self.now_s)
        self.kills_under_way.update(actions.kills)
        for key in actions.drains:
            if key in self.living:
                self.living[key] = InstanceState.DRAINING
        if actions.replace:
            self.apply(transitions.create(self.state, actions.replace.slots, actions.replace.why, self.now_s))
            for instance_id in actions.replace.slots:
                key = self.state.slots[instance_id].key
                assert key not in self.used, "no life is lived twice"
                self.used.add(key)
                self.living[key] = InstanceState.STARTING
                self.reserved.add(key)

    @rule()
    def kills_end(self) -> None:
        """Kills take their time: until then the life may go on, and its resources are taken."""
        for key in sorted(self.kills_under_way):
            self.living.pop(key, None)
            self.reserved.discard(key)
            self.observe((key, Killed()))
        self.kills_under_way.clear()

    def pick(self, data: st.DataObject) -> InstanceKey | None:
        """One of the living, or None where nobody lives."""
        return data.draw(st.sampled_from(sorted(self.living))) if self.living else None

    @rule(data=st.data())
    def answers(self, data: st.DataObject) -> None:
        key = self.pick(data)
        if key is None:
            return
        if key not in self.silent:
            self.observe((key, answer(key, self.living[key], "engine broke")))

    @rule(data=st.data(), state=st.sampled_from(InstanceState))
    def changes_by_itself(self, data: st.DataObject, state: InstanceState) -> None:
        key = self.pick(data)
        if key is None:
            return
        order = list(InstanceState)
        if order.index(state) >= order.index(self.living[key]):
            self.living[key] = state

    @rule(data=st.data())
    def crashes(self, data: st.DataObject) -> None:
        key = self.pick(data)
        if key is None:
            return
        del self.living[key]
        if data.draw(st.booleans(), label="seen"):
            self.observe((key, Gone("SIGKILL")))

    @rule(data=st.data())
    def falls_silent(self, data: st.DataObject) -> None:
        if key := self.pick(data):
            self.silent.add(key)

    @rule(data=st.data(), complete=st.booleans())
    def drained(self, data: st.DataObject, complete: bool) -> None:
        key = self.pick(data)
        if key is None:
            return
        self.observe((key, DrainEnded(complete=complete)))

    @rule(data=st.data(), seen=st.sampled_from([Gone("late"), DrainEnded(complete=True), Killed()]))
    def late_word(self, data: st.DataObject, seen: Observation) -> None:
        """An answer of a life that is over changes nothing for the one after it."""
        over = sorted(self.used - self.reserved)
        if over:
            before = self.state
            self.observe((data.draw(st.sampled_from(over)), seen))
            assert self.state.slots == transitions.observe(before, (), self.now_s).state.slots

    @rule(passed_s=st.sampled_from([0.1, 1.0, 11.0, 101.0]))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.wall_s += passed_s
        self.observe()

    @rule(clock_back_s=st.sampled_from([0.0, 3600.0]), has_log=st.booleans())
    def controller_dies(self, clock_back_s: float, has_log: bool) -> None:
        """A new one knows the world and its term, and the log if that is left; no clock."""
        self.wall_s += 1.0 - clock_back_s
        self.term += 1
        self.kills_under_way.clear()
        base = bases(self.term, self.log if has_log else ())
        assert base.version > self.state.routing.version
        assert base.epoch > self.state.layout.epoch
        self.state = transitions.empty(CONFIG, version=base.version, epoch=base.epoch)
        known = {
            key: None if key in self.silent else answer(key, state, "engine broke")
            for key, state in self.living.items()
        }
        leftovers = sorted(self.reserved - set(self.living))
        adopted = transitions.adopt(self.state, known, leftovers, sorted(self.used), self.now_s)
        self.note(close_open_spans(self.log, adopted.state.slots))
        self.apply(adopted)
        self.recovered()

    def spans_of_living(self) -> set[str]:
        return {span(slot.key) for slot in self.state.slots if slot.alive}

    @invariant()
    def one_life_a_slot(self) -> None:
        slots = [key.instance_id for key in self.reserved]
        assert len(slots) == len(set(slots)), f"two lives in a slot: {sorted(self.reserved)}"

    @invariant()
    def only_ready_ones_are_routed(self) -> None:
        ready = {slot.key for slot in self.state.slots if slot.state is InstanceState.READY}
        assert {route.key for route in self.state.routing.routes} == ready

    @invariant()
    def versions_never_fall(self) -> None:
        self.versions.append(self.state.routing.version)
        assert self.versions[-2:] == sorted(self.versions[-2:])

    @invariant()
    def open_spans_are_alive(self) -> None:
        assert {event.span for event in open_starts(self.log)} <= self.spans_of_living()

    def teardown(self) -> None:
        """After quiet all slots are ready."""
        self.silent.clear()
        for _ in range(6):
            self.now_s += CONFIG.restart_backoff_max_s
            seen: list[tuple[InstanceKey, Observation]] = []
            for slot in self.state.slots:
                # The world stops breaking: what lives answers, what is gone is seen to be.
                if slot.alive and self.living.get(slot.key) in (InstanceState.STARTING, InstanceState.READY):
                    self.living[slot.key] = InstanceState.READY
                    seen.append((slot.key, answer(slot.key, InstanceState.READY)))
                    seen.append((slot.key, DrainEnded(complete=True)))
                elif slot.alive:
                    seen.append((slot.key, Gone("quiet")))
            self.observe(*seen)
            self.act()
            self.kills_end()
        assert all(slot.state is InstanceState.READY for slot in self.state.slots)
        assert sorted(self.living) == [slot.key for slot in self.state.slots]
        assert len(self.state.routing.routes) == CONFIG.num_instances
        assert not open_starts(self.log)


ClusterLaws.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40)
TestClusterLaws = ClusterLaws.TestCase


def started(config: ControllerConfig, now_s: float = 0.0) -> transitions.ClusterState:
    """A state in which every slot is READY."""
    state = transitions.empty(config, version=FIRST, epoch=Epoch(1))
    state = transitions.create(state, [slot.key.instance_id for slot in state.slots], "begin", now_s).state
    ready = [(slot.key, answer(slot.key, InstanceState.READY)) for slot in state.slots]
    return transitions.observe(state, ready, now_s).state


def test_failures_in_a_row_double_the_wait_up_to_a_maximum() -> None:
    config = replace(CONFIG, num_instances=1, restart_backoff_s=1, restart_backoff_max_s=6)
    state, now_s, waits = transitions.empty(config, version=FIRST, epoch=Epoch(1)), 0.0, []
    for _ in range(5):
        state = transitions.create(state, [InstanceId(0)], "test", now_s).state
        key = state.slots[0].key
        state = transitions.observe(state, [(key, Gone("no model")), (key, Killed())], now_s).state
        waits.append(state.slots[0].retry_at_s - now_s)
        assert transitions.plan(state, now_s).replace is None, "the slot stays empty during its back-off"
        now_s = state.slots[0].retry_at_s
    assert waits == [1, 2, 4, 6, 6]


def test_one_starts_after_the_other_but_none_waits_for_long() -> None:
    state = transitions.empty(replace(CONFIG, num_instances=3, max_starting=1), version=FIRST, epoch=Epoch(1))

    def next_slots(now_s: float) -> tuple[InstanceId, ...]:
        found = transitions.plan(state, now_s).replace
        return found.slots if found else ()

    assert next_slots(0.0) == (0,)
    state = transitions.create(state, [InstanceId(0)], "test", 0.0).state
    assert next_slots(1.0) == ()
    assert next_slots(transitions.PATIENCE_WITH_A_START_S) == (1,)
    key = state.slots[0].key
    state = transitions.observe(state, [(key, answer(key, InstanceState.READY))], 2.0).state
    assert next_slots(2.0) == (1,)


def test_a_life_longer_than_the_wait_before_it_ends_the_row() -> None:
    state = started(replace(CONFIG, num_instances=1))
    state = replace(state, slots=(replace(state.slots[0], failures=4),))  # the wait before this life was 8 s
    key = state.slots[0].key
    assert transitions.observe(state, [(key, Gone("x"))], now_s=7.9).state.slots[0].failures == 5
    assert transitions.observe(state, [(key, Gone("x"))], now_s=8.0).state.slots[0].failures == 1


def test_the_highest_incarnation_wins_its_slot_and_the_others_are_killed() -> None:
    ready = {key: answer(key, InstanceState.READY) for key in (life(0, 2), life(0, 3), life(1, 5), life(7, 1))}
    state = transitions.empty(CONFIG, version=FIRST, epoch=Epoch(1))
    state = transitions.adopt(state, ready, [life(1, 4), life(2, 6)], [], now_s=0).state
    assert [route.key for route in state.routing.routes] == [life(0, 3), life(1, 5)]
    assert set(transitions.plan(state, 0).kills) == {life(0, 2), life(1, 4), life(2, 6), life(7, 1)}


def test_a_slot_goes_on_counting_where_its_leftovers_ended() -> None:
    state = transitions.empty(CONFIG, version=FIRST, epoch=Epoch(1))
    state = transitions.adopt(state, {}, [life(2, 6)], [], now_s=0).state
    assert InstanceId(2) not in (transitions.plan(state, 0).replace or pytest.fail("slots 0 and 1 are free")).slots
    state = transitions.observe(state, [(life(2, 6), Killed())], now_s=0).state
    state = transitions.create(state, [InstanceId(2)], "test", now_s=0).state
    assert state.slots[2].key == life(2, 7)


def test_each_change_of_a_placement_is_an_event_once_and_a_new_controller_tells_of_new_ones() -> None:
    config = replace(CONFIG, num_instances=1)
    state, key = started(config), life(0, 1)

    def told(state: transitions.ClusterState, *numbers: int) -> tuple[transitions.ClusterState, list[int]]:
        notes = tuple(replace(NOTE, number=number) for number in numbers)
        seen = replace(answer(key, InstanceState.READY), placements=notes)
        found = transitions.observe(state, [(key, seen)], now_s=1)
        events = [change for change in found.changes if change.kind is EventKind.PLACEMENT_CHANGED]
        assert all(event.span == span(key) and event.why == NOTE.why for event in events)
        return found.state, [event.data["number"] for event in events]

    state, found = told(state, 1, 2)
    assert found == [1, 2]
    state, found = told(state, 1, 2, 3)
    assert found == [3]
    assert told(state, 1, 2, 3)[1] == []
    empty = transitions.empty(config, version=FIRST, epoch=Epoch(1))
    old = replace(answer(key, InstanceState.READY), placements=(replace(NOTE, number=4),))
    adopted = transitions.adopt(empty, {key: old}, [], [], now_s=0)
    assert not [c for c in adopted.changes if c.kind is EventKind.PLACEMENT_CHANGED], "it was told of before, perhaps"
    assert told(adopted.state, 4, 5)[1] == [5]


def test_the_reason_of_a_failure_is_shown_until_the_slot_is_ready_again() -> None:
    config = replace(CONFIG, num_instances=1)
    state = started(config)
    dead = answer(life(0, 1), InstanceState.DEAD, "ConfigError: model: no such directory /nowhere")
    failed = transitions.observe(state, [(life(0, 1), dead), (life(0, 1), Killed())], now_s=1)
    errors = [change for change in failed.changes if change.kind is EventKind.INSTANCE_ERROR]
    assert "no such directory" in errors[0].why
    state = failed.state
    for expected in (InstanceState.DEAD, InstanceState.STARTING):
        shown = transitions.snapshot(state, time_s=0, started_s=0).instances[0]
        assert (shown.state, "no such directory" in shown.failure) == (expected, True)
        if expected is InstanceState.DEAD:
            state = transitions.create(state, [InstanceId(0)], "test", now_s=1).state
    ready = answer(life(0, 2), InstanceState.READY)
    state = transitions.observe(state, [(life(0, 2), ready)], now_s=1).state
    assert transitions.snapshot(state, time_s=0, started_s=0).instances[0].failure == ""


def test_what_waits_for_resources_says_so_when_it_times_out() -> None:
    config = replace(CONFIG, num_instances=1, gpus_per_instance=1)
    state = transitions.create(
        transitions.empty(config, version=FIRST, epoch=Epoch(1)), [InstanceId(0)], "test", now_s=0
    ).state
    assert transitions.observe(state, [], now_s=100).state.slots[0].alive
    assert "1 GPU" in transitions.observe(state, [], now_s=100.1).state.slots[0].failure


def test_a_tick_over_a_thousand_instances_is_cheap(capsys: pytest.CaptureFixture[str]) -> None:
    """The pure part of a quiet tick. Measured 4-6 ms on one core of a 2020s server; the bound leaves room for CI."""
    state = started(replace(CONFIG, num_instances=1000))
    seen = [(slot.key, answer(slot.key, InstanceState.READY)) for slot in state.slots]
    times_s = []
    for now_s in range(1, 8):
        began_s = time.process_time()
        transition = transitions.observe(state, seen, now_s)
        transitions.plan(transition.state, now_s)
        times_s.append(time.process_time() - began_s)
        assert not transition.changes and transition.state.routing is state.routing
        state = transition.state
    with capsys.disabled():
        print(f"\n  1,000 instances: {min(times_s) * 1e3:.1f} ms a tick")
    assert min(times_s) < 0.02
