"""Requests on their way between instances: outputs that came before the MOVED message, and copies without a record.

A request is known to instances by its wire id, and each time it is sent again it gets a new one. So a wire id names
one copy, which is on one instance at a time; what comes for it over two links is one sequence, cut by MOVED frames.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from pengserve.cluster.ingress.vllm_openai_seam import EngineCoreOutput
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.engine.link import InstanceLink

MAX_STASHED = 512  # events of one request; a MOVED that is so late will not come
STASH_TIMEOUT_S = 10.0
MAX_TOLD = 4096  # copies that are remembered as told to go away


@dataclass(frozen=True, slots=True)
class RequestMove:
    """One request's part of a MOVED frame."""

    to: InstanceKey | None
    carried: bool


@dataclass(slots=True)
class Stash:
    """What came for one copy over links that it is not known to be on, in order per link."""

    since_s: float
    num_events: int = 0
    _events: dict[InstanceLink, list[EngineCoreOutput | RequestMove]] = field(default_factory=dict)

    def __contains__(self, link: object) -> bool:
        return link in self._events

    def __iter__(self) -> Iterator[InstanceLink]:
        return iter(self._events)

    def add(self, link: InstanceLink, event: EngineCoreOutput | RequestMove) -> None:
        """Keeps `event` until the copy is known to be on `link`."""
        self._events.setdefault(link, []).append(event)
        self.num_events += 1

    def take(self, link: InstanceLink) -> tuple[list[EngineCoreOutput], RequestMove | None]:
        """What came over `link` until the copy left it again, and where it then went."""
        events = self._events.pop(link, [])
        outputs = [
            e
            for e in takewhile(lambda event: not isinstance(event, RequestMove), events)
            if not isinstance(e, RequestMove)
        ]
        num_taken = len(outputs)
        move = events[num_taken] if num_taken < len(events) else None
        if rest := events[num_taken + 1 :]:
            self._events[link] = rest
        self.num_events -= len(events) - len(rest)
        return outputs, move if isinstance(move, RequestMove) else None

    def drop(self, link: InstanceLink) -> None:
        """`link` is gone, and what it brought may have a hole."""
        self.num_events -= len(self._events.pop(link, ()))

    def is_overdue(self, now_s: float) -> bool:
        """Whether the MOVED that would make sense of this will not come any more."""
        return bool(self._events) and (self.num_events > MAX_STASHED or now_s - self.since_s > STASH_TIMEOUT_S)


class Orphans:
    """Copies that belong to no request any more. Each is told to go away once, however many outputs still come."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, InstanceLink], None] = {}  # in the order of telling

    def abort(self, link: InstanceLink, wire_ids: list[str]) -> None:
        """Tells `link` to forget these copies, where it was not told yet."""
        new = [wire_id for wire_id in wire_ids if (wire_id, link) not in self._told]
        if not new:
            return
        link.abort(new)
        self._told |= dict.fromkeys((wire_id, link) for wire_id in new)
        while len(self._told) > MAX_TOLD:
            del self._told[next(iter(self._told))]

    def forget(self, link: InstanceLink) -> None:
        """`link` is gone, with all its copies."""
        self._told = {pair: None for pair in self._told if pair[1] is not link}
