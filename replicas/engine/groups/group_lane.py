"""What tensor-parallel and pipeline lanes have in common: one leader schedules, and every member executes its steps.

A lane has no memory of its own. Its block ids are logical; each member's table says which physical blocks they are.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.groups.group_run import GroupRun
from pengserve.replicas.engine.groups.step_message import ResumedRequest, StepCodec
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.engine.lanes.lane import Lane
from pengserve.replicas.engine.lanes.lane_build import LaneModel, block_hasher
from pengserve.replicas.engine.lanes.lane_groups import ActiveGroup, LaneGroup
from pengserve.replicas.engine.random_state import RandomState
from pengserve.replicas.engine.scheduling.block_groups import BlockGroups, blocks_of, grouped
from pengserve.replicas.engine.vllm_seam import (
    Request,
    SchedulerOutput,
    set_current_vllm_config,
)
from pengserve.replicas.engine.worker import adopt_request, forget_requests
from pengserve.replicas.kv.table import CellTable


class GroupLane(Lane):
    """One member's part in a group. Rank 0 leads."""

    _device = torch.device("cpu")

    def __init__(
        self,
        base: DpLane,
        active: ActiveGroup,
        group: LaneGroup,
        *,
        rank: int,
        model: LaneModel,
        scheduler: Any,
        capacity: KvCapacity,
    ) -> None:
        self.base, self.group, self.rank = base, group, rank
        self.model, self.config, self.runner = model, model.config, model.runner
        self.table = CellTable(capacity.num_blocks + 1)
        self._active, self._device = active, base.worker.device
        self._run: GroupRun | None = None
        self._is_held = False
        self._codec = StepCodec()
        self._known: list[ResumedRequest] = []
        self._forgotten: list[str] = []
        super().__init__(
            shape=f"{group.kind}{group.world_size}",
            scheduler=scheduler,
            block_hasher=block_hasher(base, model.config),
            capacity=capacity,
        )

    @property
    def name(self) -> str:
        """The group's, e.g. "tp2@(0,1)"."""
        return self.group.unique_name

    # Shape ------------------------------------------------------------------------------------------------------------

    @property
    def run(self) -> GroupRun:
        """The run of the group that the lane was entered with; only between `enter` and `leave`."""
        assert self._run is not None, f"{self.name} does not run"
        return self._run

    def enter(self, run: GroupRun) -> None:
        """Makes this the lane that vLLM's code sees."""
        self._run, self._is_held = run, False
        if self.leads and self.base.contracts is not None and self._slo_gate is None:
            self.keep_slos(self.base.contracts, self.base.placement_notes, places=self.base.places_by_slo)
        self.group.collectives = run.communicator
        self._active.activate(self.group)
        self._random_state = RandomState(self._device)
        self._random_state.seed(run.seed)

    def leave(self) -> None:
        """Gives vLLM's code back to the `dp` lane."""
        self._active.activate(None)
        self._run = self.group.collectives = None
        if self._slo_placement is not None:
            self._slo_placement.close()
        self._known, self._forgotten = [], []
        self._random_state.put_back()

    def hold(self, is_held: bool) -> None:
        """Leader: while the lane is held no new step begins, so that soon none is in flight."""
        self._is_held = is_held

    @property
    def num_in_flight(self) -> int:
        """Leader: steps that have begun and whose tokens have not come back."""
        return 0

    @property
    def is_settled(self) -> bool:
        """Whether this member has all of its memory, and its part of all KV."""
        return True

    @property
    def is_exchanging(self) -> bool:
        """Leader: whether some member waits for KV or memory since the group began."""
        return False

    def check_table(self, num_leased: int) -> Sequence[str]:
        """Whether the lane's table and the ledger agree; a sentence where they do not."""
        return ()

    # Steps ------------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Leader: whether `step` has anything to do."""
        return not self._is_held and super().has_work()

    @abstractmethod
    def follow(self, parts: Sequence[Buffer]) -> None:
        """Follower: executes a step of the leader's."""

    def _learn(self, forgotten: Sequence[str], known: Iterable[ResumedRequest]) -> None:
        """Before a step: requests that have left the leader, and then those that came to it half decoded.

        All members do this before the same step, the leader too. Forgetting empties the runner's batch, and the order
        in which it is filled again must be the same everywhere: members hand each other rows, not requests.
        """
        if forgotten:
            self.forget(forgotten)
        for resumed in known:
            request = Request(resumed.req_id, resumed.prompt_token_ids, resumed.sampling_params, None)
            request.append_output_token_ids(resumed.output_token_ids)
            self.adopt(request)

    def _placed(self, output: SchedulerOutput) -> SchedulerOutput:
        """The step with this member's physical blocks. The scheduler's own lists stay as they are."""

        def place(groups: BlockGroups) -> BlockGroups:
            return grouped(self.table.physical(blocks_of(groups)))

        cached = output.scheduled_cached_reqs
        return replace(
            output,
            scheduled_new_reqs=[replace(new, block_ids=place(new.block_ids)) for new in output.scheduled_new_reqs],
            scheduled_cached_reqs=replace(
                cached, new_block_ids=[None if ids is None else place(ids) for ids in cached.new_block_ids]
            ),
        )

    def _recompute_if_stuck(self, output: SchedulerOutput) -> None:
        """Requests that came with their KV can together leave no block for any of them: one gives up its own."""
        if not output.total_num_scheduled_tokens:
            self.scheduler.give_up_one()

    def longest_tokens(self) -> int:
        """Tokens of the longest running request. While one instance cannot hold so many, the group cannot end."""
        scheduler = self.scheduler
        return max((request.num_tokens for request in (*scheduler.running, *scheduler.holding)), default=0)

    # Requests that come and go ----------------------------------------------------------------------------------------

    def take_over(self, request: Request) -> None:
        """Leader: all members get to know the request with the next step."""
        params, outputs = request.sampling_params, list(request.output_token_ids)
        self._known.append(ResumedRequest(request.request_id, request.prompt_token_ids, params, outputs))

    def release(self, request_ids: Iterable[str]) -> None:
        """As of any lane. Members forget with the next step, before they get to know others by the same ids.

        A request that a step in flight is about is forgotten by all with the next step.
        """
        ids = list(request_ids)
        self.abort(ids)
        finished = self.scheduler.take_finished(i for i in ids if i not in self.ids_in_flight())
        self._forgotten += finished
        self._known = [resumed for resumed in self._known if resumed.req_id not in finished]

    def ids_in_flight(self) -> Set[str]:
        """Leader: requests that steps are about which have begun and not ended."""
        return frozenset()

    def give_up_host(self) -> None:
        """What the lane has on the host is of no use any more."""

    def accept_lease(self, logical_ids: Sequence[int]) -> None:
        """Follower: backs blocks that the leader has leased (`take_lease`)."""

    def adopt(self, request: Request) -> None:
        """Makes this member's runner know a half-decoded request as one that it had preempted itself."""
        adopt_request(self.runner, request, 1)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Makes this member's runner forget requests now, so that they can come back under the same ids."""
        if ids := list(request_ids):
            with set_current_vllm_config(self.config):
                forget_requests(self.runner, ids)

    def known_ids(self) -> list[str]:
        """Requests that this member's runner knows."""
        return list(self.runner.requests)
