"""vLLM's own CPU offloading of prefixes: full blocks are copied to the host, and found there when the device lost them.

As vLLM's `OffloadingConnector`: blocks are stored as they become full, least recently used ones leave the host, and a
request whose prefix is on the host waits for its copy with its blocks taken, while others run. KV of running requests
is not offloaded: what does not fit is preempted, and then found on the host again as far as it was stored.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import replace

from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.engine.vllm_seam import Request, RequestStatus, SchedulerOutput
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.scheduler import SimStep
from pengserve.simulator.engine.vllm_scheduler import VllmScheduler
from pengserve.simulator.requests import LiveRequest


class PrefixOffloadScheduler(VllmScheduler):
    """A `LaneScheduler` of plain vLLM with offloading. Needs prefix caching, as it does in vLLM."""

    def __init__(
        self,
        capacity: KvCapacity,
        options: SchedulerOptions,
        host_blocks: int,
        bytes_per_s: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(capacity, replace(options, prefix_caching=True))
        self._host: OrderedDict[bytes, None] = OrderedDict()  # hashes of its blocks, the least recently used first
        self._num_host, self._rate, self._clock = host_blocks, bytes_per_s, clock
        self._loading: dict[Request, float] = {}  # when its KV will be there
        self._link_free_s = 0.0
        self.loaded_blocks = self.stored_blocks = 0

    def schedule(self, max_steps: int = 1) -> SimStep | None:
        """As `VllmScheduler`. Where nothing but a copy is under way, the step waits for it."""
        now_s = self._clock()
        self._land(now_s)
        self._load(now_s)
        step, at_s = super().schedule(max_steps), now_s
        while step is None and self._loading:
            at_s = min(self._loading.values())
            self._land(at_s)
            step = super().schedule(max_steps)
        return step and replace(step, wait_s=at_s - now_s)

    def finish(self, step: SimStep, num_steps: int = 1) -> list[LiveRequest]:
        """As `VllmScheduler`; blocks that have become full are stored."""
        output: SchedulerOutput = step.handle.output
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            if self._scheduler.knows(request_id):
                request = self._scheduler.request(request_id)
                size, stop = self.capacity.block_size, request.num_computed_tokens
                self._store(request.block_hashes[(stop - num_tokens) // size : stop // size])
        return super().finish(step, num_steps)

    def remove(self, requests: Collection[LiveRequest]) -> None:
        """As `VllmScheduler`; what is being copied for them is of no use any more."""
        super().remove(requests)
        self._loading = {r: at_s for r, at_s in self._loading.items() if self._scheduler.knows(r.request_id)}

    def copied(self) -> dict[str, float]:
        """Totals of offloading."""
        return {"stored_blocks": self.stored_blocks, "loaded_blocks": self.loaded_blocks}

    @property
    def waiting(self) -> list[LiveRequest]:
        """Requests whose prefix is on its way, and those that hold no KV."""
        return [*(self._lives[request.request_id] for request in self._loading), *super().waiting]

    def _store(self, hashes: Collection[bytes]) -> None:
        for block in hashes:
            if block not in self._host:
                self.stored_blocks += 1
            self._host[block] = None
            self._host.move_to_end(block)
            if len(self._host) > self._num_host:
                self._host.popitem(last=False)

    def _load(self, now_s: float) -> None:
        """Requests that would begin next, and of which the host has more than the device, wait for its copy."""
        scheduler, size = self._scheduler, self.capacity.block_size
        slots = scheduler.max_running - len(scheduler.running) - len(self._loading)
        heads = [request for request, _ in zip(scheduler.waiting, range(max(0, slots)), strict=False)]
        for request in heads:
            most = (request.num_tokens - 1) // size
            num_host = 0
            while num_host < min(most, len(request.block_hashes)) and request.block_hashes[num_host] in self._host:
                num_host += 1
            num_here = scheduler.cached_tokens(request) // size
            if num_host <= num_here:
                continue
            scheduler.waiting.remove_requests([request])
            request.status, request.num_preemptions = RequestStatus.PREEMPTED, max(1, request.num_preemptions)
            if scheduler.reserve_cached(request, num_host * size, num_host * size) is None:
                scheduler.waiting.prepend_request(request)
                return
            self._store(request.block_hashes[:num_host])
            live = self._lives[request.request_id]
            live.cached_tokens = num_host * size
            self._prefix_queries += live.num_tokens
            self._prefix_hits += num_host * size
            self.loaded_blocks += num_host - num_here
            num_bytes = (num_host - num_here) * self.capacity.bytes_per_block
            self._link_free_s = max(self._link_free_s, now_s) + num_bytes / self._rate
            self._loading[request] = self._link_free_s

    def _land(self, now_s: float) -> None:
        for request in [r for r, at_s in self._loading.items() if at_s <= now_s]:
            del self._loading[request]
            self._scheduler.cache(request)
            self._scheduler.enqueue(request)
