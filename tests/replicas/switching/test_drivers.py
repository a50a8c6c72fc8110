"""Laws of the drivers: all members carry a change out, or none does, and where one member fails all of them stop.

`Leading` and `Following` drive a change that only notes its steps and fails where it is told to.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm")
from pengserve.planners.types.errors import EngineError, PengServeError, StepError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.replicas.switching.changes import table
from pengserve.replicas.switching.changes.change import Change
from pengserve.replicas.switching.messages import RestoreDone, RestoreMet, RestoreWave
from tests.replicas.switching.members import KEYS, FakeMember, directory, plan
from tests.support import waiting

pytestmark = pytest.mark.slow  # it waits for time-outs

TIMEOUT_S = 1.0
NUM_ROUNDS = 2
LEADER, FOLLOWER = KEYS
until = partial(waiting.until, timeout_s=8 * TIMEOUT_S)


class Scripted(Change[RestoreMet, RestoreWave, RestoreDone]):
    """Forms or ends the group of the tests in two rounds."""

    rounds = (RestoreWave,)
    notes: ClassVar[dict[InstanceKey, list[str]]]
    script: ClassVar[dict[tuple[InstanceKey, str], Callable[[], None]]]

    def __init__(self, member: Any, wiring: Any, running_group: Any, plan: SwitchPlan) -> None:
        super().__init__(member, wiring, running_group, plan)
        if plan.is_merge:
            self.run = self._new_run(plan.group, plan.members)
        self._act("make")

    def _act(self, step: str) -> None:
        note(self._member.key, step)

    @staticmethod
    def check(member: Any, wiring: Any, plan: SwitchPlan) -> None:
        note(member.key, "check")

    def begin(self, kept: frozenset[str] | None) -> RestoreMet:
        self._act("begin")
        return RestoreMet(host_rows=0)

    def move(self, met: Mapping[InstanceKey, RestoreMet], ask: Any) -> None:
        self._act("move")
        assert set(met) == set(KEYS)
        for _ in range(NUM_ROUNDS):
            assert set(ask(RestoreWave(travellers=[]))) == set(KEYS)

    def take(self, message: RestoreWave) -> RestoreDone:
        self._act(f"take {sum(step.startswith('take') for step in self.notes[self._member.key]) + 1}")
        return RestoreDone()

    def commit(self) -> SwitchReport:
        self._act("commit")
        lanes: Any = self._member.lanes
        if self.run is not None:
            lanes.enter(lanes.tp(self._plan.group), self.run)
            self._running_group.begin(self.run)
        else:
            lanes.leave()
            self._running_group.end()
        return self._report()

    def undo(self) -> None:
        self._act("undo")


def note(key: InstanceKey, step: str) -> None:
    """A member has come to a step: does what the test wants there."""
    Scripted.notes[key].append(step)
    Scripted.script.get((key, step), lambda: None)()


def fail() -> None:
    raise StepError("a fault of the test")


def crash() -> None:
    raise KeyError("a fault of the test")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeMember]]:
    monkeypatch.setattr(table, "CHANGES", {"merge": Scripted, "split": Scripted})
    Scripted.notes, Scripted.script = {key: [] for key in KEYS}, {}
    members = [FakeMember(key, TIMEOUT_S) for key in KEYS]
    for member in members:
        member.agent.connect(directory(members))
    until(lambda: all(member.agent.groups_ready() and len(member.network.peers()) == 1 for member in members))
    yield members
    for member in members:
        member.close()
        assert member.errors == [], "this ends an instance"


def carry_out(pair: list[FakeMember], switch: SwitchPlan) -> SwitchReport:
    """Prepares at both, notes from here on, and commits at the leader."""
    for member in pair:
        member.agent.prepare(switch)
    for steps in Scripted.notes.values():
        steps.clear()
    outcome: Future[SwitchReport] = Future()

    def run() -> None:
        try:
            outcome.set_result(pair[0].agent.commit(switch))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(20 * TIMEOUT_S)


def shapes(pair: list[FakeMember]) -> list[bool]:
    """By member: whether it runs in the group."""
    assert [member.agent.leader is not None for member in pair] == [m.lanes.running is not None for m in pair]
    return [member.lanes.running is not None for member in pair]


def settle(pair: list[FakeMember], is_in_group: bool) -> None:
    """All members come to run in the group, or alone, and then have nothing left to do."""
    # Twice: a commit may still have been on its way, and the word that undoes it comes behind it.
    for _ in range(2):
        until(lambda: [member.lanes.running is not None for member in pair] == [is_in_group] * 2)
        for member in pair:
            answered = threading.Event()
            member.do(answered.set)
            assert answered.wait(8 * TIMEOUT_S), "it waits for a member that has given up"
    assert shapes(pair) == [is_in_group] * 2


def begin_at(pair: list[FakeMember], is_merge: bool) -> SwitchPlan:
    """Brings both to where the switch begins."""
    if not is_merge:
        carry_out(pair, plan(1))
        settle(pair, True)
    return plan(2, is_merge=is_merge)


def require_next(pair: list[FakeMember]) -> None:
    """After a failure: once the communicators are built again, the next switch works."""
    Scripted.script = {}
    for member in pair:
        member.pool.failed_names.clear()
    if not shapes(pair)[0]:
        carry_out(pair, plan(5))
    settle(pair, True)
    carry_out(pair, plan(6, is_merge=False))
    settle(pair, False)
    assert [member.agent.epoch for member in pair] == [7, 7]


WHOLE = ["check", "make", "begin", *(f"take {i + 1}" for i in range(NUM_ROUNDS)), "commit"]


@pytest.mark.parametrize("is_merge", [True, False])
def test_every_member_takes_every_step_once_and_in_order(pair: list[FakeMember], is_merge: bool) -> None:
    report = carry_out(pair, begin_at(pair, is_merge))
    settle(pair, is_merge)
    assert report.epoch == 3 and [member.agent.epoch for member in pair] == [3, 3]
    assert [step for step in Scripted.notes[LEADER] if step != "move"][-len(WHOLE) :] == WHOLE
    assert Scripted.notes[FOLLOWER] == WHOLE


@pytest.mark.parametrize("is_merge", [True, False])
@pytest.mark.parametrize("act", [fail, crash])
@pytest.mark.parametrize(("victim", "step"), [(LEADER, "make"), (LEADER, "begin"), (FOLLOWER, "make")])
def test_before_the_first_round_all_is_left_as_it_was(
    pair: list[FakeMember], is_merge: bool, act: Callable[[], None], victim: InstanceKey, step: str
) -> None:
    switch = begin_at(pair, is_merge)
    Scripted.script = {(victim, step): act}
    with pytest.raises(PengServeError, match="a fault of the test"):
        carry_out(pair, switch)
    settle(pair, not is_merge)
    assert all("undo" not in steps and "commit" not in steps for steps in Scripted.notes.values())
    assert not any(member.agent.groups_failed() for member in pair), "no communicator was used"
    require_next(pair)


@pytest.mark.parametrize("is_merge", [True, False])
@pytest.mark.parametrize("act", [fail, crash])
@pytest.mark.parametrize(
    ("victim", "step"),
    [(LEADER, "move"), *((key, f"take {i + 1}") for key in KEYS for i in range(NUM_ROUNDS)), (LEADER, "commit")],
)
def test_after_it_every_member_is_alone_and_undoes_what_it_has_begun(
    pair: list[FakeMember], is_merge: bool, act: Callable[[], None], victim: InstanceKey, step: str
) -> None:
    switch = begin_at(pair, is_merge)
    Scripted.script = {(victim, step): act}
    with pytest.raises(EngineError, match=r"failed half-way .*all members are in dp"):
        carry_out(pair, switch)
    settle(pair, False)
    assert Scripted.notes[LEADER].count("undo") == 1
    has_begun = any(step.startswith("take") for step in Scripted.notes[FOLLOWER])
    has_ended = Scripted.notes[FOLLOWER][-1] == "commit"  # it heard of the commit first: it leaves with the group
    assert Scripted.notes[FOLLOWER].count("undo") == (has_begun and not has_ended)
    require_next(pair)


@pytest.mark.parametrize("is_merge", [True, False])
def test_a_follower_that_fails_at_its_commit_takes_the_group_along(pair: list[FakeMember], is_merge: bool) -> None:
    switch = begin_at(pair, is_merge)
    Scripted.script = {(FOLLOWER, "commit"): fail}
    assert carry_out(pair, switch).epoch == 3, "the leader has said that it holds"
    settle(pair, False)
    assert Scripted.notes[FOLLOWER][-1] == "undo"
    require_next(pair)


@pytest.mark.parametrize("is_merge", [True, False])
@pytest.mark.parametrize("step", ["move", "take 1"])
def test_a_leader_that_falls_silent_is_not_waited_for(pair: list[FakeMember], is_merge: bool, step: str) -> None:
    switch = begin_at(pair, is_merge)
    Scripted.script = {(LEADER, step): lambda: time.sleep(2 * TIMEOUT_S)}
    with pytest.raises(EngineError, match="all members are in dp"):
        carry_out(pair, switch)
    settle(pair, False)
    require_next(pair)


@pytest.mark.parametrize("is_merge", [True, False])
def test_a_follower_that_falls_silent_is_not_waited_for(pair: list[FakeMember], is_merge: bool) -> None:
    switch = begin_at(pair, is_merge)
    Scripted.script = {(FOLLOWER, "take 1"): lambda: time.sleep(2 * TIMEOUT_S)}
    with pytest.raises(EngineError, match="no RestoreDone came within 1 s"):
        carry_out(pair, switch)
    settle(pair, False)
    require_next(pair)


def test_the_leader_steps_on_in_short_steps_until_the_others_have_met(pair: list[FakeMember]) -> None:
    short: list[bool] = []
    Scripted.script = {
        (FOLLOWER, "begin"): lambda: short.append(pair[0].lanes.dp.is_short),
        (LEADER, "begin"): lambda: short.append(pair[0].lanes.dp.is_short),
    }
    carry_out(pair, plan(1))
    settle(pair, True)
    assert short == [True, False]
    assert not pair[1].lanes.dp.is_short


def test_steps_are_whole_again_where_the_others_do_not_come(pair: list[FakeMember]) -> None:
    Scripted.script = {(FOLLOWER, "make"): fail}
    with pytest.raises(StepError, match="a fault of the test"):
        carry_out(pair, plan(1))
    assert not pair[0].lanes.dp.is_short


def test_the_leader_steps_on_until_the_others_have_met_and_holds_a_group_that_ends(pair: list[FakeMember]) -> None:
    carry_out(pair, plan(1))
    settle(pair, True)
    held: list[bool] = []
    Scripted.script = {(FOLLOWER, "begin"): lambda: held.append(pair[0].lanes.current.is_held)}
    carry_out(pair, plan(2, is_merge=False))
    assert held == [True], "no step may follow the one at which the followers stopped"
    settle(pair, False)


def test_a_split_that_is_called_off_lets_the_group_step_again(pair: list[FakeMember]) -> None:
    carry_out(pair, plan(1))
    settle(pair, True)
    Scripted.script = {(FOLLOWER, "make"): fail}
    with pytest.raises(StepError, match="a fault of the test"):
        carry_out(pair, plan(2, is_merge=False))
    settle(pair, True)
    assert not pair[0].lanes.current.is_held
