"""What one member of the target's group gets: its share of each copy, of each migration under way.

Pieces come from every member of the source's group over connections of their own. A member that follows may get some
before it has heard from its leader where they go: they wait until then. A leader has heard of all that may come.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.kv.channel import PeerChannel, read_header
from pengserve.replicas.kv.transfer import Segment, Transfer, TransferPlan
from pengserve.replicas.migration.messages import Expect, Name
from pengserve.replicas.migration.sides import flows, lane_kv, lane_name, side_of
from pengserve.replicas.switching.member import Member

MAX_REMEMBERED = 1024  # migrations that have ended here: pieces come a few steps later at most


@dataclass(eq=False)
class _Reception:
    """One migration, as far as this member knows."""

    words: deque[Expect] = field(default_factory=deque)  # copies that have not begun: one at a time is written
    now: Expect | None = None
    transfer: Transfer | None = None  # of `now`
    early: list[tuple[InstanceKey, Sequence[Buffer]]] = field(default_factory=list)  # pieces that have come too soon


class Receivers:
    """Belongs to the step thread. Knows blocks, and nothing of requests. `on_written(name, number)` is called when
    this member's share of a copy is there.
    """

    def __init__(self, member: Member, on_written: Callable[[Name, int], None]) -> None:
        self._member, self._on_written = member, on_written
        self._receptions: dict[Name, _Reception] = {}
        self._ended: dict[Name, None] = {}  # the newest last: what still comes of these is dropped

    @property
    def names(self) -> list[Name]:
        """The migrations that this member knows of."""
        return list(self._receptions)

    def open(self, name: Name) -> None:
        """Leader: copies of this migration may come from now on."""
        self._receptions[name] = _Reception()

    def expect(self, name: Name, word: Expect) -> None:
        """This member's share of a copy comes.

        Raises:
            EngineError, ValueError: it cannot be written there.
        """
        if name not in self._ended:
            reception = self._receptions.setdefault(name, _Reception())
            reception.words.append(word)
            self._go_on(name, reception)

    def piece(self, name: Name, key: InstanceKey, parts: Sequence[Buffer]) -> None:
        """Bytes of some tiles have come from instance `key`.

        Raises:
            EngineError, ValueError: they do not belong here.
        """
        is_new = name not in self._receptions
        if is_new and (name in self._ended or side_of(self._member).leader == self._member.key):
            return
        reception = self._receptions.setdefault(name, _Reception())
        reception.early.append((key, parts))
        self._go_on(name, reception)

    def _go_on(self, name: Name, reception: _Reception) -> None:
        while self._receptions.get(name) is reception:
            if reception.transfer is None:
                if not reception.words:
                    return
                self._begin(reception, reception.words.popleft())
            transfer, word = reception.transfer, reception.now
            assert transfer is not None and word is not None
            waiting, reception.early = reception.early, []
            for key, parts in waiting:
                if read_header(parts[0]).layer > word.copy.number:
                    reception.early.append((key, parts))
                elif key in word.source.members:
                    transfer.receive(word.source.members.index(key), parts)
                else:
                    raise EngineError(f"instance {key} sent KV of a group that it is not in")
            if not transfer.is_done:
                return
            reception.transfer = None
            self._on_written(name, word.copy.number)

    def _begin(self, reception: _Reception, word: Expect) -> None:
        member, target = self._member, side_of(self._member)
        rank, kv, copy = len(word.source.members) + target.members.index(member.key), lane_kv(member), word.copy
        incoming = [
            Segment(flow.source, copy.number, kv.rows(word.blocks, copy.first, copy.count, flow.share))
            for flow in flows(member, word.source, target)
            if flow.target == rank
        ]
        plan = TransferPlan(lane=lane_name(member), what="KV", rank=rank, outgoing=(), incoming=incoming)
        reception.now = word
        reception.transfer = member.lanes.transfers.submit(plan, PeerChannel(lambda *_: None))
        reception.transfer.advance(0.0)  # it sends nothing

    def end(self, name: Name) -> None:
        """Writes no more for a migration: what still comes of it is dropped. Idempotent."""
        self._ended[name] = None
        while len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        reception = self._receptions.pop(name, None)
        if reception is not None and reception.transfer is not None:
            self._member.lanes.transfers.cancel(reception.transfer)

    def lost(self, key: InstanceKey) -> list[Name]:
        """A peer is gone: what its group sent ends here. The migrations that needed it."""
        found = [name for name, reception in self._receptions.items() if key == name[0] or _needs(reception, key)]
        for name in found:
            self.end(name)
        return found


def _needs(reception: _Reception, key: InstanceKey) -> bool:
    words = (*reception.words, reception.now) if reception.now is not None else reception.words
    return any(key in word.source.members for word in words if word is not None)
