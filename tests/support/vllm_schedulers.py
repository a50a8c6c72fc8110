"""Schedulers of vLLM that no model belongs to, and the memory that they believe to have."""

from typing import Any

from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.vllm_seam import ModelRunnerOutput, SchedulerOutput
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.vllm_build import build_vllm_scheduler


def capacity_of(
    num_blocks: int, block_size: int = 16, *, max_num_seqs: int = 8, max_model_len: int | None = None
) -> KvCapacity:
    """So many blocks; a sequence may have all of their tokens where `max_model_len` does not say fewer."""
    return KvCapacity(
        num_blocks=num_blocks,
        block_size=block_size,
        bytes_per_block=1,
        max_model_len=max_model_len or num_blocks * block_size,
        max_num_seqs=max_num_seqs,
        weight_bytes=0,
    )


class Hurried:
    """Requests whose first tokens were promised within `SLO_S` of `came_s`, by a clock of the test's own."""

    SLO_S = 1.0

    def __init__(self) -> None:
        self.now_s = 0.0
        self.came_s: dict[str, float] = {}
        self.num_asked = 0  # times that one was looked at

    @property
    def num_hurried(self) -> int:
        """As `FirstTokens`."""
        return len(self.came_s)

    def gone(self, request_id: str) -> float:
        """As `FirstTokens`."""
        self.num_asked += 1
        return (self.now_s - self.came_s[request_id]) / self.SLO_S if request_id in self.came_s else 0.0


def scheduler_handle(capacity: KvCapacity, **options: Any) -> SchedulerHandle:
    """`options` are those of `SchedulerOptions`."""
    return SchedulerHandle(build_vllm_scheduler(capacity, SchedulerOptions(**options), is_terse=False))


def give_tokens(handle: SchedulerHandle, output: SchedulerOutput) -> dict[str, bool]:
    """Ends a step: each of its requests whose tokens are all computed gets token 7. By id, whether it did."""
    ids = list(output.num_scheduled_tokens)
    requests = [handle.request(name) for name in ids]
    has_token = [request.num_computed_tokens >= request.num_tokens for request in requests]
    tokens = [[7] if has else [] for has in has_token]
    handle.update(output, ModelRunnerOutput(ids, {name: index for index, name in enumerate(ids)}, tokens))
    return dict(zip(ids, has_token, strict=True))
