"""What swapping KV costs: calls that copy, bytes, and two ways of a link (FastSwitch sections 2.2 and 3.1)."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOptions:
    """FastSwitch's three parts, each of which vLLM lacks; and how priorities change."""

    is_recompute: bool = False  # a request that is preempted loses its KV
    groups: bool = False  # blocks lie in runs: one call a run and layer, not one a block, layer, and K or V
    is_async: bool = False  # copies go beside the steps
    reuse: bool = False  # what the host has a copy of is not copied again
    every: int = 50  # iterations between two updates of priorities
    pattern: str = "random"  # or "markov": who was served lately is likely to stay urgent
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCosts:
    """Of one instance."""

    num_layers: int
    block_bytes: int  # all layers
    bytes_per_s: float  # one way
    call_s: float = 10e-6  # that one copy takes to be called
    copy_bytes: int = 128 << 10  # that one copy moves in vLLM (FastSwitch section 2.2)
    run_blocks: int = 20  # of a block group, in the mean (FastSwitch section 3.1)

    def calls(self, num_blocks: int, *, groups: bool) -> int:
        """Copies that so many blocks of a request take; with groups one a run and layer, keys and values apart."""
        single = -(-num_blocks * self.block_bytes // self.copy_bytes)
        runs = -(-num_blocks // self.run_blocks)
        return min(single, 2 * self.num_layers * runs) if groups else single

    def seconds(self, num_blocks: int, *, groups: bool) -> float:
        """A copy of them: calls go out while bytes move, so the longer of both counts."""
        return max(
            self.calls(num_blocks, groups=groups) * self.call_s, num_blocks * self.block_bytes / self.bytes_per_s
        )


@dataclass(slots=True)
class SwapCounts:
    """Totals of a run."""

    out_blocks: int = 0
    in_blocks: int = 0
    calls: int = 0
    switches: int = 0  # requests that left the batch for others
    waited_s: float = 0.0  # that steps waited for copies


@dataclass(slots=True)
class Link:
    """When each way is free again."""

    costs: SwapCosts
    free_s: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})  # by whether it is to the host

    def send(self, num_blocks: int, now_s: float, *, to_host: bool, groups: bool) -> float:
        """Queues a copy; when it ends."""
        begin_s = max(now_s, self.free_s[to_host])
        self.free_s[to_host] = begin_s + self.costs.seconds(num_blocks, groups=groups)
        return self.free_s[to_host]
