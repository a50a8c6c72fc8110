"""What a lane's scheduler is set to, whichever of the two it is."""

from dataclasses import dataclass
from typing import Literal

from pengserve.planners.cost_model import CostModel
from pengserve.planners.long_answers import GivingWay
from pengserve.planners.types.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """As vLLM's options of the same names; how many requests run at once is the lane's `KvCapacity.max_num_seqs`.

    Raises:
        ConfigError: a value that no scheduler can work with.
    """

    max_num_batched_tokens: int = 2048  # new tokens of one step
    policy: Literal["fcfs", "priority"] = "fcfs"
    watermark: float = 0.0  # share of the blocks that stay free when a waiting request is admitted beside others
    prefix_caching: bool = False  # vLLM's scheduler alone; the fast one never finds a prefix
    preemption: Literal["recompute", "swap"] = "recompute"  # the fast one alone can swap
    host_blocks: int | None = (
        None  # with "swap": blocks that fit the host, beyond which it recomputes; None: any number
    )
    short_prompts: bool = False  # overtake long ones, as in PengServe; vLLM alone reads prompts as they come
    late_prompts: bool = False  # yield to those that can have their first tokens in time, as in PengServe
    long_answers: GivingWay | None = None  # give way to prompts that wait for memory, as in PengServe
    short_first_steps: bool = False  # of long prompts, where the lane was idle, as in PengServe
    num_stages: int = 1  # of a pipeline
    max_in_flight: int = 0  # steps that may be unfinished at once; 0: one a stage
    lookahead: CostModel | None = None  # with stages: microbatches cost the same by it; None: each takes all it can

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1:
            raise ConfigError(f"max_num_batched_tokens is {self.max_num_batched_tokens}: a step needs 1 token or more")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark is {self.watermark}: it is a share of the blocks, at least 0 and below 1")
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy is {self.policy!r}: choose fcfs or priority")
        if self.preemption not in ("recompute", "swap"):
            raise ConfigError(f"preemption is {self.preemption!r}: choose recompute or swap")
        if self.num_stages < 1:
            raise ConfigError(f"num_stages is {self.num_stages}: a pipeline has 1 stage or more")
        if not 0 <= self.max_in_flight <= self.num_stages:
            raise ConfigError(f"max_in_flight is {self.max_in_flight}: a pipeline has one step a stage at most")

    @property
    def most_in_flight(self) -> int:
        """Steps that may be unfinished at once."""
        return self.max_in_flight or self.num_stages
