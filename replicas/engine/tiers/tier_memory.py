"""The memory of an instance with a host tier: how many logical blocks its scheduler gets, and what is behind them."""

import os
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch

from pengserve.planners.types.errors import ConfigError, UnsupportedShapeError
from pengserve.planners.types.units import format_bytes
from pengserve.replicas.kv.host_tier import HostTier
from pengserve.replicas.kv.pool import DevicePool, seen_twice, whole_blocks
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.memory.arena.cpu import available_bytes
from pengserve.replicas.memory.arena.open import backend_of
from pengserve.replicas.memory.layers import LayerMemory

OPTIONS = "pengserve_tiers"
"""Key of vLLM's `additional_config` under which `TierOptions` travel to the worker."""

AUTO_SHARE = 0.25  # of the node's free memory, where `memory.host_bytes` is auto
MAX_SHARE = 0.9  # of the node's free memory that a host tier may take
LEAST_WRITTEN = 2  # blocks that the smallest step writes: the end of one, and the next


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """What the user gave."""

    host_bytes: int  # -1: a share of the node's memory
    link_bytes_per_s: float = 0.0  # 0: as fast as the machine copies
    file: str = ""  # where the host tier is kept instead of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSizes:
    """Blocks of device, host and scheduler."""

    num_layers: int
    block_size: int  # tokens
    block_bytes: int  # of one block in one layer
    device_blocks: int  # in each layer, vLLM's null block among them
    host_blocks: int
    reserved_blocks: int  # of the device, which no logical block stands for: the room for a step when the host is full
    max_model_len: int

    @property
    def longest_blocks(self) -> int:
        """Blocks of the longest request that can be stepped with its layers staged, in any lane."""
        return self.num_layers * min(self.reserved_blocks - 1, self.device_blocks - 1 - LEAST_WRITTEN)

    @property
    def num_blocks(self) -> int:
        """Logical blocks, vLLM's null block among them."""
        return self.device_blocks + self.host_blocks - self.reserved_blocks

    @property
    def num_bytes(self) -> int:
        """What vLLM is told that its KV may have."""
        return self.num_blocks * self.num_layers * self.block_bytes


def tier_sizes(
    *,
    num_layers: int,
    block_size: int,
    block_bytes: int,
    device_bytes: int,
    host_bytes: int,
    max_model_len: int,
    page_bytes: int,
    fits_itself: bool = False,
) -> TierSizes:
    """How many blocks there are.

    When the host is full, every logical block beyond it is on the device in all layers, and one request of
    `max_model_len` tokens must still be stepped with its layers staged.

    Args:
        page_bytes: what the device's memory is mapped in.
        fits_itself: `max_model_len` may become smaller, so that the device is large enough.

    Raises:
        ConfigError: the device is too small for one such request, or the host tier for one block.
    """
    device_blocks = whole_blocks(device_bytes // (num_layers * block_bytes), num_layers, block_bytes, page_bytes)
    host_blocks = host_bytes // (num_layers * block_bytes)
    if host_blocks < 1:
        raise ConfigError(
            f"memory.host_bytes of {host_bytes} does not hold one block of {num_layers * block_bytes} bytes; raise it"
        )
    most = (num_layers * (device_blocks - 1 - LEAST_WRITTEN)) * block_size
    if fits_itself and most > 0:
        max_model_len = min(max_model_len, most)
    longest = -(-max_model_len // block_size)
    if longest + num_layers * LEAST_WRITTEN > num_layers * (device_blocks - 1):
        raise ConfigError(
            f"engine.max_model_len of {max_model_len} tokens needs a device that holds one layer of them beside what is"
            f" written: lower it to {max(0, most)}, or give KV more of the device"
        )
    reserved = 1 + -(-longest // num_layers)
    return TierSizes(
        num_layers=num_layers,
        block_size=block_size,
        block_bytes=block_bytes,
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        reserved_blocks=min(reserved, device_blocks - 1),
        max_model_len=max_model_len,
    )


def host_bytes_of(options: TierOptions, device_bytes: int) -> int:
    """Bytes of the host tier, once it is known that the node has them.

    Args:
        device_bytes: that the device's KV will take of the node's memory; 0 where the device has its own.

    Raises:
        ConfigError: it has not.
    """
    free = available_bytes() - device_bytes
    if options.host_bytes < 0:
        return max(0, int(free * AUTO_SHARE))
    if not options.file and options.host_bytes > free * MAX_SHARE:
        raise ConfigError(
            f"memory.host_bytes of {format_bytes(options.host_bytes)} is more than {MAX_SHARE:.0%} of the"
            f" {format_bytes(max(0, free))} that the node has free; lower it, or say auto"
        )
    return options.host_bytes


def chunks_of_blocks(chunk_bytes: int, block_bytes: int, page_bytes: int) -> int:
    """The smallest size of chunks, from `chunk_bytes` on, that is whole blocks and whole pages."""
    unit = lcm(block_bytes, page_bytes)
    return -(-chunk_bytes // unit) * unit


def check_engine(vllm_config: Any) -> None:
    """Raises UnsupportedShapeError where the engine works in a way that tiers have no part in."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    for is_so, what in (
        (parallel.world_size > 1, "an engine of several workers"),
        (vllm_config.speculative_config is not None, "speculative decoding"),
        (scheduler.async_scheduling, "asynchronous scheduling"),
        (not scheduler.enable_chunked_prefill, "prefill without chunks"),
        (vllm_config.kv_transfer_config is not None, "vLLM's own KV transfer"),
    ):
        if is_so:
            raise UnsupportedShapeError(f"{what} cannot have one yet; leave memory.host_bytes out, or that")


def check_one_kind(runner: Any) -> tuple[int, int, int]:
    """Layers, tokens of a block and bytes of a block in one layer.

    Raises:
        UnsupportedShapeError: the model keeps KV of several kinds.
    """
    specs = list(runner.get_kv_cache_spec().values())
    kinds = {(type(spec).__name__, spec.page_size_bytes, spec.block_size) for spec in specs}
    if len(kinds) != 1 or type(specs[0]).__name__ != "FullAttentionSpec":
        raise UnsupportedShapeError("this model keeps KV of several kinds, or not of full attention alone")
    return len(specs), specs[0].block_size, specs[0].page_size_bytes


def open_tiers(
    sizes: TierSizes, options: TierOptions, device: torch.device, layers: LayerMemory | None = None
) -> TieredKv:
    """Takes the memory of both tiers; that of the device is `layers`', where weights and KV share memory.

    Raises:
        ConfigError: there is not so much memory, or the device cannot remap its own.
    """
    num_bytes = sizes.num_layers * sizes.device_blocks * sizes.block_bytes
    memory = layers.side_by_side() if layers is not None else seen_twice(backend_of(device), num_bytes)
    pool = DevicePool(memory, sizes.num_layers, sizes.device_blocks, sizes.block_bytes)
    host = HostTier(
        sizes.num_layers,
        sizes.host_blocks,
        sizes.block_bytes,
        is_pinned=device.type == "cuda" and not options.file,
        path=f"{options.file}.{os.getpid()}" if options.file else None,
    )
    return TieredKv(
        pool,
        host,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        link_bytes_per_s=options.link_bytes_per_s,
    )
