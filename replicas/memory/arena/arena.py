"""One owner of an instance's physical memory (KunServe section 4.2: parameters and KV share it by remapping).

    region    addresses, reserved once and never changed        chunk table: region chunk -> physical chunk, or nothing
    arena     physical chunks                                   each is free, or behind exactly one region chunk

What a tensor shows depends on what is mapped when it is read. So tensors are bound once, over the whole of a region,
and kernels and captured graphs stay valid when memory moves. Dropping layers [a, b) of weights W for KV K:

                 before                                after `move(W[i], (0, n), K[j], k)` for i in [a, b)
    W[i]         [0, n) mapped                         nothing mapped
    K[j]         [0, k) mapped, more reserved          [0, k) as before, [k, k + n) the chunks of W[i]

Nothing here is cleared: a chunk shows at its new address the bytes that it had at the old one, and a chunk of the free
list those of its last user. An arena is for one thread at a time.
"""

import time
import weakref
from dataclasses import dataclass

import torch

from pengserve.planners.types.errors import ConfigError, EngineError, StepError
from pengserve.planners.types.units import format_bytes
from pengserve.replicas.memory.arena.backend import Backend
from pengserve.replicas.memory.arena.free_chunks import FreeChunks, runs

_Table = list[int | None]  # by chunk of a region: the physical chunk behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaCounters:
    """What remapping has cost since the arena was opened. Two readings subtract to what was between them."""

    map_calls: int = 0  # to the system: `mmap`, or `cuMemMap` and `cuMemSetAccess`
    unmap_calls: int = 0
    seconds: float = 0.0  # spent in them

    def __sub__(self, earlier: "ArenaCounters") -> "ArenaCounters":
        return ArenaCounters(
            map_calls=self.map_calls - earlier.map_calls,
            unmap_calls=self.unmap_calls - earlier.unmap_calls,
            seconds=self.seconds - earlier.seconds,
        )


class Region:
    """Addresses of an arena, `num_chunks` chunks of them. `Arena.reserve` makes one."""

    def __init__(self, arena: "Arena", name: str, address: int, table: _Table) -> None:
        self.name, self.address = name, address
        self._arena, self._table = arena, table

    @property
    def num_chunks(self) -> int:
        """Chunks reserved."""
        return len(self._table)

    @property
    def mapped(self) -> tuple[tuple[int, int], ...]:
        """Ranges `[first, stop)` of region chunks that have memory, sorted; neighbours are one range."""
        backed = [index for index, chunk in enumerate(self._table) if chunk is not None]
        return tuple((first, first + count) for _, first, count in runs(backed))

    @property
    def mapped_bytes(self) -> int:
        """Bytes that have memory."""
        return sum(chunk is not None for chunk in self._table) * self._arena.chunk_bytes

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """All of the region, mapped or not, `[bytes / size of dtype]`. Its address is that of the region for ever.

        It keeps the arena alive. What reads or writes an element that is not mapped is lost: on a CPU the process dies
        of SIGSEGV, on CUDA the context of an illegal address.
        """
        return self._arena._tensor(self).view(dtype)


class Arena:
    """`num_bytes // chunk_bytes` chunks of physical memory, and the regions that show them.

    Raises ValueError where a chunk would get two owners, or none, or a region is of another arena: a programmer's
    mistake.
    """

    def __init__(self, backend: Backend, num_bytes: int, chunk_bytes: int) -> None:
        """Takes the memory.

        Raises:
            ConfigError: the sizes do not suit the device, or it does not have the memory.
        """
        unit = backend.granularity
        if chunk_bytes <= 0 or chunk_bytes % unit:
            raise ConfigError(f"chunk_bytes is {chunk_bytes}: choose a multiple of {unit} ({format_bytes(unit)})")
        if num_bytes < chunk_bytes:
            raise ConfigError(f"memory_bytes is {num_bytes}: choose at least one chunk ({format_bytes(chunk_bytes)})")
        self.chunk_bytes, self.num_chunks = chunk_bytes, num_bytes // chunk_bytes
        backend.create(self.num_chunks, chunk_bytes)
        self._backend = backend
        self._free = FreeChunks(self.num_chunks)
        self._regions: list[Region] = []
        self._tables: dict[int, _Table] = {}  # of all regions, by address; the finalizer must not hold the regions
        self._counters = ArenaCounters()
        self._is_closed = False
        # Addresses are given back when no tensor is left that shows them, `close` or not.
        self._finalizer = weakref.finalize(self, _end, backend, self._tables, chunk_bytes)
        self._finalizer.atexit = False  # tensors may live on in what runs after; the system takes all back

    @property
    def num_free(self) -> int:
        """Chunks behind no region."""
        return len(self._free)

    @property
    def counters(self) -> ArenaCounters:
        """Calls and time up to now."""
        return self._counters

    @property
    def regions(self) -> tuple[Region, ...]:
        """All of them, in the order of `reserve`."""
        return tuple(self._regions)

    def grow(self, num_chunks: int) -> None:
        """Takes so many chunks more of the device's memory; they are free.

        Raises:
            ConfigError: the device does not have them; nothing changed.
        """
        self._require_open()
        if num_chunks:
            self._backend.create(num_chunks, self.chunk_bytes)
            self._free.give(range(self.num_chunks, self.num_chunks + num_chunks))
            self.num_chunks += num_chunks

    def reserve(self, num_bytes: int, name: str) -> Region:
        """Addresses for `num_bytes`, rounded up to chunks, for as long as the arena lives. Nothing is mapped.

        Raises:
            StepError: the system has no such range.
        """
        if num_bytes <= 0:
            raise ValueError(f"region {name} needs at least one byte, not {num_bytes}")
        self._require_open()
        table: _Table = [None] * -(-num_bytes // self.chunk_bytes)
        address = self._backend.reserve(len(table) * self.chunk_bytes)
        self._tables[address] = table
        region = Region(self, name, address, table)
        self._regions.append(region)
        return region

    def map(self, region: Region, first: int, stop: int) -> None:
        """Puts free memory behind chunks `[first, stop)` of `region`.

        Raises:
            StepError: too few chunks are free, or the system refused; nothing changed.
        """
        self._require_empty(region, first, stop)
        wanted = stop - first
        if wanted > self.num_free:
            raise StepError(f"{self.num_free} chunks are free, {wanted} wanted for {region.name}: unmap others first")
        chunks = self._free.take(wanted)
        try:
            self._map(region, first, chunks)
        except StepError:
            self._free.give(chunks)
            raise

    def unmap(self, region: Region, first: int, stop: int) -> None:
        """Takes the memory behind chunks `[first, stop)` of `region` away and gives it to the free list.

        Waits for the device first, as `move` does: what it was given before may use the memory.

        Raises:
            StepError: the system refused; nothing changed.
        """
        chunks = self._backed(region, first, stop)
        self._unmap(region, first, stop)
        self._free.give(chunks)

    def move(self, source: Region, chunks: tuple[int, int], target: Region, target_first: int) -> None:
        """Takes the memory behind `chunks` (`[first, stop)` of `source`) to `target`, in order, with its bytes.

        Needs nothing of the free list. `source` and `target` may be one region, the ranges must not meet.

        Raises:
            StepError: the system refused; nothing changed.
        """
        first, stop = chunks
        physical = self._backed(source, first, stop)
        target_stop = target_first + len(physical)
        self._require_empty(target, target_first, target_stop)
        self._map(target, target_first, physical)  # first, because this is what may be refused
        try:
            self._unmap(source, first, stop)
        except StepError as error:
            try:
                self._unmap(target, target_first, target_stop)
            except StepError as second:
                raise EngineError(
                    f"chunks [{first}, {stop}) of {source.name} did not move to {target.name}: unmapping failed"
                    f" ({error}) and the rollback failed too ({second}); restart this instance"
                ) from error
            raise

    def mirror(self, num_chunks: int, name: str) -> Region:
        """Addresses that show chunks of regions once more, by `show`. It owns none: nothing else may name it.

        Raises:
            StepError: the system has no such range.
        """
        region = self.reserve(num_chunks * self.chunk_bytes, name)
        self._regions.remove(region)
        return region

    def show(self, mirror: Region, first: int, region: Region, count: int) -> None:
        """The first `count` chunks of `region`, up to the first one without memory, are also seen in `mirror`, from
        chunk `first` on, as long as nothing moves. Where the region has no memory the mirror shows nothing.

        Raises:
            StepError: the system refused; part of this part of the mirror shows nothing.
        """
        self._require_range(mirror, first, first + count)
        missing = next((i for i, chunk in enumerate(region._table[:count]) if chunk is None), count)
        chunks = self._backed(region, 0, missing)
        shown = mirror._table[first : first + count]
        same = next((i for i, chunk in enumerate(chunks) if shown[i] != chunk), len(chunks))
        stale = [first + i for i in range(same, count) if shown[i] is not None]
        for _, start, length in runs(stale):
            self._unmap(mirror, start, start + length)
        self._map(mirror, first + same, chunks[same:])

    def check(self) -> tuple[str, ...]:
        """What is wrong, in sentences; empty when every chunk is free or mapped exactly once."""
        owners: dict[int, list[str]] = {chunk: [] for chunk in range(self.num_chunks)}
        for chunk in self._free:
            owners.setdefault(chunk, []).append("the free list")
        for region in self._regions:
            for index, backing in enumerate(region._table):
                if backing is not None:
                    owners.setdefault(backing, []).append(f"chunk {index} of {region.name}")
        wrong = [
            f"physical chunk {chunk} "
            + (f"belongs to {' and '.join(names)}" if names else "is neither free nor mapped")
            for chunk, names in owners.items()
            if len(names) != 1
        ]
        wrong += [f"physical chunk {chunk} does not exist" for chunk in owners if not 0 <= chunk < self.num_chunks]
        num_free = sum(1 for _ in self._free)
        if num_free != len(self._free):
            wrong.append(f"the free list counts {len(self._free)} chunks and has {num_free}")
        return tuple(wrong)

    def close(self) -> None:
        """Gives all physical memory back. Idempotent. Addresses stay reserved until the last tensor is gone.

        So code that uses a tensor afterwards fails, and never reads memory that has another owner by then.
        """
        self._is_closed = True
        _give_back(self._backend, self._tables, self.chunk_bytes)
        self._free = FreeChunks(self.num_chunks)

    def _tensor(self, region: Region) -> torch.Tensor:
        self._require_open()
        return self._backend.tensor(region.address, region.num_chunks * self.chunk_bytes, region)

    def _map(self, region: Region, first: int, chunks: list[int]) -> None:
        if not chunks:
            return
        start_s = time.perf_counter()
        calls = self._backend.map(self._address(region, first), chunks)
        self._count(calls, 0, time.perf_counter() - start_s)
        region._table[first : first + len(chunks)] = chunks

    def _unmap(self, region: Region, first: int, stop: int) -> None:
        if first == stop:
            return
        self._backend.wait()
        start_s = time.perf_counter()
        calls = self._backend.unmap(self._address(region, first), stop - first)
        self._count(0, calls, time.perf_counter() - start_s)
        region._table[first:stop] = [None] * (stop - first)

    def _count(self, map_calls: int, unmap_calls: int, seconds: float) -> None:
        before = self._counters
        self._counters = ArenaCounters(
            map_calls=before.map_calls + map_calls,
            unmap_calls=before.unmap_calls + unmap_calls,
            seconds=before.seconds + seconds,
        )

    def _address(self, region: Region, index: int) -> int:
        return region.address + index * self.chunk_bytes

    def _backed(self, region: Region, first: int, stop: int) -> list[int]:
        """Physical chunks behind the range, all of which is mapped."""
        self._require_range(region, first, stop)
        chunks = [chunk for chunk in region._table[first:stop] if chunk is not None]
        if len(chunks) != stop - first:
            raise ValueError(f"chunks [{first}, {stop}) of {region.name} are not all mapped: {region.mapped} are")
        return chunks

    def _require_empty(self, region: Region, first: int, stop: int) -> None:
        self._require_range(region, first, stop)
        if any(chunk is not None for chunk in region._table[first:stop]):
            raise ValueError(f"some chunks of [{first}, {stop}) of {region.name} are mapped: {region.mapped} are")

    def _require_range(self, region: Region, first: int, stop: int) -> None:
        self._require_open()
        if region._arena is not self:
            raise ValueError(f"region {region.name} belongs to another arena")
        if not 0 <= first <= stop <= region.num_chunks:
            raise ValueError(f"region {region.name} has chunks [0, {region.num_chunks}), not [{first}, {stop})")

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("the arena is closed")


def _give_back(backend: Backend, tables: dict[int, _Table], chunk_bytes: int) -> None:
    if any(chunk is not None for table in tables.values() for chunk in table):
        backend.wait()
    for address, table in tables.items():
        backed = [index for index, chunk in enumerate(table) if chunk is not None]
        for _, first, count in runs(backed):
            backend.unmap(address + first * chunk_bytes, count)
        table[:] = [None] * len(table)
    backend.release()


def _end(backend: Backend, tables: dict[int, _Table], chunk_bytes: int) -> None:
    _give_back(backend, tables, chunk_bytes)
    for address, table in tables.items():
        backend.free(address, len(table) * chunk_bytes)
