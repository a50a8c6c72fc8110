"""A scheduler that serves the most urgent requests, and swaps the KV of others to the host: FastSwitch, and vLLM 0.x.

    waiting    holds no KV on the device (on the host, where an earlier turn of its conversation left some)
    loading    its KV is on its way to the device, while others run (FastSwitch Algorithm 1)
    running    in the batch
    leaving    its KV is on its way to the host; its blocks are free when it is there
    swapped    its KV is on the host

When a turn ends, its KV stays on the host for the next turn: the baseline copies all of it there, FastSwitch what the
host does not have (section 3.3). What no longer fits the host is forgotten, the least recently used first.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass

from pengserve.planners.cost_model import Chunk
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.scheduler import SimStep, check_admitted, check_fits
from pengserve.simulator.engine.swapping.costs import Link, SwapCosts, SwapCounts, SwapOptions
from pengserve.simulator.engine.swapping.priorities import Priorities
from pengserve.simulator.engine.unfinished import UnfinishedSteps
from pengserve.simulator.requests import LiveRequest
from pengserve.simulator.timing.steps import Batch


@dataclass(slots=True, eq=False)
class _Turn:
    live: LiveRequest
    conversation: str
    computed: int = 0  # tokens whose KV is somewhere
    saved: int = 0  # of them, that the host has a copy of
    is_here: bool = False  # holds blocks of the device
    ready_s: float = 0.0  # its KV is there from then on
    begun: bool = False


class SwapScheduler:
    """A `LaneScheduler` of one instance."""

    def __init__(
        self,
        capacity: KvCapacity,
        options: SchedulerOptions,
        costs: SwapCosts,
        swap: SwapOptions,
        host_blocks: int,
        clock: Callable[[], float],
    ) -> None:
        self.capacity, self.options, self.swap = capacity, options, swap
        self.num_blocks = capacity.num_blocks
        self.counts = SwapCounts()
        self._link, self._clock, self._num_host = Link(costs), clock, host_blocks
        self._priorities = Priorities(swap.pattern, swap.seed)
        self._turns: dict[LiveRequest, _Turn] = {}
        self._leaving: list[tuple[float, int]] = []  # when, and blocks that are free then
        self._kept: OrderedDict[str, int] = OrderedDict()  # tokens of conversations on the host, the oldest use first
        self._served: set[str] = set()  # since the last update of priorities
        self._unfinished: UnfinishedSteps[dict[_Turn, int]] = UnfinishedSteps()
        self._steps = self._prompted = self._generated = self._preempted = self._hits = self._queries = 0

    # What there is ----------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks of the device that nothing has."""
        held = sum(self._blocks(turn.live.num_tokens) for turn in self._turns.values() if turn.is_here)
        return max(0, self.num_blocks - held - sum(count for _, count in self._leaving))

    @property
    def running(self) -> Sequence[LiveRequest]:
        """Requests with KV, on the device or on the host."""
        return [turn.live for turn in self._turns.values() if turn.begun]

    @property
    def waiting(self) -> Sequence[LiveRequest]:
        """Requests that have not begun."""
        return [turn.live for turn in self._turns.values() if not turn.begun]

    @property
    def queued_tokens(self) -> int:
        """Of those that have not begun."""
        return sum(live.num_tokens for live in self.waiting)

    @property
    def prefilling_tokens(self) -> int:
        """Of those that have."""
        left = [turn.live.num_tokens - turn.computed for turn in self._turns.values() if turn.begun]
        return sum(count for count in left if count > 1)

    @property
    def totals(self) -> dict[str, int]:
        """Counts that only grow."""
        return {
            "step": self._steps, "total_prompt_tokens": self._prompted, "total_generated_tokens": self._generated,
            "total_preemptions": self._preempted, "total_prefix_queries": self._queries,
            "total_prefix_hits": self._hits, "total_resumed": 0,
        }  # fmt: skip

    def computed_tokens(self, request: LiveRequest) -> int:
        """Tokens whose KV there is."""
        return self._turns[request].computed

    def cached_tokens(self, request: LiveRequest) -> int:
        """Tokens that the host keeps of one that waits for its turn."""
        return self._turns[request].computed

    def blocks_freed(self, requests: Sequence[LiveRequest]) -> list[tuple[int, list[int]]]:
        """Blocks that each request holds."""
        return [(self._blocks(self._turns[r].live.num_tokens) if self._turns[r].is_here else 0, []) for r in requests]

    def copied(self) -> dict[str, float]:
        """Totals of swapping."""
        return asdict(self.counts)

    # Requests ---------------------------------------------------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """Takes a request; its priority is its conversation's. Raises PlanError where it is too long."""
        check_fits(request, self.capacity)
        self._turns[request] = _Turn(request, request.request_id.rsplit(".", 1)[0])

    def admit(self, request: LiveRequest, computed_tokens: int) -> bool:
        """Takes a request with its KV; False without room."""
        check_fits(request, self.capacity)
        check_admitted(request, computed_tokens)
        if self._blocks(request.num_tokens + 1) > self.num_free:
            return False
        self.add(request)
        turn = self._turns[request]
        turn.computed, turn.is_here, turn.begun = computed_tokens, True, True
        return True

    def remove(self, requests: Collection[LiveRequest]) -> None:
        """Lets requests go."""
        for request in requests:
            self._turns.pop(request, None)

    def resize(self, num_blocks: int) -> bool:
        """Says no: memory does not change hands here."""
        return num_blocks == self.num_blocks

    # Steps ------------------------------------------------------------------------------------------------------------

    def schedule(self, max_steps: int = 1) -> SimStep | None:
        """The next iteration: the most urgent requests that the device holds."""
        self._unfinished.require_room()
        if not self._turns:
            return None
        now_s = self._clock()
        self._update_priorities()
        wanted = self._wanted()
        waits_s = self._take_out(wanted, now_s)
        at_s = now_s + waits_s
        admitted, at_s = self._bring_in(wanted, at_s)
        step = self._form(wanted, admitted, at_s)
        while step is None:  # all that could run is on its way
            ends = [turn.ready_s for turn in wanted if turn.is_here and turn.ready_s > at_s]
            ends += [end_s for end_s, _ in self._leaving if end_s > at_s]
            if not ends:
                return None
            at_s = min(ends)
            self._settle(at_s)
            more, at_s = self._bring_in(wanted, at_s)
            admitted += more
            step = self._form(wanted, admitted, at_s)
        self.counts.waited_s += at_s - now_s
        return step

    def finish(self, step: SimStep, num_steps: int = 1) -> list[LiveRequest]:
        """Every request that was due has a token more; those that ended leave their KV for the next turn."""
        tokens = self._unfinished.finish(step.handle)
        self._steps += 1
        ended = []
        for turn, count in tokens.items():
            live = turn.live
            if live not in self._turns:
                continue
            turn.computed += count
            self._served.add(turn.conversation)
            if turn.computed < live.num_tokens:
                continue
            if not live.num_generated:
                self._prompted += live.arrival.prompt_tokens
            live.num_generated += 1
            self._generated += 1
            if live.is_done:
                ended.append(live)
                self._keep(turn)
        self.remove(ended)
        return ended

    def _update_priorities(self) -> None:
        if self._steps % self.swap.every == 0:
            self._priorities.update({turn.conversation for turn in self._turns.values()}, self._served)
            self._served = set()

    def _wanted(self) -> list[_Turn]:
        """The most urgent requests that fit the device, the most urgent first."""
        order = sorted(
            self._turns.values(),
            key=lambda t: (self._priorities.of(t.conversation), t.live.arrival.at_s, t.live.request_id),
        )
        found, left = list[_Turn](), self.num_blocks
        for turn in order[: self.capacity.max_num_seqs]:
            left -= self._blocks(turn.live.num_tokens + 1)
            if left < 0:
                break
            found.append(turn)
        return found

    def _take_out(self, wanted: Sequence[_Turn], now_s: float) -> float:
        """Those that are not wanted leave the device; seconds until synchronous copies have ended."""
        keep, waits_s = set(wanted), 0.0
        self._settle(now_s)
        for turn in [t for t in self._turns.values() if t.is_here and t not in keep]:
            turn.is_here = False
            self._preempted += 1
            self.counts.switches += 1
            turn.live.num_preemptions += 1
            if self.swap.is_recompute:
                turn.computed = turn.saved = 0
                continue
            waits_s = self._copy_out(turn, now_s, waits_s)
        return waits_s

    def _copy_out(self, turn: _Turn, now_s: float, waits_s: float) -> float:
        """A request's KV goes to the host; `waits_s` with what the caller has to wait for it."""
        new = self._blocks(turn.computed) - (turn.saved // self.capacity.block_size if self.swap.reuse else 0)
        turn.saved = turn.computed
        if new <= 0:
            return waits_s
        groups = self.swap.groups
        self.counts.out_blocks += new
        self.counts.calls += self._link.costs.calls(new, groups=groups)
        end_s = self._link.send(new, now_s, to_host=True, groups=groups)
        if not self.swap.is_async:
            return max(waits_s, end_s - now_s)
        self._leaving.append((end_s, self._blocks(turn.computed)))
        return waits_s

    def _bring_in(self, wanted: Sequence[_Turn], at_s: float) -> tuple[list[_Turn], float]:
        """Wanted requests get their blocks, as far as these are free; who begins, and when the step may begin."""
        admitted, is_idle = [], not any(turn.is_here and turn.ready_s <= at_s for turn in wanted)
        for turn in wanted:
            if turn.is_here or self._blocks(turn.live.num_tokens + 1) > self.num_free:
                continue
            turn.is_here = True
            admitted.append(turn)
            if not turn.begun:
                self._find_prefix(turn)
            turn.ready_s = at_s
            if turn.saved and turn.computed:
                count = self._blocks(turn.computed)
                self.counts.in_blocks += count
                self.counts.calls += self._link.costs.calls(count, groups=self.swap.groups)
                turn.ready_s = self._link.send(count, at_s, to_host=False, groups=self.swap.groups)
                if not self.swap.is_async or is_idle:
                    at_s, is_idle = max(at_s, turn.ready_s), False
        return admitted, at_s

    def _find_prefix(self, turn: _Turn) -> None:
        """What the host has of a conversation is not computed again."""
        turn.begun = True
        if self.swap.is_recompute:
            return
        kept = min(self._kept.pop(turn.conversation, 0), turn.live.num_tokens - 1)
        turn.computed = turn.saved = kept
        turn.live.cached_tokens = kept
        self._queries += turn.live.num_tokens
        self._hits += kept

    def _keep(self, turn: _Turn) -> None:
        """A turn has ended: its KV goes to the host, for the next one, beside the steps."""
        if self.swap.is_recompute:
            return
        self._copy_out(turn, self._clock(), 0.0)
        self._kept[turn.conversation] = turn.computed
        while sum(map(self._blocks, self._kept.values())) > self._num_host:
            self._kept.popitem(last=False)

    def _settle(self, at_s: float) -> None:
        self._leaving = [(end_s, count) for end_s, count in self._leaving if end_s > at_s]

    def _form(self, wanted: Sequence[_Turn], admitted: Sequence[_Turn], at_s: float) -> SimStep | None:
        """One token of each that decodes, and prompts as far as the budget goes; None where nothing is ready."""
        tokens, chunks, budget = dict[_Turn, int](), list[Chunk](), self.options.max_num_batched_tokens
        num_decodes = context = 0
        ready = [turn for turn in wanted if turn.is_here and turn.ready_s <= at_s]
        for turn in sorted(ready, key=lambda t: t.live.num_tokens - t.computed > 1):
            missing = turn.live.num_tokens - turn.computed
            count = min(missing, budget)
            if count <= 0:
                continue
            tokens[turn], budget = count, budget - count
            if missing == 1 and turn.live.num_generated:
                num_decodes, context = num_decodes + 1, context + turn.live.num_tokens
            else:
                chunks.append(Chunk(prefix_tokens=turn.computed, num_tokens=count))
        if not tokens:
            return None
        step = SimStep(
            batch=Batch(num_decodes, context, tuple(chunks)),
            requests=tuple(turn.live for turn in tokens),
            due=tuple(turn.live for turn, count in tokens.items() if turn.computed + count == turn.live.num_tokens),
            admitted=tuple(turn.live for turn in admitted if turn in tokens),
            wait_s=max(0.0, at_s - self._clock()),
            handle=tokens,
        )
        self._unfinished.begin(tokens)
        return step

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.capacity.block_size)
