"""A tensor-parallel lane: vLLM's model of one rank over the base lane's weights and KV memory.

    leader:    lease blocks -> schedule -> send the step -> execute -> sample -> outputs
    follower:                              receive it    -> execute -> sample

Every member samples, from the same logits and the same random state, so no token has to be sent.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.groups.group_lane import GroupLane
from pengserve.replicas.engine.groups.group_run import GroupRun
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.engine.lanes.kv_shares import LaneKv, shares_of
from pengserve.replicas.engine.lanes.lane_build import (
    LaneModel,
    active_lane,
    build_model,
    build_scheduler,
    group_config,
)
from pengserve.replicas.engine.lanes.lane_groups import ActiveGroup, LaneGroup
from pengserve.replicas.engine.lanes.shared_model import share_weights
from pengserve.replicas.engine.lanes.warm_up import is_compiled
from pengserve.replicas.engine.tiers.lane_tiers import LaneTiers, ToldUses, blocks_begun, uses_of
from pengserve.replicas.engine.tiers.residency import ResidentRequests
from pengserve.replicas.engine.tiers.tier_runner import TierRunner
from pengserve.replicas.engine.vllm_seam import (
    EngineCoreOutputs,
    GrammarOutput,
    Request,
    SchedulerOutput,
    VllmConfig,
    set_current_vllm_config,
)
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.kv.tiered_view import TieredKvView
from pengserve.replicas.memory.kv_layout import kv_blocks, kv_memory
from pengserve.replicas.memory.kv_views import KvView, block_layout
from pengserve.replicas.memory.weight_views import Shard

LEASE_CHUNK = 16  # blocks; fewer, larger leases keep step messages small


class TpLane(GroupLane):
    """One rank of a tensor-parallel group. Blocks are leased from the `dp` lane as they are needed."""

    residency: ResidentRequests | None
    _tiers: LaneTiers | None = None  # where KV is on the device and on the host
    _told_uses: ToldUses | None = None  # follower, there

    def __init__(
        self,
        base: DpLane,
        active: ActiveGroup,
        name: str,
        shard: Shard,
        on_lease: Callable[["TpLane", list[int]], None],
        model: LaneModel | None = None,
    ) -> None:
        """Builds the lane beside `base`; allocates no weights and no KV. Takes tens of milliseconds, and for as long as
        it takes to compile the model, where vLLM does that.

        Args:
            on_lease: backs new logical blocks of the lane with blocks of `base`.
            model: of a lane that this one replaces.

        Raises:
            UnsupportedShapeError: this model, or this device's attention backend, cannot run in this shape.
        """
        self.shard, self.on_lease = shard, on_lease
        group = LaneGroup("tp", name, shard.rank, shard.degree, is_compiled=is_compiled(base.pristine_config))
        config = self._config(base) if model is None else model.config
        with active_lane(active, group, config):
            if model is None:
                share = partial(share_weights, shard=shard)
                model = build_model(base, group, config, share, base.capacity.bytes_per_block)
                if base.tiers is not None:
                    names = list(model.runner.get_kv_cache_spec())
                    TierRunner(model.runner, base.tiers, names, config.cache_config.block_size)
            scheduler = build_scheduler(base, model) if shard.rank == 0 else None
        block_size = config.cache_config.block_size
        longest = min(config.model_config.max_model_len, base.capacity.num_blocks * block_size)
        self.kv_view = kv_view(model.runner, base.tiers)
        self.num_lendable = 0  # blocks that every member could still lend; the leader's knowledge
        self._lease: list[int] = []
        super().__init__(
            base,
            active,
            group,
            rank=shard.rank,
            model=model,
            scheduler=scheduler,
            capacity=replace(
                base.capacity,
                block_size=block_size,
                max_model_len=longest,
                max_num_seqs=config.scheduler_config.max_num_seqs,
            ),
        )
        # All logical blocks exist from the start; those without a lease are withheld from the scheduler.
        self._withheld: list[int] = []
        if self.leads:
            self._withheld = self.scheduler.withhold(self.scheduler.num_blocks - 1)[: base.capacity.num_blocks]
            self.scheduler.end_at(longest)
        if base.tiers is not None:
            self._tiers = LaneTiers(base.tiers, block_size, self.table.physical, num_members=shard.degree)
            if not self.leads:
                self._told_uses = ToldUses(base.scheduler.uses, self.table, base.tiers.placement.num_blocks)
            else:
                self._tiers.tell_others()
                self.residency = ResidentRequests(self.scheduler, self._tiers, base.num_unsaved, self)

    def _config(self, base: DpLane) -> VllmConfig:
        """Bytes per block stay constant."""
        capacity, degree = base.capacity, self.shard.degree
        block_size = kv_factor(base, degree) * capacity.block_size
        config = group_config(
            base, tp=degree, rank=self.shard.rank, block_size=block_size, num_blocks=capacity.num_blocks
        )
        if (sizes := base.tier_sizes) is not None:
            model = config.model_config
            model.max_model_len = min(model.max_model_len, sizes.longest_blocks * block_size)
        return config

    # Blocks -----------------------------------------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Blocks that the lane has leased."""
        return self.capacity.num_blocks - len(self._withheld)

    def num_available(self) -> int:
        """Leader: free blocks, and those that every member could still lend."""
        return self.num_free() + min(self.num_lendable, len(self._withheld))

    def back(self, logical_ids: Sequence[int], physical_ids: Sequence[int]) -> None:
        """Any member: `logical_ids` stand for these physical blocks from now on."""
        self.table.lease(logical_ids, physical_ids)

    def grow(self, count: int) -> list[int]:
        """Leader: `count` more logical blocks may be handed out; their ids, which every member must `back`."""
        logical_ids, self._withheld = self._withheld[:count], self._withheld[count:]
        self.scheduler.offer(logical_ids)
        return logical_ids

    def may_hold(self, num_blocks: int) -> None:
        """Leader: so many blocks every member can lend in all."""
        self.num_lendable = num_blocks - self.num_held

    def shrink(self, count: int) -> list[int]:
        """Leader: withdraws up to `count` free blocks; their ids, whose backing every member may release."""
        logical_ids = self.scheduler.withhold(min(count, self.num_free()))
        self._withheld = logical_ids + self._withheld
        return logical_ids

    def shrink_all(self) -> list[int]:
        """Leader: withdraws all free blocks; their ids."""
        return self.shrink(self.num_free())

    def take_lease(self) -> list[int]:
        """Logical blocks that the other members must back before they hear of them, and have not been told of yet."""
        lease, self._lease = self._lease, []
        return lease

    def accept_lease(self, logical_ids: Sequence[int]) -> None:
        """Follower: backs blocks that the leader has leased."""
        self.on_lease(self, list(logical_ids))

    def reserve(self, request: Request, num_tokens: int, num_computed_tokens: int) -> int | None:
        """As of any lane; leases what is missing, while the members have it."""
        self._lease_missing(self.blocks_needed(num_tokens))
        return super().reserve(request, num_tokens, num_computed_tokens)

    def enlarge(self, request: Request, num_tokens: int) -> bool:
        """As of any lane; leases what is missing, while the members have it."""
        self._lease_missing(self.blocks_for(num_tokens) - len(self.block_ids(request.request_id)))
        return super().enlarge(request, num_tokens)

    def kv(self, dp_view: KvView) -> LaneKv:
        """All layers of this member's heads."""
        shares = shares_of(self.shape, dp_view.num_layers, dp_view.layout.num_heads)
        return LaneKv(self.kv_view, shares[self.rank], dp_view.layout.num_tokens, self.table.physical)

    def check_table(self, num_leased: int) -> Sequence[str]:
        """Whether the lane's table and the ledger agree; a sentence where they do not."""
        found = len(self.table.leased())
        return () if found == num_leased else (f"{self.name} has {found} blocks, the ledger says {num_leased}",)

    def enter(self, run: GroupRun) -> None:
        """Makes this the lane that vLLM's code sees. Its scheduler says from now on what the leased blocks are for."""
        super().enter(run)
        if self._tiers is not None:
            self._tiers.watch(self._uses, self._told_uses)

    def leave(self) -> None:
        """Gives vLLM's code back to the `dp` lane."""
        super().leave()
        if self._tiers is not None:
            self._tiers.tiers.watch_uses(self.base.scheduler.uses)

    def _uses(self) -> np.ndarray:
        return uses_of(self.base.scheduler.uses(), self.table.backing(), self.scheduler.uses())

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(self) -> Mapping[int, EngineCoreOutputs]:
        """Leader: one step of the group."""
        started_s = time.perf_counter()
        with self._hurrying(), self._gating(), self._shortening(), self._choosing(), self._chunking():
            outputs = self._step()
        self._count(outputs.values(), time.perf_counter() - started_s)
        return outputs

    def _step(self) -> Mapping[int, EngineCoreOutputs]:
        self._lease_ahead()
        output = self.scheduler.schedule()
        self._recompute_if_stuck(output)
        grammar = self.scheduler.grammar_bitmask(output)
        hints = self._tiers.take_hints() if self._tiers is not None else ()
        parts = self._codec.encode(
            output, grammar, self._lease, self._forgotten, self._known, hints=hints, uses=self._uses_to_tell()
        )
        self.run.send_step(parts)
        self._learn(self._forgotten, self._known)
        self._lease, self._forgotten, self._known = [], [], []
        return self.scheduler.update(output, self._execute(output, grammar))

    def _uses_to_tell(self) -> bytes:
        if self._tiers is None or self.residency is None:
            return b""
        return self._tiers.uses_to_tell(self.scheduler.uses, has_chosen=self.residency.has_chosen)

    def follow(self, parts: Sequence[Buffer]) -> None:
        """Follower: executes a step of the leader's."""
        step = self._codec.decode(parts)
        self.on_lease(self, step.lease)
        if self._told_uses is not None:
            self._told_uses.hear(step.uses)
        if self._tiers is not None:
            self._tiers.hear(step.hints)
        self._learn(step.forgotten, step.known)
        self._totals.steps += 1
        self._execute(step.output, step.grammar)

    def _execute(self, output: SchedulerOutput, grammar: GrammarOutput | None) -> Any:
        with set_current_vllm_config(self.config), torch.inference_mode():
            placed = self._placed(output)
            if self._told_uses is not None:
                self._told_uses.hold(blocks_begun(placed))
            result = self.runner.execute_model(placed)
            result = self.runner.sample_tokens(grammar) if result is None else result
        self.group.require_whole()
        return result

    def _lease_ahead(self) -> None:
        """Leases what the next step may need at most, while the members have it."""
        if not self.num_lendable:
            return
        scheduler = self.config.scheduler_config
        waiting = max((request.num_tokens for request in self.scheduler.waiting), default=0)
        tokens = max(scheduler.max_num_batched_tokens, waiting)
        self._lease_missing(-(-tokens // self.capacity.block_size) + sum(self.scheduler.counts()))

    def _lease_missing(self, num_wanted: int) -> None:
        """Leases what is missing of so many free blocks, while the members have it."""
        missing = num_wanted - self.num_free()
        if missing > 0 and self.num_lendable > 0:
            count = min(max(missing, LEASE_CHUNK), self.num_lendable, len(self._withheld))
            lease = self.grow(count)
            self._lease += lease
            self.on_lease(self, lease)
            self.num_lendable -= count


def kv_factor(base: DpLane, degree: int) -> int:
    """By how much a block of degree `degree` holds more tokens than one of `dp` (Flying Serving Eq. 3)."""
    heads: int = base.pristine_config.model_config.get_total_num_kv_heads()
    return min(degree, heads)


def kv_view(runner: Any, tiers: TieredKv | None = None) -> KvView:
    """The runner's KV of all layers, also what is on the host; measures how its attention backend keeps a block."""
    layers = runner.compilation_config.static_forward_context
    names = [name for group in runner.kv_cache_config.kv_cache_groups for name in group.layer_names]
    spec = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    layer, order = layers[names[0]], runner.cache_config.kv_cache_layout

    def write(keys: torch.Tensor, values: torch.Tensor, block: torch.Tensor) -> None:
        slots = torch.arange(spec.block_size, device=block.device)
        cache = kv_blocks(block, order, num_heads=spec.num_kv_heads, num_tokens=spec.block_size)
        layer.impl.do_kv_cache_update(layer, keys.contiguous(), values.contiguous(), cache, slots)

    layout = block_layout(
        write,
        num_heads=spec.num_kv_heads,
        num_tokens=spec.block_size,
        head_size=spec.head_size,
        dtype=spec.dtype,
        device=runner.device,
    )
    device = [kv_memory(layers[name].kv_cache) for name in names]
    if tiers is None:
        return KvView(device, layout)
    return TieredKvView(device, tiers.host.cells.view(spec.dtype), layout, tiers)
