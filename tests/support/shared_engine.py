"""An ingress's shares over one instance in virtual time: `FairQueue`, vLLM's scheduler, parking and chunk shares are
production's own; only the model, the channel and the clock are not.
"""

import heapq
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from vllm import SamplingParams

from benchmarks.fair.workload import Turn, Update, Workload
from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.cluster.ingress.request.request_options import RequestOptions
from pengserve.cluster.ingress.tenants.fair_queue import FairQueue
from pengserve.planners.types.contract import BUILT_IN_CLASSES, Contract
from pengserve.planners.types.tenants import FairnessConfig
from pengserve.replicas.engine.scheduling.chunk_shares import ChunkShares
from pengserve.replicas.engine.tiers.lane_tiers import LaneTiers
from pengserve.replicas.engine.tiers.residency import ResidentRequests
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.simulator.engine.tiers.virtual import VirtualTiers
from tests.support.vllm_requests import sent_request
from tests.support.vllm_schedulers import capacity_of, give_tokens, scheduler_handle

STEP_S, TOKEN_S = 2.5e-3, 75e-6  # of a step that decodes, and of a token of a prompt: the demo model on one core
DELAY_S = 3e-3  # from the client to the instance
TEND_S = 0.25


class RoomForAll(LaneTiers):
    """All KV stays on the device: nothing is copied."""

    def is_moving(self, blocks: Sequence[int]) -> bool:
        return False

    def bring(self, blocks: Sequence[int], keep: Sequence[int]) -> bool:
        return False

    def write_behind(self, blocks: Sequence[int]) -> None:
        return


@dataclass
class Outcome:
    """What became of one turn."""

    turn: Turn
    token_s: list[float] = field(default_factory=list)
    behind_s: float = 0.0  # for how long it has waited now, while all that were computed were less urgent
    longest_behind_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Seconds until its first token."""
        return self.token_s[0] - self.turn.at_s


class SharedEngine:
    """One instance and one ingress."""

    def __init__(
        self,
        *,
        places: int = 2,
        step_tokens: int = 512,
        num_blocks: int = 2000,
        is_fair: bool = True,
        parks: bool = True,
        has_chunks: bool = True,
        by_priority: bool | None = None,
        takes_updates: bool = True,
    ) -> None:
        """
        Args:
            by_priority: vLLM's policy; None: where shares are on.
            takes_updates: without shares, requests that wait are sorted anew when priorities change.
        """
        self.takes_updates = takes_updates
        self.now_s = 0.0
        by_priority = is_fair if by_priority is None else by_priority
        capacity = capacity_of(2 * num_blocks, 32, max_num_seqs=places, max_model_len=4096)
        self.handle = scheduler_handle(
            capacity, max_num_batched_tokens=step_tokens, policy="priority" if by_priority else "fcfs"
        )
        self.queue = FairQueue(FairnessConfig(is_on=is_fair), BUILT_IN_CLASSES, lambda: 1000.0 + self.now_s)
        self.chunks = ChunkShares(self.handle, lambda: self.now_s) if has_chunks else None
        self.residency = self._residency(num_blocks) if parks else None
        self.is_fair = is_fair
        self.records: dict[str, RequestRecord] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.urgency: dict[str, int] = {}  # priorities as clients wish, of requests that are here
        self.steps_tokens: list[int] = []
        self.num_parked: list[int] = []  # after each step
        self._tended_s = -1.0
        self.key = self  # as of a link

    def _residency(self, num_blocks: int) -> ResidentRequests:
        tiers = VirtualTiers(
            num_layers=4,
            device_blocks=num_blocks + 1,
            host_blocks=num_blocks,
            num_blocks=2 * num_blocks + 1,
            block_size=32,
            block_bytes=1 << 16,
            bytes_per_s=1e10,
            clock=lambda: self.now_s,
        )
        tiers.watch_uses(self.handle.uses)
        return ResidentRequests(self.handle, RoomForAll(tiers), num_blocks, self, lambda: self.now_s)

    # As a lane, to its parked requests; and as a link, to the ingress

    def num_used(self) -> int:
        return self.handle.num_blocks - 1 - self.handle.num_free()

    def num_available(self) -> int:
        return self.handle.num_free()

    def reorder(self, orders: Sequence[tuple[str, int, float]]) -> None:
        self.handle.reorder({request_id: (band, tag) for request_id, band, tag in orders})
        if self.chunks is not None:
            for _, band, _ in orders:
                self.chunks.note(band)
        if self.residency is not None:
            self.residency.unsettle()

    # The run

    def run(self, work: Workload, *, until_s: float = 1e9) -> list[Outcome]:
        """Serves a workload; outcomes in its order."""
        left: list[tuple[float, int, Turn | Update]] = []
        left += [(turn.at_s + DELAY_S, index, turn) for index, turn in enumerate(work.turns)]
        left += [(each.at_s + DELAY_S, len(work.turns) + index, each) for index, each in enumerate(work.updates)]
        heapq.heapify(left)
        while left or self.records:
            while left and left[0][0] <= self.now_s:
                _, index, each = heapq.heappop(left)
                if isinstance(each, Turn):
                    self._come(index, each)
                else:
                    self._change(each)
            if not self.records:
                self.now_s = left[0][0]
                continue
            if self.now_s > until_s:
                break
            self._step()
            if self.is_fair and self.now_s - self._tended_s >= TEND_S:
                self._tended_s = self.now_s
                parked = self.residency.num_parked() if self.residency is not None else 0
                self.queue.tend(1, is_short=bool(self.handle.counts()[1] + parked), num_slots=self.handle.max_running)
        return list(self.outcomes.values())

    def _come(self, number: int, turn: Turn) -> None:
        name = f"{number:06}"
        params = SamplingParams(max_tokens=turn.output_length, ignore_eos=True)
        sent = sent_request(name, [1] * turn.input_length, params, priority=turn.priority)
        sent.arrival_time = self.now_s
        contract = Contract(tenant=turn.tenant, priority=turn.priority)
        record = RequestRecord(sent, RequestOptions(contract=contract), wire_id=name)
        self.records[name], self.outcomes[name] = record, Outcome(turn)
        self.urgency[name] = turn.priority
        if self.is_fair:
            self.queue.come(record)
        record.link = self  # type: ignore[assignment]
        if self.chunks is not None:
            self.chunks.note(sent.priority)
        self.handle.add(Request.from_engine_core_request(sent, None))

    def _change(self, update: Update) -> None:
        """As `PUT /cluster/sessions/{id}/priority`."""
        for name, record in self.records.items():
            if self.outcomes[name].turn.session == update.session:
                self.urgency[name] = update.priority
                if self.is_fair:
                    self.queue.prioritize(record, update.priority)
                elif self.takes_updates:
                    self.reorder([(name, update.priority, record.request.arrival_time)])

    def _step(self) -> None:
        residency, chunks = self.residency, self.chunks
        with ExitStack() as around:
            if residency is not None:
                around.enter_context(residency.choosing())
            if chunks is not None and chunks.is_on:
                around.enter_context(chunks.step())
            output = self.handle.schedule()
            ids = list(output.num_scheduled_tokens)
            prompts = sum(count for count in output.num_scheduled_tokens.values() if count > 1)
            took_s = STEP_S + TOKEN_S * prompts
            self.now_s += took_s
        self.steps_tokens.append(output.total_num_scheduled_tokens)
        self.num_parked.append(residency.num_parked() if residency is not None else 0)
        self._note_outranked(ids, took_s)
        for name, has_token in give_tokens(self.handle, output).items():
            if has_token:
                self._token(name)

    def _note_outranked(self, computed: Iterable[str], took_s: float) -> None:
        most_urgent = min((self.urgency[name] for name in computed), default=0)
        for name in self.records:
            outcome = self.outcomes[name]
            if not outcome.token_s:
                is_behind = name not in computed and self.urgency[name] < most_urgent
                outcome.behind_s = outcome.behind_s + took_s if is_behind else 0.0
                outcome.longest_behind_s = max(outcome.longest_behind_s, outcome.behind_s)

    def _token(self, name: str) -> None:
        record = self.records[name]
        record.output_token_ids.append(7)
        self.outcomes[name].token_s.append(self.now_s)
        if record.first_token_s is None:
            record.first_token_s = self.now_s
            if self.is_fair:
                self.queue.begun(record)
        if not self.handle.knows(name):
            del self.records[name], self.urgency[name]
            if self.is_fair:
                self.queue.ended(record)
