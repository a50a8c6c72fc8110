"""Any sequence of reserve, map, unmap and move, refusals included, leaves what a dictionary would.

The model is `(region, chunk) -> the number that was written there`; memory is looked at past the arena's books.
"""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pengserve.planners.types.errors import StepError
from pengserve.replicas.memory.arena.arena import Region
from tests.replicas.memory.arena.host_driver import needs_compiler
from tests.replicas.memory.arena.worlds import CpuWorld, CudaWorld, World
from tests.support.effort import examples

NUM_CHUNKS = 12
CHUNK = st.integers(0, 8)
REGION = st.integers(0, 3)
REFUSED_CALL = st.sampled_from([None, 0, 1])


class ArenaMachine(RuleBasedStateMachine):
    """Up to four regions of up to eight chunks over twelve physical chunks."""

    make_world: Callable[[int], World]

    def __init__(self) -> None:
        super().__init__()
        self.world = type(self).make_world(NUM_CHUNKS)
        self.arena = self.world.arena
        self.regions: list[Region] = []
        self.model: dict[tuple[str, int], int] = {}
        self.addresses: dict[str, int] = {}
        self.num_written = 0

    @initialize(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=3))
    def reserve_some(self, sizes: list[int]) -> None:
        for size in sizes:
            self.reserve(size)

    @rule(size=st.integers(1, 8))
    def reserve(self, size: int) -> None:
        if len(self.regions) < 4:
            region = self.arena.reserve(size * self.arena.chunk_bytes - size % 2, f"region {len(self.regions)}")
            assert region.num_chunks == size
            self.regions.append(region)
            self.addresses[region.name] = region.address

    @rule(number=REGION, first=CHUNK, stop=CHUNK, refuse=st.booleans())
    def map(self, number: int, first: int, stop: int, refuse: bool) -> None:
        region = self.regions[number % len(self.regions)]
        wanted = [(region.name, chunk) for chunk in range(first, stop)]
        is_sane = first <= stop <= region.num_chunks and not any(key in self.model for key in wanted)
        if not is_sane:
            self.refused(ValueError, lambda: self.arena.map(region, first, stop))
        elif len(wanted) > NUM_CHUNKS - len(self.model):
            self.refused(StepError, lambda: self.arena.map(region, first, stop))
        elif wanted and refuse:
            self.world.backend.answers = [False]
            self.refused(StepError, lambda: self.arena.map(region, first, stop))
        else:
            self.arena.map(region, first, stop)
            for key in wanted:
                self.num_written += 1
                self.model[key] = self.num_written
                self.world.write(region, key[1], self.num_written)

    @rule(number=REGION, first=CHUNK, stop=CHUNK, refuse=st.booleans())
    def unmap(self, number: int, first: int, stop: int, refuse: bool) -> None:
        region = self.regions[number % len(self.regions)]
        wanted = [(region.name, chunk) for chunk in range(first, stop)]
        if first > stop or stop > region.num_chunks or any(key not in self.model for key in wanted):
            self.refused(ValueError, lambda: self.arena.unmap(region, first, stop))
        elif wanted and refuse:
            self.world.backend.answers = [False]
            self.refused(StepError, lambda: self.arena.unmap(region, first, stop))
        else:
            self.arena.unmap(region, first, stop)
            for key in wanted:
                del self.model[key]

    @rule(numbers=st.tuples(REGION, REGION), first=CHUNK, stop=CHUNK, target_first=CHUNK, refuse=REFUSED_CALL)
    def move(self, numbers: tuple[int, int], first: int, stop: int, target_first: int, refuse: int | None) -> None:
        source, target = (self.regions[number % len(self.regions)] for number in numbers)
        old = [(source.name, chunk) for chunk in range(first, stop)]
        new = [(target.name, target_first + i) for i in range(len(old))]
        is_sane = first <= stop <= source.num_chunks and target_first + len(old) <= target.num_chunks
        is_sane = is_sane and all(key in self.model for key in old) and not any(key in self.model for key in new)
        if not is_sane:
            self.refused(ValueError, lambda: self.arena.move(source, (first, stop), target, target_first))
        elif old and refuse is not None:
            self.world.backend.answers = [True, False] if refuse else [False]
            self.refused(StepError, lambda: self.arena.move(source, (first, stop), target, target_first))
        else:
            self.arena.move(source, (first, stop), target, target_first)
            self.model.update(zip(new, [self.model.pop(key) for key in old], strict=True))

    def refused(self, error: type[Exception], act: Callable[[], None]) -> None:
        """`act` raises; that nothing changed is what the invariants see."""
        with pytest.raises(error):
            act()

    @invariant()
    def chunks_are_conserved(self) -> None:
        assert self.arena.check() == ()
        assert self.arena.num_free == NUM_CHUNKS - len(self.model)

    @invariant()
    def memory_is_what_was_written(self) -> None:
        for region in self.regions:
            expected = sorted(chunk for name, chunk in self.model if name == region.name)
            assert self.world.mapped(region) == expected
            assert [chunk for first, stop in region.mapped for chunk in range(first, stop)] == expected
            assert all(a[1] < b[0] for a, b in zip(region.mapped, region.mapped[1:], strict=False))
            assert region.mapped_bytes == len(expected) * self.arena.chunk_bytes
            assert [self.world.read(region, chunk) for chunk in expected] == [
                self.model[region.name, chunk] for chunk in expected
            ]

    @invariant()
    def addresses_stay(self) -> None:
        assert self.addresses == {region.name: region.address for region in self.regions}

    def teardown(self) -> None:
        self.arena.close()


@pytest.mark.parametrize("world", [CpuWorld, pytest.param(CudaWorld, marks=needs_compiler)])
def test_any_sequence_of_changes(world: Callable[[int], World]) -> None:
    machine = type("Machine", (ArenaMachine,), {"make_world": staticmethod(world)})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(60), stateful_step_count=30))
