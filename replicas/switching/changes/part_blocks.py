"""Which blocks of the narrower groups' lanes become free while their requests leave for a wider group."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pengserve.planners.types.layout import Group
from pengserve.replicas.engine.movers.reshard import Traveller


class PartBlocks:
    """Kept by the leader of a merge. Blocks are logical ones of the lane of a part, which all its members have."""

    def __init__(
        self, parts: Sequence[Group], leased: Mapping[int, Iterable[int]], coming: Iterable[Traveller]
    ) -> None:
        """
        Args:
            parts: that the group is formed of, in rank order.
            leased: blocks of the lane of each part that is a group, by the rank of who leads it.
            coming: all that move; what else the parts have is given up with the first wave.
        """
        starts = [sum(part.degree for part in parts[:index]) for index in range(len(parts))]
        self._ranks = {
            start: tuple(range(start, start + part.degree)) for start, part in zip(starts, parts, strict=True)
        }
        self._leased = {rank: set(blocks) for rank, blocks in leased.items()}
        self._holders = Counter((t.rank, block) for t in coming for block in set(t.part_ids))
        self._idle = {
            rank: sorted(block for block in blocks if not self._holders[rank, block])
            for rank, blocks in self._leased.items()
        }

    def ranks(self, leader: int) -> tuple[int, ...]:
        """The members of the part that this rank leads."""
        return self._ranks[leader]

    def num_idle(self, rank: int) -> int:
        """Blocks of a member that no request which moves holds: the first wave frees them."""
        return sum(len(blocks) for leader, blocks in self._idle.items() if rank in self._ranks[leader])

    def freed_with(self, traveller: Traveller) -> tuple[int, list[int]]:
        """As `Traveller.num_own` and `shared` of a request that comes from a group."""
        held = self._leased[traveller.rank].intersection(traveller.part_ids)
        shared = [block for block in held if self._holders[traveller.rank, block] > 1]
        return len(held) - len(shared), shared

    def leave(self, gone: Iterable[Traveller]) -> list[list[int]]:
        """These have left, or were given up: blocks that nothing needs since the last call, by part."""
        freed, self._idle = self._idle, {rank: [] for rank in self._idle}
        for traveller in gone:
            for block in self._leased.get(traveller.rank, set()).intersection(traveller.part_ids):
                self._holders[traveller.rank, block] -= 1
                if not self._holders[traveller.rank, block]:
                    freed[traveller.rank].append(block)
        return [sorted(freed.get(rank, ())) for rank in self._ranks]
