"""Which requests of a merge, split or restore move where, and in which wave, so that as many as can keep their KV.

A merge's wave takes as many blocks of each member as its requests have in the group's lane, and frees, at the members
that each of them comes from, those that it had there. Their KV is read before they free anything, and written once they
have. So a wave may use the blocks that it frees: members must have enough blocks at its end, not in between.

    free blocks of two members, and what a request of 9 blocks changes that needs 5 of the lane
    (1, 2)  -> from the first: (+9 - 5, -5)  ->  (5, -3)  -> from the second: (-5, +9 - 5)  ->  (0, 1): a wave of both

A split's wave takes blocks of one member for each request, and frees the group's of all members at its end. A restore
has one wave, in which each request takes blocks of one part.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

# Members have the KV of a wave in buffers meanwhile.
MAX_WAVE_TOKENS = 1 << 14  # of a merge, for each member of a part: it has its heads of the part's, and of all others'
MAX_SPLIT_TOKENS = 1 << 15  # of a split, for all members together; the last request may go beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class Mover:
    """A request with KV, before a merge."""

    request_id: str
    ranks: tuple[int, ...]  # of the members that it comes from: of one, or of a narrower group, whose first one leads
    num_tokens: int  # whose KV moves
    num_needed: int  # blocks of the lane: so many at every member
    num_own: int  # blocks that it alone holds, of each member that it comes from
    shared: tuple[int, ...] = ()  # those that it holds with other movers alone (cached prefixes)


@dataclass(frozen=True, slots=True)
class Wave:
    """What becomes of some movers."""

    moving: tuple[Mover, ...]
    given_up: tuple[Mover, ...]  # there is no room for their KV: their blocks are free for the wave
    left: tuple[Mover, ...]  # wait for the next wave


def merge_wave(coming: Sequence[Mover], free: Sequence[int]) -> Wave:
    """The longest wave there is room for. Where there is none, requests are given up until there is.

    Args:
        coming: of each part in the order that they are served in; those that come first are given up last.
        free: blocks of each member, by rank.
    """
    room, left = _Room(coming, free), list(coming)
    given_up: list[Mover] = []
    while left:
        moving = _longest(left, room)
        if moving:
            gone = {mover.request_id for mover in moving}
            return Wave(tuple(moving), tuple(given_up), tuple(m for m in left if m.request_id not in gone))
        index = min(range(len(left)), key=lambda i: (room.least(left[i].ranks), -i))  # the last of the fullest part
        mover = left.pop(index)
        room.leave(mover)
        given_up.append(mover)
    return Wave((), tuple(given_up), ())


class _Room:
    """Free blocks of each member, and how many movers hold those that are shared."""

    def __init__(self, coming: Iterable[Mover], free: Iterable[int]) -> None:
        self.free = list(free)
        self._holders = Counter((mover.ranks[0], block) for mover in coming for block in mover.shared)

    def copy(self) -> "_Room":
        other = _Room((), self.free)
        other._holders = self._holders.copy()
        return other

    def least(self, ranks: Iterable[int]) -> int:
        """Free blocks of the fullest of these members."""
        return min(self.free[rank] for rank in ranks)

    def leave(self, mover: Mover) -> None:
        """It lets go of what it has where it comes from."""
        num_freed, leader = mover.num_own, mover.ranks[0]
        for block in mover.shared:
            self._holders[leader, block] -= 1
            num_freed += not self._holders[leader, block]
        for rank in mover.ranks:
            self.free[rank] += num_freed

    def enter(self, mover: Mover) -> None:
        """It gets what it needs in the lane."""
        self.free = [count - mover.num_needed for count in self.free]


def _longest(coming: Iterable[Mover], room: _Room) -> list[Mover]:
    """The movers of the longest wave that fits, in order.

    The next mover comes from the part with least room at a member, as that member's blocks decide what fits.
    """
    room, fitting = room.copy(), 0
    order: list[Mover] = []
    num_tokens: Counter[int] = Counter()
    queues: dict[tuple[int, ...], deque[Mover]] = {}
    for mover in coming:
        queues.setdefault(mover.ranks, deque()).append(mover)

    def may_move(ranks: tuple[int, ...]) -> bool:
        moving, queue = num_tokens[ranks[0]], queues[ranks]
        return bool(queue) and (not moving or moving + queue[0].num_tokens <= MAX_WAVE_TOKENS * len(ranks))

    while True:
        parts = [ranks for ranks in queues if may_move(ranks)]
        if not parts:
            return order[:fitting]
        ranks = min(parts, key=lambda ranks: (room.least(ranks), ranks))
        mover = queues[ranks].popleft()
        num_tokens[ranks[0]] += mover.num_tokens
        room.leave(mover)
        room.enter(mover)
        order.append(mover)
        if min(room.free) >= 0:
            fitting = len(order)


def split_wave(leaving: Iterable[tuple[int, int]], free: Sequence[int]) -> list[int | None]:
    """`place` for one wave of a split; a request without a rank waits for the next one."""
    return place(leaving, free, MAX_SPLIT_TOKENS)


def place(leaving: Iterable[tuple[int, int]], free: Sequence[int], max_tokens: float = inf) -> list[int | None]:
    """The place where each request of a group goes on: where most blocks are free. None where it does not fit there.

    Args:
        leaving: of each request, the tokens whose KV moves and the blocks that it needs where it goes.
        free: blocks of each place: a member, or a part that the group ends in.
        max_tokens: that move at most; the last request may go beyond.
    """
    room, num_tokens = list(free), 0
    places: list[int | None] = []
    for tokens, needed in leaving:
        best = max(range(len(room)), key=lambda p: (room[p], -p))
        if room[best] < needed or num_tokens > max_tokens:
            places.append(None)
            continue
        room[best] -= needed
        num_tokens += tokens
        places.append(best)
    return places
