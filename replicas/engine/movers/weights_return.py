"""The first part of a restore: dropped layers come back beside serving (KunServe section 4.4).

    begin     blocks that the group's scheduler has given up are those with the highest memory, by moving what is in use
              below them; their memory becomes room for the weights that are missing
    start     this member's own layers go to those that miss them, in pieces of about a step's time
    done      all weights are here; requests can go back to `dp`, or to narrower pipelines (`restore.py`)

The scheduler never hears of it: logical blocks stay, and only this member's table says where they are.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pengserve.planners.stages import Parts, rank_of
from pengserve.planners.types.errors import StepError
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.groups.pp_lane import PpLane
from pengserve.replicas.engine.instance_lanes import Lanes
from pengserve.replicas.engine.worker import place_blocks
from pengserve.replicas.kv.channel import Channel
from pengserve.replicas.kv.rows import WeightRows
from pengserve.replicas.kv.transfer import Segment, Transfer, TransferPlan


class WeightsReturn:
    """One member's part. Belongs to the step thread."""

    def __init__(self, lanes: Lanes, lane: PpLane, parts: Parts) -> None:
        """`parts` are what the pipeline ends in: they say which layers each member will have."""
        assert lanes.dp.memory is not None
        self._transfers, self._lane, self._parts = lanes.transfers, lane, parts
        self._memory, self._layers = lanes.dp.memory, lanes.dp.memory.layers
        self._kept = range(*lane.layers)
        self._goal = parts.layers(lane.rank)
        self._missing = [layer for layer in range(*self._goal) if layer not in self._kept]
        self._transfer: Transfer | None = None

    @torch.inference_mode()
    def begin(self, withheld: Sequence[int]) -> None:
        """Makes room for the weights out of the memory of `withheld`, which the scheduler does not hand out.

        Raises:
            StepError: these are too few.
        """
        limit = self._layers.sizes.num_blocks_beside(self._goal, self._lane.layers)
        if (tiers := self._lane.tiers) is None:
            self._compact(set(withheld), limit)
        else:
            tiers.shrink(limit, np.array(self._lane.table.physical(withheld), dtype=np.int64))
        for layer in self._kept:
            self._layers.resize_kv(layer, min(limit, self._layers.num_blocks(layer)))
        if tiers is not None:
            tiers.grow(limit)
        for layer in self._missing:
            self._layers.bring_weights(layer)

    def _compact(self, withheld: set[int], limit: int) -> None:
        """Gives each block in use memory below `limit`."""
        moved = self._find_room(withheld, limit)
        if moved:
            sources, targets = list(moved), list(moved.values())
            for layer in self._kept:
                self._layers.copy_kv(layer, sources, targets)
        place_blocks(self._lane.runner, moved)

    def _find_room(self, withheld: set[int], limit: int) -> dict[int, int]:
        """Gives each block in use memory below `limit`: {where it was: where it is to be}. Changes the table alone."""
        table = self._lane.table
        leased = table.leased()
        physical = dict(zip(leased, table.physical(leased), strict=True))
        high = [logical for logical in leased if logical not in withheld and physical[logical] >= limit]
        low = [logical for logical in leased if logical in withheld and physical[logical] < limit]
        used = set(physical.values())
        spare = [block_id for block_id in range(1, limit) if block_id not in used]
        if len(high) > len(low) + len(spare):
            raise StepError(f"{len(high)} blocks in use have no room below {limit}; more must be withheld")
        moved: dict[int, int] = {}
        for logical in high:
            origin = table.release([logical])[0]
            if spare:
                target = spare.pop()
            else:
                other = low.pop()
                target = table.release([other])[0]
                table.lease([other], [origin])
            table.lease([logical], [target])
            moved[origin] = target
        return moved

    def start(self, channel: Channel, on_done: Callable[[], None]) -> None:
        """Weights come and go from now on, beside the steps; `on_done`: this member has all of its own."""
        plan = TransferPlan(
            lane=self._lane.name,
            what="weights",
            rank=self._lane.rank,
            outgoing=[
                self._segment(rank, layer)
                for layer in self._kept
                for rank in range(self._lane.num_stages)
                if rank != self._lane.rank and layer in range(*self._parts.layers(rank))
            ],
            incoming=[self._segment(self._owner(layer), layer) for layer in self._missing],
            on_layer=self._memory.note_filled,
            on_done=on_done,
        )
        self._transfer = self._transfers.submit(plan, channel)

    def _segment(self, rank: int, layer: int) -> Segment:
        return Segment(rank, layer, WeightRows(self._layers, layer, self._memory.weight_order), round=layer)

    def _owner(self, layer: int) -> int:
        """The rank that keeps `layer` in the pipeline."""
        stage = next(i for i, layers in enumerate(self._lane.stages) if layer in range(*layers))
        return rank_of(stage, self._lane.num_stages)

    def receive(self, owner: int, parts: Sequence[Buffer | torch.Tensor]) -> None:
        """Takes a piece of another member's layer.

        Raises:
            EngineError: it is of no layer that is missing here, or packed in another way.
        """
        assert self._transfer is not None
        self._transfer.receive(owner, parts)

    def undo(self) -> None:
        """The restore is called off: memory is as in the pipeline again."""
        if self._transfer is not None:
            self._transfers.cancel(self._transfer)
        for layer in self._missing:
            self._memory.drop_weights(layer)
        goal = self._layers.sizes.num_blocks(self._lane.layers)
        for layer in self._kept:
            self._layers.resize_kv(layer, goal)
        if self._lane.tiers is not None:
            self._lane.tiers.grow(goal)
