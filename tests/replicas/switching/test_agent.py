"""Laws of a member among members that die, fall silent or leave."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import pytest

from pengserve.planners.types.errors import EngineError, LinkLostError, StepError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.switching.member import SWITCH
from tests.replicas.switching.members import KEYS, FakeMember, directory, plan
from tests.support import waiting

pytestmark = pytest.mark.slow  # it imports vLLM

TIMEOUT_S = 2.0
until = partial(waiting.until, timeout_s=TIMEOUT_S / 2)  # before any time-out of the members


@pytest.fixture
def pair() -> Iterator[list[FakeMember]]:
    members = [FakeMember(key, TIMEOUT_S) for key in KEYS]
    for member in members:
        member.agent.connect(directory(members))
    until(lambda: all(member.agent.groups_ready() and len(member.network.peers()) == 1 for member in members))
    yield members
    for member in members:
        member.close()
        assert member.errors == [], "this ends an instance"


def commit(pair: list[FakeMember], switch: SwitchPlan) -> "Future[SwitchReport]":
    """Prepares at both, then commits at the leader."""
    for member in pair:
        member.agent.prepare(switch)
    return begin(pair, switch)


def begin(pair: list[FakeMember], switch: SwitchPlan) -> "Future[SwitchReport]":
    """Commits at the leader, in a thread of its own."""
    outcome: Future[SwitchReport] = Future()

    def run() -> None:
        try:
            outcome.set_result(pair[0].agent.commit(switch))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def is_merged(pair: list[FakeMember]) -> bool:
    return all(member.lanes.running is not None for member in pair)


def is_alone(pair: list[FakeMember]) -> bool:
    return all(member.lanes.running is None for member in pair)


def test_merge_and_split(pair: list[FakeMember]) -> None:
    assert commit(pair, plan(1)).result(TIMEOUT_S).epoch == 2
    until(lambda: is_merged(pair))
    assert [member.agent.leader for member in pair] == [KEYS[0]] * 2
    assert commit(pair, plan(2, is_merge=False)).result(TIMEOUT_S).epoch == 3
    until(lambda: is_alone(pair))
    assert [member.agent.epoch for member in pair] == [3, 3]


@pytest.mark.parametrize(("strategy", "expected"), [(SwitchStrategy.CARRY, 8), (SwitchStrategy.HARD, 5)])
def test_a_group_gets_all_blocks_but_those_of_paused_requests(
    pair: list[FakeMember], strategy: SwitchStrategy, expected: int
) -> None:
    """Also those of requests that cannot be carried: when it runs, they have left."""
    pair[1].lanes.dp.running_ids = {"a", "b", "c"}  # a block each
    report = commit(pair, plan(1, strategy=strategy)).result(TIMEOUT_S)
    assert pair[0].lanes.registry.tp(plan(1).group).num_lendable == expected
    assert report.num_paused == 8 - expected, "of all members"


@pytest.mark.parametrize("who", [0, 1])
def test_who_leaves_a_group_takes_idle_members_along(pair: list[FakeMember], who: int) -> None:
    commit(pair, plan(1)).result(TIMEOUT_S)
    until(lambda: is_merged(pair))
    pair[who].do(lambda: pair[who].lanes.on_broken(EngineError("a step failed")))
    until(lambda: is_alone(pair))
    assert all(member.agent.groups_failed() for member in pair), "the group needs a new round"
    assert [member.agent.leader for member in pair] == [None, None]


def test_a_group_that_no_directory_lists_ends(pair: list[FakeMember]) -> None:
    commit(pair, plan(1)).result(TIMEOUT_S)
    until(lambda: is_merged(pair))
    pair[0].agent.connect(directory(pair, 2, with_group=False))
    until(lambda: is_alone(pair))


def test_members_know_how_many_share_their_machine(pair: list[FakeMember]) -> None:
    assert [member.lanes.num_here for member in pair] == [2, 2]
    pair[0].agent.connect(directory(pair[:1], 2, with_group=False))
    until(lambda: pair[0].lanes.num_here == 1)


def test_the_death_of_a_peer_ends_its_groups(pair: list[FakeMember]) -> None:
    commit(pair, plan(1)).result(TIMEOUT_S)
    until(lambda: is_merged(pair))
    pair[1].close()
    until(lambda: pair[0].lanes.running is None)
    with pytest.raises(StepError):
        pair[0].agent.prepare(plan(5, is_merge=False))


@pytest.mark.parametrize("how", ["dies", "breaks off"])
def test_calls_of_a_group_are_aborted_while_the_step_thread_waits_in_one(pair: list[FakeMember], how: str) -> None:
    """It may wait on a device for a peer that is gone, so what it is given to do would come too late."""
    commit(pair, plan(1)).result(TIMEOUT_S)
    until(lambda: is_merged(pair))
    waits, is_over = threading.Event(), threading.Event()
    pair[0].do(lambda: (waits.set(), is_over.wait(10 * TIMEOUT_S)))
    try:
        assert waits.wait(10 * TIMEOUT_S)
        if how == "dies":
            pair[1].network.close()
        else:
            pair[1].do(lambda: pair[1].lanes.on_broken(EngineError("a step failed")))
        until(lambda: bool(pair[0].agent.groups_failed()), timeout_s=10 * TIMEOUT_S)
        assert pair[0].lanes.running is not None, "the step thread has not come back"
    finally:
        is_over.set()
    until(lambda: pair[0].lanes.running is None)


def test_groups_with_a_lost_peer_need_a_new_round_though_none_runs(pair: list[FakeMember]) -> None:
    pair[1].network.close()
    until(lambda: bool(pair[0].agent.groups_failed()))


def test_a_switch_that_was_called_off_is_not_waited_for(pair: list[FakeMember]) -> None:
    begun, busy = threading.Event(), threading.Event()
    switch = plan(1)
    try:
        for member in pair:
            member.agent.prepare(switch)
        pair[1].do(lambda: (begun.set(), busy.wait(10)))
        assert begun.wait(TIMEOUT_S)
        outcome = begin(pair, switch)
        until(pair[1].has_work)  # the leader has asked it to meet
        pair[0].agent.abort(switch.plan_id)
        with pytest.raises(StepError):
            outcome.result(TIMEOUT_S)
    finally:
        busy.set()
    answered = threading.Event()
    pair[1].do(answered.set)
    assert answered.wait(TIMEOUT_S / 2), "the other member waits for a leader that has given up"
    assert is_alone(pair)
    assert commit(pair, plan(2)).result(TIMEOUT_S).epoch == 3


def test_a_drain_that_ends_after_its_leader_is_called_off(pair: list[FakeMember]) -> None:
    pair[1].lanes.dp.running_ids = {"a"}
    outcome = commit(pair, plan(1, strategy=SwitchStrategy.SEQUENTIAL))
    until(lambda: pair[1].lanes.dp.is_paused)

    def end() -> None:
        pair[0].network.close()
        until(lambda: not pair[1].network.peers())  # the connection has ended, and this thread has not heard of it
        pair[1].lanes.dp.running_ids = set()
        pair[1].agent.boundary()

    pair[1].do(end)
    until(lambda: not pair[1].lanes.dp.is_paused)
    pair[0].agent.abort("1")
    with pytest.raises(StepError):
        outcome.result(TIMEOUT_S)


def test_a_group_that_breaks_ends_the_drain_before_its_split(pair: list[FakeMember]) -> None:
    commit(pair, plan(1)).result(TIMEOUT_S)
    until(lambda: is_merged(pair))
    pair[0].lanes.current.running_ids = {"a"}
    outcome = commit(pair, plan(2, is_merge=False, strategy=SwitchStrategy.SEQUENTIAL))
    until(lambda: pair[0].lanes.current.is_paused)
    pair[1].do(lambda: pair[1].lanes.on_broken(EngineError("a step failed")))
    with pytest.raises(EngineError):
        outcome.result(TIMEOUT_S / 2)
    until(lambda: is_alone(pair))


def test_requests_are_sent_again_where_a_follower_is_lost_as_the_split_commits(
    pair: list[FakeMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(pair, plan(1)).result(TIMEOUT_S)
    until(lambda: is_merged(pair))
    pair[0].lanes.current.waiting_ids = {"a", "b"}
    send = pair[0].network.send

    def lose(key: InstanceKey, kind: str, parts: Sequence[Buffer]) -> None:
        if kind == SWITCH and b"Commit" in b"".join(map(bytes, parts)):
            raise LinkLostError("the follower is gone")
        send(key, kind, parts)

    monkeypatch.setattr(pair[0].network, "send", lose)
    with pytest.raises(EngineError):
        commit(pair, plan(2, is_merge=False)).result(TIMEOUT_S)
    until(lambda: is_alone(pair))
    assert sorted(pair[0].moved) == ["a", "b"], "their ingress waits for ever"


def test_members_that_cannot_be_connected_refuse_the_shape() -> None:
    member = FakeMember(KEYS[0], TIMEOUT_S)
    member.pool.fault_text = "AttributeError: a fault of the test"
    member.agent.connect(directory([member]))
    until(lambda: bool(member.lanes.refused))
    why = "members of a group cannot be connected (AttributeError: a fault of the test)"
    assert member.lanes.refused == {"tp2": why}
    member.close()
    assert member.errors == []
