"""The first part of a restore: dropped layers come back beside serving (KunServe section 4.4).

    begin     blocks that the group's scheduler has given up are those with the highest memory, by moving what is in use
              below them; their memory becomes room for the weights that are missing
    advance   a piece of this member's own layers goes to a member that misses them, of about a step's time
    done      all weights are here; requests can go back to `dp`, or to narrower pipelines (`restore.py`)

The scheduler never hears of it: logical blocks stay, and only this member's table says where they are.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from pengserve.planners.stages import Parts
from pengserve.planners.types.errors import EngineError, StepError
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.lanes import Lanes
from pengserve.replicas.engine.pacing import Pace, SendPiece
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.worker import place_blocks


class WeightsReturn:
    """One member's part. Belongs to the step thread."""

    def __init__(self, lanes: Lanes, lane: PpLane, parts: Parts) -> None:
        """`parts` are what the pipeline ends in: they say which layers each member will have."""
        assert lanes.dp.memory is not None
        self._lane, self._memory, self._layers = lane, lanes.dp.memory, lanes.dp.memory.layers
        self._kept = range(*lane.layers)
        self._goal = parts.layers(lane.rank)
        self._missing = [layer for layer in range(*self._goal) if layer not in self._kept]
        self._left = {layer: self._layers.sizes.weight_bytes[layer] for layer in self._missing}  # bytes to come
        others = [(rank, range(*parts.layers(rank))) for rank in range(lane.num_stages) if rank != lane.rank]
        self._outgoing = deque((layer, rank) for layer in self._kept for rank, goal in others if layer in goal)
        self._num_sent = 0  # bytes of the first of these
        self._piece = Pace()
        self._is_done = False
        self.send: SendPiece = lambda rank, parts: None
        self.on_done: Callable[[], None] = lambda: None

    @torch.inference_mode()
    def begin(self, withheld: Sequence[int]) -> None:
        """Makes room for the weights out of the memory of `withheld`, which the scheduler does not hand out.

        Raises:
            StepError: these are too few.
        """
        limit = self._layers.sizes.num_blocks_beside(self._goal, self._lane.layers)
        moved = self._compact(set(withheld), limit)
        sources, targets = list(moved), list(moved.values())
        for layer in self._kept:
            if moved:
                self._layers.copy_kv(layer, sources, targets)
            self._layers.resize_kv(layer, min(limit, self._layers.num_blocks(layer)))
        place_blocks(self._lane.runner, moved)
        for layer in self._missing:
            self._layers.bring_weights(layer)

    def _compact(self, withheld: set[int], limit: int) -> dict[int, int]:
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

    @torch.inference_mode()
    def advance(self, step_s: float) -> bool:
        """Sends one piece, of about the time that a step takes (`step_s`); True when there are no more to send.

        Raises:
            EngineError: the other member is gone.
        """
        if self._outgoing:
            (layer, rank), started_s = self._outgoing[0], time.perf_counter()
            weights = self._layers.weights(layer)
            data = weights[self._num_sent : self._num_sent + self._piece.num_bytes].cpu()
            head = b"%d %d %d" % (layer, self._num_sent, self._memory.weight_order)
            self.send(rank, [head, memoryview(data.numpy())])
            self._piece.took(data.nbytes, time.perf_counter() - started_s, step_s)
            self._num_sent += data.nbytes
            if self._num_sent == weights.nbytes:
                self._outgoing.popleft()
                self._num_sent = 0
        if not self._outgoing:
            self._finish()
            return True
        return False

    @torch.inference_mode()
    def receive(self, owner: int, parts: Sequence[Buffer]) -> None:
        """Takes a piece of another member's layer.

        Raises:
            EngineError: it is of no layer that is missing here, or packed in another way.
        """
        layer, start, order = map(int, bytes(parts[0]).split())
        data = torch.frombuffer(parts[1], dtype=torch.uint8)
        if order != self._memory.weight_order:
            raise EngineError(f"rank {owner} packs weights in another way: run one kind of CPU, one PyTorch")
        if self._left.get(layer, 0) < len(data):
            raise EngineError(f"rank {owner} sent weights of layer {layer} that do not belong here")
        self._layers.weights(layer)[start : start + len(data)].copy_(data)
        self._left[layer] -= len(data)
        if not self._left[layer]:
            self._memory.note_filled(layer)
        self._finish()

    def undo(self) -> None:
        """The restore is called off: memory is as in the pipeline again."""
        for layer in self._missing:
            self._memory.drop_weights(layer)
        goal = self._layers.sizes.num_blocks(self._lane.layers)
        for layer in self._kept:
            self._layers.resize_kv(layer, goal)

    def _finish(self) -> None:
        if not self._is_done and not self._outgoing and not any(self._left.values()):
            self._is_done = True
            self.on_done()
