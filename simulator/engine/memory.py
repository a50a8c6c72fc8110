"""What an instance's memory holds in each shape: weights, and KV in what they leave.

shape   weights of an instance                      a block
dp      all                                         block_size tokens, all layers
tp p    all, as views (a static cluster: its share)  p times the tokens, at each member the bytes of one dp block
pp s    all that is not in layers, and its layers    block_size tokens, at each member the bytes of its layers
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from pengserve.planners.layer_sizes import LayerSizes
from pengserve.planners.stages import Parts, stage_layers, stage_of
from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.snapshot import KvCapacity, LaneInfo
from pengserve.planners.types.step_cost import STEP_TOKENS, StepCost
from pengserve.planners.types.units import blocks_for, format_bytes

MIN_BLOCKS = 2  # of a lane that can serve at all
WRITTEN_BLOCKS = 2  # that the smallest step writes: the end of one, and the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """KV of one instance on device and host, sized as by `engine.tiers.tier_memory`. Blocks hold all layers."""

    num_layers: int
    device_blocks: int  # vLLM's null block among them
    host_blocks: int
    block_bytes: int  # of one block in one layer
    bytes_per_s: float  # between the two, one way

    def num_logical(self, longest_tokens: int, block_size: int) -> int:
        """Blocks of the scheduler, without the null block; one request of `longest_tokens` can always be staged."""
        reserved = 1 + -(-blocks_for(longest_tokens, block_size) // self.num_layers)
        return self.device_blocks + self.host_blocks - min(reserved, self.device_blocks - 1) - 1

    def longest_tokens(self, block_size: int) -> int:
        """Tokens of a request of which one layer fits beside what is written."""
        return self.num_layers * (self.device_blocks - 1 - WRITTEN_BLOCKS) * block_size


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one instance, which may be several GPUs that always work together."""

    memory_bytes: int  # for weights and KV together, over all of its GPUs
    weight_bytes: int  # of the whole model
    num_layers: int
    layer_bytes: int  # weights of one layer
    token_bytes: int  # KV of one token, over all layers and heads
    num_kv_heads: int
    base_degree: int = 1  # GPUs of an instance; each of its layers is sharded over them
    block_size: int = 16
    max_model_len: int = 1 << 30  # of the model, or as configured
    max_num_seqs: int = 256
    is_static: bool = False  # it has weights for the group that it belongs to, and never serves alone
    host_bytes: int = 0  # of the host, for KV of all layers; 0: no host tier
    link_bytes_per_s: float = 0.0  # to the host, one way

    @cached_property
    def tiers(self) -> Tiers | None:
        """KV on device and host, where there is a host tier."""
        if not self.host_bytes:
            return None
        return Tiers(
            num_layers=self.num_layers,
            device_blocks=max(0, self.memory_bytes - self.weight_bytes) // self.dp_block_bytes,
            host_blocks=self.host_bytes // self.dp_block_bytes,
            block_bytes=self.dp_block_bytes // self.num_layers,
            bytes_per_s=self.link_bytes_per_s,
        )

    @cached_property
    def dp_token_bytes(self) -> int:
        """KV of a token at an instance that is alone; more GPUs than KV heads keep copies."""
        return self.token_bytes * max(1, self.base_degree // self.num_kv_heads)

    @cached_property
    def dp_block_bytes(self) -> int:
        """Bytes of a dp block over all layers."""
        return self.dp_token_bytes * self.block_size

    @cached_property
    def layers(self) -> LayerSizes:
        """The model's layers, in memory that moves between weights and KV by the byte."""
        return LayerSizes(
            num_chunks=max(0, self.memory_bytes - (self.weight_bytes - self.num_layers * self.layer_bytes)),
            chunk_bytes=1,
            weight_bytes=(self.layer_bytes,) * self.num_layers,
            block_bytes=self.dp_block_bytes // self.num_layers,
        )

    @cached_property
    def dp(self) -> KvCapacity:
        """What one instance holds alone, on device and host together."""
        if (tiers := self.tiers) is not None:
            longest = min(self.max_model_len, tiers.longest_tokens(self.block_size))
            found = self._capacity(tiers.num_logical(longest, self.block_size), self.block_size)
            return replace(found, max_model_len=min(longest, found.max_model_len))
        return self._capacity((self.memory_bytes - self.weight_bytes) // self.dp_block_bytes, self.block_size)

    def tp(self, degree: int) -> KvCapacity:
        """What one member of a tensor-parallel group holds, in the group's blocks."""
        factor = max(1, self.base_degree // self.num_kv_heads)
        wide = max(1, self.base_degree * degree // self.num_kv_heads)
        num_blocks = self.dp.num_blocks
        if self.is_static:
            num_blocks = (self.memory_bytes - self.weight_bytes // degree) // self.dp_block_bytes
        return self._capacity(num_blocks, self.block_size * max(1, degree * factor // wide))

    def pp(self, num_stages: int) -> KvCapacity:
        """What a pipeline of such instances holds: as much as the stage with the least room.

        Raises:
            UnsupportedShapeError: there are fewer layers than stages.
        """
        stages = stage_layers(self.num_layers, num_stages)
        return self._capacity(min(map(self.layers.num_blocks, stages)), self.block_size)

    def lane(self, shape: str) -> KvCapacity:
        """What one member of a group of that shape holds. Raises as `pp`."""
        if shape == GroupKind.DP:
            return self.dp
        degree = int(shape[2:])
        return self.tp(degree) if shape.startswith(GroupKind.TP) else self.pp(degree)

    def stage_sizes(self, num_stages: int) -> tuple[int, ...]:
        """Layers by rank (see `planners.stages`)."""
        stages = [stop - start for start, stop in stage_layers(self.num_layers, num_stages)]
        return tuple(stages[stage_of(rank, num_stages)] for rank in range(num_stages))

    def first_blocks(self, parts: Parts) -> int:
        """Blocks of a pipeline that have memory at once on a drop: the layers' KV as it was, and the freed weights."""
        counts = []
        for rank, (num_before, num_after) in enumerate(_num_layers(parts)):
            freed_bytes = (num_before - num_after) * self.layer_bytes
            before = self.layers.num_blocks(parts.layers(rank))
            counts.append(before + freed_bytes // (num_after * self.layers.block_bytes))
        return min(counts)

    def remapped_layers(self, parts: Parts) -> int:
        """Layers of the member that drops or takes back most of them."""
        return max(in_part - in_all for in_part, in_all in _num_layers(parts))

    def _capacity(self, num_blocks: int, block_size: int) -> KvCapacity:
        num_blocks = max(0, num_blocks)
        return KvCapacity(
            num_blocks=num_blocks,
            block_size=block_size,
            bytes_per_block=self.dp_block_bytes,
            max_model_len=min(self.max_model_len, num_blocks * block_size),
            max_num_seqs=self.max_num_seqs,
            weight_bytes=self.weight_bytes,
        )


def _num_layers(parts: Parts) -> Iterator[tuple[int, int]]:
    """By rank: layers in its part, and in the pipeline of all."""
    for rank in range(sum(parts.sizes)):
        (first, stop), (low, high) = parts.layers(rank), parts.wide_layers(rank)
        yield stop - first, high - low


def lane_infos(
    sizes: Sizes,
    shapes: Iterable[str],
    step_costs: Mapping[str, StepCost] | None = None,
    step_tokens: int = STEP_TOKENS,
) -> tuple[LaneInfo, ...]:
    """What an instance says it can run: dp, and `shapes`; and what steps cost in each, as far as that is known."""
    costs = step_costs or {}
    capacities = {"dp": sizes.dp, **{shape: sizes.lane(shape) for shape in sorted(shapes)}}
    return tuple(
        LaneInfo(shape=shape, capacity=capacity, step_cost=costs.get(shape), step_tokens=step_tokens)
        for shape, capacity in capacities.items()
    )


def require_room(sizes: Sizes, shape: str, what: str) -> None:
    """Raise ConfigError where `what` (a model on a GPU, for people) leaves no room for KV in that shape."""
    capacity = sizes.lane(shape)
    if capacity.num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"{what} does not fit in {shape}: {format_bytes(sizes.weight_bytes)} of weights and KV are too much for"
            f" the {format_bytes(sizes.memory_bytes)} of each instance; take a larger GPU, or more of them for an"
            " instance (cluster.gpus_per_instance)"
        )
