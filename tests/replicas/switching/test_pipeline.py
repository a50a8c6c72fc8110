"""Laws of what members of a pipeline send each other beside its steps."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from pengserve.planners.types.errors import EngineError, LinkLostError, StepError
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.engine.group_run import GroupRun
from pengserve.replicas.switching import pipeline
from pengserve.replicas.switching.pipeline import PIECE, SETTLED, PipelineTraffic
from tests.replicas.switching.members import KEYS, plan

LEADER, FOLLOWER = KEYS
RUN = b"pp2@(0,1)/7"


class Mover:
    """An exchange of KV or a return of weights: what it was given, and whether it was begun, started and undone."""

    def __init__(self, *parts: object) -> None:
        self.received: list[tuple[int, list[bytes]]] = []
        self.begun: list[int] | None = None
        self.is_started = self.is_undone = False
        self.send: Callable[[int, Sequence[bytes]], None] = lambda rank, parts: None
        self.on_done: Callable[[], None] = lambda: None

    def begin(self, withheld: list[int]) -> None:
        self.begun = withheld

    def start(self, send: Callable[[int, Sequence[bytes]], None], on_done: Callable[[], None]) -> None:
        self.is_started, self.send, self.on_done = True, send, on_done

    def receive(self, owner: int, parts: list[bytes]) -> None:
        if parts == [b"junk"]:
            raise EngineError("it does not belong here")
        self.received.append((owner, [bytes(part) for part in parts]))

    def undo(self) -> None:
        self.is_undone = True


class Exchange(Mover): ...


class Returning(Mover):
    made: "Returning"

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)
        Returning.made = self


class Side:
    """One member's traffic, over a network that notes what is sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, own: InstanceKey = LEADER) -> None:
        monkeypatch.setattr(pipeline, "WeightsReturn", Returning)
        monkeypatch.setattr(pipeline, "DropExchange", Exchange)
        self.handlers: dict[str, Any] = {}
        self.sent: list[tuple[InstanceKey, str, list[bytes]]] = []
        self.broken: list[BaseException] = []
        self.settled, self.offers, self.num_arrived = [True], 0, 0
        self.network: Any = SimpleNamespace(subscribe=self.handlers.__setitem__, send=self._send)
        member: Any = SimpleNamespace(key=own, network=self.network, lanes=None, parts_of=lambda plan: None)
        self.lane: Any = SimpleNamespace(
            leads=own == LEADER,
            note_settled=self.settled.append,
            arrived=self._arrived,
            give_up_blocks=lambda parts: [4, 5],
            offer_all=self._offer_all,
        )
        wiring: Any = None
        self.traffic = PipelineTraffic(member, wiring, lambda work: work(), self.broken.append)
        group: Any = SimpleNamespace(name=RUN.decode(), members=KEYS, rank=KEYS.index(own))
        self.run = GroupRun(communicator=group, seed=0, post=self.network)

    def _send(self, key: InstanceKey, kind: str, parts: Sequence[bytes]) -> None:
        self.sent.append((key, kind, [bytes(part) for part in parts]))

    def _arrived(self) -> None:
        self.num_arrived += 1

    def _offer_all(self) -> None:
        self.offers += 1

    def hear(self, kind: str, *parts: bytes, key: InstanceKey = FOLLOWER) -> None:
        self.handlers[kind](key, kind, list(parts))

    def drop(self) -> Exchange:
        exchange: Any = Exchange()
        self.traffic.begin(self.lane, self.run, exchange)
        return exchange  # type: ignore[no-any-return]


def test_what_waited_for_a_drop_goes_on_when_every_member_has_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(monkeypatch)
    exchange = side.drop()
    assert exchange.is_started and not side.settled[-1]
    side.hear(SETTLED, RUN, b"another movement")
    side.hear(SETTLED, b"another run", b"")
    side.hear(SETTLED, RUN, b"")
    side.hear(SETTLED, RUN, b"")  # heard twice
    assert not side.num_arrived, "the leader itself still waits"
    exchange.on_done()
    assert side.num_arrived == 1 and side.settled[-1]


def test_a_follower_tells_its_leader_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(monkeypatch, FOLLOWER)
    side.drop().on_done()
    assert side.sent == [(LEADER, SETTLED, [RUN, b""])] and not side.num_arrived


def test_pieces_of_another_run_are_ignored_and_those_that_do_not_belong_break_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Side(monkeypatch)
    side.hear(PIECE, RUN, b"", b"early")  # no group runs
    exchange = side.drop()
    side.hear(PIECE, b"another run", b"", b"a")
    side.hear(PIECE, RUN, b"", b"b")
    assert exchange.received == [(1, [b"b"])] and side.broken == []
    side.hear(PIECE, RUN, b"", b"junk")
    assert [str(error) for error in side.broken] == ["it does not belong here"]


def test_pieces_carry_the_run_and_the_movement(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(monkeypatch)
    side.drop().send(1, [b"head", b"data"])
    side.traffic.begin_return(plan(3), [4])
    Returning.made.send(1, [b"head", b"data"])
    assert [parts for _, _, parts in side.sent] == [[RUN, b"", b"head", b"data"], [RUN, b"3", b"head", b"data"]]


def test_weights_that_come_before_their_plan_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(monkeypatch, FOLLOWER)
    side.traffic.begin(side.lane, side.run, None)
    side.hear(PIECE, RUN, b"2", b"of a plan that was called off", key=LEADER)
    side.hear(PIECE, RUN, b"3", b"a", key=LEADER)
    side.hear(PIECE, RUN, b"3", b"b", key=LEADER)
    side.traffic.begin_return(plan(3), [4])
    assert Returning.made.begun == [4] and Returning.made.received == [(0, [b"a"]), (0, [b"b"])]


def test_with_all_weights_a_member_s_memory_is_no_stage_s_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    side, there = Side(monkeypatch), list[str]()
    side.traffic.begin(side.lane, side.run, None)
    side.traffic.lead_return(plan(3), lambda withheld: there.append(str(withheld)), lambda: there.append("all"))
    Returning.made.on_done()
    assert there == ["[4, 5]"] and not side.settled[-1]
    side.hear(SETTLED, RUN, b"3")
    assert there == ["[4, 5]", "all"] and not side.settled[-1]


def test_only_the_plan_that_brought_weights_takes_them_away(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(monkeypatch)
    exchange = side.drop()
    side.traffic.undo_return("3")
    side.traffic.undo_return("")
    assert not exchange.is_undone, "KV after a drop cannot be called off"
    side.traffic.begin_return(plan(3), [4])
    side.traffic.undo_return("2")
    assert not Returning.made.is_undone
    side.traffic.undo_return("3")
    assert Returning.made.is_undone and side.settled[-1] and side.offers == 1
    side.traffic.undo_return("3")
    assert side.offers == 1
    side.hear(SETTLED, RUN, b"3")  # late


def test_a_return_that_cannot_begin_gives_its_blocks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(monkeypatch)
    side.traffic.begin(side.lane, side.run, None)

    def gone(withheld: list[int]) -> None:
        raise LinkLostError("a member is gone")

    with pytest.raises(LinkLostError):
        side.traffic.lead_return(plan(3), gone, lambda: None)
    assert side.offers == 1


def test_where_no_pipeline_runs_no_weights_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(monkeypatch)
    side.drop()
    side.traffic.end()
    side.hear(PIECE, RUN, b"", b"late")
    side.hear(SETTLED, RUN, b"")
    with pytest.raises(StepError, match="runs no pipeline"):
        side.traffic.begin_return(plan(3), [4])
