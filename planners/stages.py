"""Which layers a stage of a pipeline has, which member has which stage, and how pipelines nest.

A pipeline of 2s stages has each stage of one of s, cut in two. Of two neighbouring pipelines that become one, the first
keeps the later halves and the second the earlier ones:

    pp2 of 0, 1         1: [0, 4)            0: [4, 8)
    pp2 of 2, 3         3: [0, 4)            2: [4, 8)
    pp4 of 0..3         3: [0, 2)  1: [2, 4)  2: [4, 6)  0: [6, 8)

So a member only ever drops layers when its pipeline grows, and only ever takes some back when it is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor

from pengserve.planners.types.errors import UnsupportedShapeError


@lru_cache(maxsize=256)
def stage_layers(num_layers: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of layers by stage: as even as can be, and the last stage never has most (it also samples).

    Raises:
        UnsupportedShapeError: there are fewer layers than stages.
    """
    if num_stages > num_layers:
        raise UnsupportedShapeError(f"{num_layers} layers do not fill {num_stages} stages")
    sizes = _stage_sizes(num_layers, num_stages)
    starts = [sum(sizes[:stage]) for stage in range(num_stages)]
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))


def _stage_sizes(num_layers: int, num_stages: int) -> list[int]:
    if num_stages % 2 == 0:
        return [part for size in _stage_sizes(num_layers, num_stages // 2) for part in (-(-size // 2), size // 2)]
    small, rest = divmod(num_layers, num_stages)
    # As vLLM does: what is left over goes to the stages before the last one, from the back.
    return [small + (num_stages - 1 - rest <= stage < num_stages - 1) for stage in range(num_stages)]


@lru_cache(maxsize=1024)
def stage_of(rank: int, num_stages: int) -> int:
    """The stage that the member of this rank has. The leader (rank 0) has the last one."""
    if num_stages % 2:
        return (rank - 1) % num_stages
    half = num_stages // 2
    return 2 * stage_of(rank, half) + 1 if rank < half else 2 * stage_of(rank - half, half)


def rank_of(stage: int, num_stages: int) -> int:
    """Inverse of `stage_of`."""
    return next(rank for rank in range(num_stages) if stage_of(rank, num_stages) == stage)


def microbatches_in_flight(num_stages: int, processors: float) -> int:
    """How many microbatches keep the processors of a pipeline's members busy, of which each member has so many, 1 at
    most.

    With a processor each, every stage has one microbatch. Stages that share a processor would only wait for each other
    with theirs, and every microbatch costs something by itself: fewer and larger ones give more tokens.
    """
    return min(num_stages, max(1, floor(num_stages * processors + 0.5)))


def nests(sizes: Sequence[int]) -> bool:
    """Whether groups of so many members, in rank order, make one pipeline in which each member's layers are some of
    those that it has: halves of it, or of a half, and so on.
    """
    num_stages, start = sum(sizes), 0
    for size in sizes:
        times, rest = divmod(num_stages, size)
        if size > 1 and (rest or times & (times - 1) or start % size):
            return False
        start += size
    return len(sizes) > 1


@dataclass(frozen=True, slots=True)
class Parts:
    """The members of a pipeline as the groups that it is formed of, or that it ends in."""

    num_layers: int
    sizes: tuple[int, ...]  # members of each group, in rank order; 1: an instance alone, which has all layers

    def __post_init__(self) -> None:
        if not nests(self.sizes):
            raise ValueError(f"groups of {self.sizes} members are no parts of a pipeline")

    def start(self, part: int) -> int:
        """The first rank of a part: it leads the part."""
        return sum(self.sizes[:part])

    def of(self, rank: int) -> int:
        """The part that this rank is in."""
        return next(part for part in range(len(self.sizes)) if rank < self.start(part) + self.sizes[part])

    def wide_layers(self, rank: int) -> tuple[int, int]:
        """The layers that this rank has in the pipeline of all; its part has these and more."""
        num_stages = sum(self.sizes)
        return stage_layers(self.num_layers, num_stages)[stage_of(rank, num_stages)]

    def layers(self, rank: int) -> tuple[int, int]:
        """The layers that this rank has in its part."""
        part = self.of(rank)
        size = self.sizes[part]
        return stage_layers(self.num_layers, size)[stage_of(rank - self.start(part), size)]
