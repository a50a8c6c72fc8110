"""Which copy of a request counts, and what came of it over links that it is not known to be on.

Each time a record is sent it gets a new wire id, which names one copy of the request. A copy is on one instance at a
time and makes one sequence of tokens, which may reach us over several links. These rules keep that sequence whole:

| comes for wire id w | w is the record's, over its link | w is the record's, over another link | w is no record's |
|---|---|---|---|
| tokens | they count | stashed, until a MOVED leads there | an orphan: abort it there |
| MOVED, carried to L | the record is on L now, and L's stash counts | stashed behind the tokens | abort it at L |
| MOVED, not carried | sent again | stashed behind the tokens | nothing to do |
| the link's end | lost: sent again, stashed copies aborted | what that link stashed is dropped | nothing to do |

A copy that was carried to L can be followed only over the link on which L began to answer for it. If that link is not
up, or ended since w was sent, tokens may be missing: the record counts as lost, and the copy as an orphan.
"""

from collections.abc import Callable, Iterable

from pengserve.cluster.ingress.request.moves import Orphans, RequestMove, Stash
from pengserve.cluster.ingress.request.record import Links, RequestRecord
from pengserve.cluster.ingress.vllm_openai_seam import EngineCoreOutput
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.engine.link import InstanceLink

MAX_REMEMBERED_LOSSES = 4096


class Copies:
    """The copies that are on instances. Belongs to the event loop of the book."""

    def __init__(self, links: Links, clock: Callable[[], float]) -> None:
        self._links, self._clock = links, clock
        self.records: dict[str, RequestRecord] = {}  # by wire id; for others to read
        self._orphans = Orphans()
        self._num_losses = 0
        self._lost_at: dict[InstanceKey, int] = {}  # the value of `_num_losses` after that link's last end

    def sent(self, record: RequestRecord, link: InstanceLink, wire_id: str) -> None:
        """A new copy of `record` is on `link`, under this id."""
        record.wire_id, record.link, record.num_losses_seen = wire_id, link, self._num_losses
        self.records[wire_id] = record

    def drop(self, record: RequestRecord) -> None:
        """Nothing that still comes of this record's copy counts."""
        del self.records[record.wire_id]
        for link in record.stash or ():
            self._orphans.abort(link, [record.wire_id])
        record.link, record.stash = None, None

    def abort(self, records: Iterable[RequestRecord]) -> None:
        """Drops the copies of `records`, and tells the instances that have them, each once."""
        by_link: dict[InstanceLink, list[str]] = {}
        for record in records:
            assert record.link is not None, "it is on an instance"
            del self.records[record.wire_id]
            for link in (record.link, *(record.stash or ())):
                by_link.setdefault(link, []).append(record.wire_id)
        for link, wire_ids in by_link.items():
            self._orphans.abort(link, wire_ids)

    def abort_at(self, link: InstanceLink, wire_id: str) -> None:
        """Tells `link` to forget a copy that counts no more."""
        self._orphans.abort(link, [wire_id])

    def take_stray(
        self, record: RequestRecord | None, link: InstanceLink, event: EngineCoreOutput | RequestMove
    ) -> None:
        """Something came over a link that its record, if it has one, is not known to be on."""
        if record is None:
            if isinstance(event, EngineCoreOutput) and event.finish_reason is None:
                self._orphans.abort(link, [event.request_id])
            return
        if record.stash is None or not record.stash.num_events:
            record.stash = Stash(since_s=self._clock())
        record.stash.add(link, event)

    def carry(self, record: RequestRecord, to: InstanceKey) -> InstanceLink | None:
        """Puts `record` on the link to where its copy was carried; None where tokens of it may be missing."""
        link = self._links.find(to)
        if link is None:
            return None
        if self._lost_at.get(to, 0) > record.num_losses_seen:
            self._orphans.abort(link, [record.wire_id])
            return None
        record.link = link
        return link

    def overdue(self, now_s: float) -> list[RequestRecord]:
        """Records of which no word came where they moved. Their copies are told to go away."""
        overdue = [r for r in self.records.values() if r.stash is not None and r.stash.is_overdue(now_s)]
        for record in overdue:
            assert record.link is not None, "it is on an instance"
            self._orphans.abort(record.link, [record.wire_id])
        return overdue

    def lose(self, link: InstanceLink) -> list[RequestRecord]:
        """`link` is gone: the records whose copies went with it."""
        self._orphans.forget(link)
        self._num_losses += 1
        self._lost_at.pop(link.key, None)
        self._lost_at[link.key] = self._num_losses
        while len(self._lost_at) > MAX_REMEMBERED_LOSSES:
            del self._lost_at[next(iter(self._lost_at))]
        lost = []
        for record in self.records.values():
            if record.link is link:
                lost.append(record)
            elif record.stash is not None:
                record.stash.drop(link)
        return lost

    def is_busy(self, link: InstanceLink) -> bool:
        """Whether a copy is on `link`, or may be about to."""
        return any(
            record.link is link or (record.stash is not None and link in record.stash)
            for record in self.records.values()
        )
