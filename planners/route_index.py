"""`dispatch.choose` over routes that are kept in order, so that a request costs about the same among 2 and 2,000.

Routes are kept by degree and by the size of what they hold, each such class in order of load. Of a class that holds
the request whole the first route is the best; a class that is too small is passed over; only in the one whose size the
request's own falls into are routes looked at one after the other until one holds it. Where none of these does, that is
all of them: no worse than `choose`.

    class   degree and bit length of the most tokens that one request may have there, e.g. (1, 14) for 8,192 to 16,383
    order   (full, pressure, requests, key), as `choose` compares them; only priority requests look at the first

Routes that hold a part of the request's prompt are compared with the best of all by themselves.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from pengserve.planners.dispatch import ANY, FULL, NO_HITS, Candidate, DispatchOptions, best_with_hits, reserve
from pengserve.planners.types.ids import InstanceKey

# full, pressure, requests, instance id, incarnation, most tokens, key
_Entry = tuple[bool, float, int, int, int, int, InstanceKey]
_ClassId = tuple[int, int]


class RouteIndex:
    """Candidates by key, and the choice among them.

    The choice equals that of `dispatch.choose`; earlier choices and updates do not affect it.

    The owner calls `update` whenever a part of a candidate has changed: new stats, a request sent or aged out of
    `unseen_tokens`, a priority request begun or ended. An update costs a search among and a move of pointers to the
    routes of one class: a few microseconds for thousands of them.
    """

    def __init__(self) -> None:
        self._candidates: dict[InstanceKey, Candidate] = {}
        self._where: dict[InstanceKey, tuple[_ClassId, _Entry, _Entry]] = {}
        self._urgent: dict[_ClassId, list[_Entry]] = {}  # for priority requests
        self._normal: dict[_ClassId, list[_Entry]] = {}  # for all others: with what is kept for priority requests

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: InstanceKey) -> bool:
        return key in self._where

    def update(self, candidate: Candidate) -> None:
        """Takes in `candidate` in place of what was known of its key."""
        key, most_tokens, pressure = candidate.key, candidate.most_tokens, candidate.pressure
        self._candidates[key] = candidate
        rest = (candidate.num_requests, key.instance_id, key.incarnation, most_tokens, key)
        urgent: _Entry = (candidate.virtual_load >= FULL, pressure, *rest)
        normal: _Entry = (False, pressure + reserve(candidate), *rest)
        class_id = candidate.degree, _size(most_tokens)
        place = class_id, urgent, normal
        if self._where.get(key) == place:
            return
        self._leave(key)
        self._where[key] = place
        insort(self._urgent.setdefault(class_id, []), urgent)
        insort(self._normal.setdefault(class_id, []), normal)

    def forget(self, key: InstanceKey) -> None:
        """That route is gone. Harmless where it is not known."""
        self._candidates.pop(key, None)
        self._leave(key)

    def shape(self, key: InstanceKey) -> str | None:
        """What that route runs, as it was last updated; None where it is not known."""
        candidate = self._candidates.get(key)
        return None if candidate is None else candidate.shape

    def holds(self, key: InstanceKey, num_tokens: int, degree: int | None) -> bool:
        """Whether that route is known, could ever have so many tokens of one request, and has the wished degree."""
        candidate = self._candidates.get(key)
        return candidate is not None and candidate.holds(num_tokens) and degree in (None, candidate.degree)

    def choose(
        self, num_tokens: int, options: DispatchOptions = ANY, hits: Mapping[InstanceKey, int] = NO_HITS
    ) -> InstanceKey | None:
        """What `dispatch.choose` answers for all candidates."""
        needed = max(num_tokens, options.total_tokens)
        best = (
            self._choose_urgent(needed, options.degree) if options.is_priority else self._first(needed, options.degree)
        )
        if best is None or not hits:
            return best
        able = [self._candidates[key] for key in hits if self.holds(key, needed, options.degree)]
        return best_with_hits(self._candidates[best], able, hits, is_priority=options.is_priority).key

    def _first(self, needed: int, degree: int | None) -> InstanceKey | None:
        """The least pressure of all."""
        best = min(_firsts(self._normal, needed, degree), key=lambda found: found[1], default=None)
        return None if best is None else best[1][-1]

    def _choose_urgent(self, needed: int, degree: int | None) -> InstanceKey | None:
        """The least pressure of the widest shape that has a route that is not full; else of the widest shape."""
        best = min(
            _firsts(self._urgent, needed, degree),
            key=lambda found: (found[1][0], -found[0], found[1]),
            default=None,
        )
        return None if best is None else best[1][-1]

    def _leave(self, key: InstanceKey) -> None:
        place = self._where.pop(key, None)
        if place is not None:
            class_id, urgent, normal = place
            _remove(self._urgent, class_id, urgent)
            _remove(self._normal, class_id, normal)


def _firsts(classes: dict[_ClassId, list[_Entry]], needed: int, degree: int | None) -> Iterator[tuple[int, _Entry]]:
    """Of each class of that degree the first entry that holds `needed` tokens, with the degree."""
    size = _size(needed)
    for (class_degree, class_size), entries in classes.items():
        if class_size < size or (degree is not None and class_degree != degree):
            continue
        for entry in entries:
            if needed <= entry[5]:
                yield class_degree, entry
                break


def _size(num_tokens: int) -> int:
    """Its bit length; below all others where nothing fits."""
    return num_tokens.bit_length() if num_tokens >= 0 else -1


def _remove(classes: dict[_ClassId, list[_Entry]], class_id: _ClassId, entry: _Entry) -> None:
    entries = classes[class_id]
    del entries[bisect_left(entries, entry)]
    if not entries:
        del classes[class_id]
