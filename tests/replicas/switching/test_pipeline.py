"""Laws of what members of a pipeline send each other beside its steps."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from pengserve.planners.types.errors import EngineError, LinkLostError, StepError
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.comm.bulk import PIECE_BYTES, Landed, _Room
from pengserve.replicas.engine.groups.group_run import GroupRun
from pengserve.replicas.kv.channel import Channel, Piece
from pengserve.replicas.switching import pipeline
from pengserve.replicas.switching.pipeline import COMING, PIECE, SETTLED, PipelineTraffic
from tests.replicas.switching.members import KEYS, plan

LEADER, FOLLOWER = KEYS
PIECE_OF_LAYER_3 = Piece(1, 3, 7, 0, torch.frombuffer(bytearray(b"data"), dtype=torch.uint8))
RUN = b"pp2@(0,1)/7"


class Mover:
    """An exchange of KV or a return of weights: what it was given, and whether it was begun, started and undone."""

    def __init__(self, *parts: object) -> None:
        self.received: list[tuple[int, list[bytes]]] = []
        self.begun: list[int] | None = None
        self.is_started = self.is_undone = False
        self.on_done: Callable[[], None] = lambda: None

    def begin(self, withheld: list[int]) -> None:
        self.begun = withheld

    def start(self, channel: Channel, on_done: Callable[[], None]) -> None:
        self.is_started, self.channel, self.on_done = True, channel, on_done

    def receive(self, owner: int, parts: list[bytes]) -> None:
        if parts == [b"junk"]:
            raise EngineError("it does not belong here")
        self.received.append((owner, [part if isinstance(part, bytes) else bytes(part) for part in parts]))

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
        self.ways: Any = None
        pool = SimpleNamespace(bulk=lambda name: self.ways if name == RUN.decode() else None)
        member: Any = SimpleNamespace(key=own, network=self.network, lanes=None, pool=pool, parts_of=lambda plan: None)
        self.lane: Any = SimpleNamespace(
            leads=own == LEADER,
            note_settled=self.settled.append,
            arrived=self._arrived,
            give_up_blocks=lambda parts: [4, 5],
            offer_all=self._offer_all,
            ends_making_room=lambda: None,
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
    side.drop().channel.move([PIECE_OF_LAYER_3], [])
    side.traffic.begin_return(plan(3), [4])
    Returning.made.channel.move([PIECE_OF_LAYER_3], [])
    assert [parts for _, _, parts in side.sent] == [[RUN, b"", b"3 7 0", b"data"], [RUN, b"3", b"3 7 0", b"data"]]


class Ways:
    """Of a group over NCCL: a piece comes when the test says so."""

    members = KEYS

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.expected: list[tuple[int, int, Callable[[Landed], object], Callable[[EngineError], object]]] = []

    def send(self, dst: int, data: torch.Tensor, announce: Callable[[], None]) -> None:
        announce()
        self.sent.append((dst, bytes(data.numpy())))

    def receive(self, *expected: Any) -> None:
        self.expected.append(expected)  # type: ignore[arg-type]


def landed(data: bytes) -> Landed:
    room = _Room(torch.device("cpu"))
    room.claim()[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return Landed(room, room.data[: len(data)])


def test_where_a_group_has_ways_a_message_only_announces_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(monkeypatch)
    side.ways = Ways()
    side.drop().channel.move([PIECE_OF_LAYER_3], [])
    assert side.sent == [(FOLLOWER, COMING, [RUN, b"", b"3 7 0", b"4"])] and side.ways.sent == [(1, b"data")]
    row = torch.zeros(PIECE_BYTES + 1, dtype=torch.uint8)
    side.traffic._movement.mover.channel.move([PIECE_OF_LAYER_3._replace(data=row)], [])  # type: ignore[union-attr]
    assert side.sent[-1][1] == PIECE and len(side.ways.sent) == 1, "one row that has no room there goes by message"


def test_an_announced_piece_is_received_at_once_and_taken_when_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(monkeypatch, FOLLOWER)
    side.ways = Ways()
    side.traffic.begin(side.lane, side.run, None)
    side.hear(COMING, b"another run", b"3", b"head", b"4", key=LEADER)
    side.hear(COMING, RUN, b"3", b"head", b"4", key=LEADER)  # before its plan
    [(src, num_bytes, on_landed, _)] = side.ways.expected
    assert (src, num_bytes) == (0, 4)
    on_landed(landed(b"data"))
    side.traffic.begin_return(plan(3), [4])
    assert Returning.made.received == [(0, [b"head", b"data"])]


def test_an_announced_piece_that_does_not_come_breaks_its_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(monkeypatch, FOLLOWER)
    side.ways = Ways()
    side.traffic.begin(side.lane, side.run, None)
    side.hear(COMING, RUN, b"", b"head", b"4", key=LEADER)
    [(_, _, _, on_failed)] = side.ways.expected
    on_failed(EngineError("the peer is gone"))
    assert [str(error) for error in side.broken] == ["the peer is gone"]
    side.traffic.end()
    on_failed(EngineError("late"))
    assert len(side.broken) == 1


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


def test_a_return_that_fails_half_way_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are offered again: they need the memory that was taken for weights."""

    def begin(returning: Returning, withheld: list[int]) -> None:
        raise StepError("there is no memory for a layer")

    side = Side(monkeypatch)
    side.traffic.begin(side.lane, side.run, None)
    monkeypatch.setattr(Returning, "begin", begin)
    with pytest.raises(StepError, match="no memory"):
        side.traffic.lead_return(plan(3), lambda withheld: None, lambda: None)
    assert Returning.made.is_undone and side.offers == 1


def test_where_no_pipeline_runs_no_weights_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(monkeypatch)
    side.drop()
    side.traffic.end()
    side.hear(PIECE, RUN, b"", b"late")
    side.hear(SETTLED, RUN, b"")
    with pytest.raises(StepError, match="runs no pipeline"):
        side.traffic.begin_return(plan(3), [4])
