"""`dispatch.choose` over routes that are kept in order, so that a request costs about the same among 2 and 2,000.

Routes are kept by degree and by the size of what they hold, each such class in order of load. Of a class that holds
the request whole the first route is the best; a class that is too small is passed over; only in the one whose size the
request's own falls into are routes looked at one after the other until one holds it. Where none of these does, that is
all of them: no worse than `choose`.

    class   degree and bit length of the most tokens that one request may have there, e.g. (1, 14) for 8,192 to 16,383
    order   (load, requests, key), as `choose` compares them
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from pengserve.planners.dispatch import ANY, FULL, Candidate, DispatchOptions, reserve
from pengserve.planners.types.ids import InstanceKey

_Entry = tuple[float, int, int, int, int, InstanceKey]  # load, requests, instance id, incarnation, most tokens, key
_ClassId = tuple[int, int]


class RouteIndex:
    """Candidates by key, and the choice among them.

    The choice equals that of `dispatch.choose`; earlier choices and updates do not affect it.

    The owner calls `update` whenever a part of a candidate has changed: new stats, a request sent or aged out of
    `unseen_tokens`, a priority request begun or ended. An update costs a search among and a move of pointers to the
    routes of one class: a few microseconds for thousands of them.
    """

    def __init__(self) -> None:
        self._where: dict[InstanceKey, tuple[_ClassId, _Entry, _Entry]] = {}
        self._by_load: dict[_ClassId, list[_Entry]] = {}  # for priority requests
        self._by_rank: dict[_ClassId, list[_Entry]] = {}  # for all others: load with what is kept for priority requests

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: InstanceKey) -> bool:
        return key in self._where

    def update(self, candidate: Candidate) -> None:
        """Takes in `candidate` in place of what was known of its key."""
        key, most_tokens, load = candidate.key, candidate.most_tokens, candidate.virtual_load
        rest = (candidate.num_requests, key.instance_id, key.incarnation, most_tokens, key)
        by_load: _Entry = (load, *rest)
        kept = reserve(candidate)
        by_rank: _Entry = (load + kept, *rest) if kept else by_load
        class_id = candidate.degree, _size(most_tokens)
        place = class_id, by_load, by_rank
        if self._where.get(key) == place:
            return
        self.forget(key)
        self._where[key] = place
        insort(self._by_load.setdefault(class_id, []), by_load)
        insort(self._by_rank.setdefault(class_id, []), by_rank)

    def forget(self, key: InstanceKey) -> None:
        """That route is gone. Harmless where it is not known."""
        place = self._where.pop(key, None)
        if place is not None:
            class_id, by_load, by_rank = place
            _remove(self._by_load, class_id, by_load)
            _remove(self._by_rank, class_id, by_rank)

    def choose(self, num_tokens: int, options: DispatchOptions = ANY) -> InstanceKey | None:
        """What `dispatch.choose` answers for all candidates."""
        needed = max(num_tokens, options.total_tokens)
        if options.is_priority:
            return self._choose_urgent(needed, options.degree)
        best = min(_firsts(self._by_rank, needed, options.degree), key=lambda found: found[1], default=None)
        return None if best is None else best[1][-1]

    def _choose_urgent(self, needed: int, degree: int | None) -> InstanceKey | None:
        """The least loaded of the widest shape that has one that is not full; else of the widest shape."""
        best = min(
            _firsts(self._by_load, needed, degree),
            key=lambda found: (found[1][0] >= FULL, -found[0], found[1]),
            default=None,
        )
        return None if best is None else best[1][-1]


def _firsts(classes: dict[_ClassId, list[_Entry]], needed: int, degree: int | None) -> Iterator[tuple[int, _Entry]]:
    """Of each class of that degree the first entry that holds `needed` tokens, with the degree."""
    size = _size(needed)
    for (class_degree, class_size), entries in classes.items():
        if class_size < size or (degree is not None and class_degree != degree):
            continue
        for entry in entries:
            if needed <= entry[4]:
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
