"""What one member of the source's group sends: its share of each copy, of each migration under way."""

from collections.abc import Callable

from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.kv.channel import PeerChannel
from pengserve.replicas.kv.pacing import Pace
from pengserve.replicas.kv.transfer import Segment, Transfer, TransferPlan
from pengserve.replicas.migration.messages import Name, Send
from pengserve.replicas.migration.sides import flows, lane_kv, lane_name, side_of
from pengserve.replicas.switching.member import Member

SendPiece = Callable[[InstanceKey, Name, list], None]


class Senders:
    """Belongs to the step thread. Knows blocks, and nothing of requests."""

    def __init__(self, member: Member, send_piece: SendPiece) -> None:
        """`send_piece(to, name, parts)` sends a piece to a member of the target's group."""
        self._member, self._send_piece = member, send_piece
        self._transfers: dict[Name, Transfer | None] = {}
        self.pace = Pace()  # of all copies: one piece a step leaves

    @property
    def names(self) -> list[Name]:
        """The migrations that this member sends something of."""
        return list(self._transfers)

    def send(self, name: Name, word: Send, on_sent: Callable[[int], None], on_failed: Callable[[str], None]) -> None:
        """Sends this member's share of a copy, beside the steps, or now where it is the last one.

        `on_sent(number)` is called when it has left, `on_failed(why)` where it could not leave beside the steps.

        Raises:
            EngineError: a member of the target's is gone.
        """
        member, source = self._member, side_of(self._member)
        rank, kv = source.members.index(member.key), lane_kv(member)
        copy, everyone = word.copy, (*source.members, *word.target.members)
        outgoing = [
            Segment(flow.target, copy.number, kv.rows(word.blocks, copy.first, copy.count, flow.share))
            for flow in flows(member, source, word.target)
            if flow.source == rank
        ]
        if not outgoing:  # others have the same heads
            self._transfers[name] = None
            on_sent(copy.number)
            return
        plan = TransferPlan(
            lane=lane_name(member),
            what="KV",
            rank=rank,
            outgoing=outgoing,
            incoming=(),
            on_done=lambda: on_sent(copy.number),
            on_failed=lambda error: on_failed(str(error)),
        )
        channel = PeerChannel(lambda peer, parts: self._send_piece(everyone[peer], name, list(parts)))
        transfer = self._transfers[name] = member.lanes.transfers.submit(plan, channel, self.pace)
        if word.is_last:
            member.lanes.transfers.run(transfer)

    def end(self, name: Name) -> None:
        """Sends no more for a migration. Idempotent."""
        transfer = self._transfers.pop(name, None)
        if transfer is not None:
            self._member.lanes.transfers.cancel(transfer)
