"""A lane's model is compiled when the lane is built, so that no step compiles anything.

The first step of a group runs while its other members wait, and they wait for seconds at most. Compiling takes longer.
"""

import logging
import time
from typing import Any

import torch

from pengserve.replicas.engine.lanes.lane_groups import LaneGroup
from pengserve.replicas.engine.vllm_seam import CompilationMode, CUDAGraphMode, VllmConfig

logger = logging.getLogger(__name__)

_LANE = "pengserve_lane"
"""Key of vLLM's `additional_config`. vLLM keeps what it compiled on disk, under a hash of this among other things: a
lane computes with views of weights, so that code which vLLM compiled for itself in the same shape must not be found."""


def is_compiled(config: VllmConfig) -> bool:
    """Whether vLLM compiles models of this configuration."""
    return config.compilation_config.mode is not CompilationMode.NONE


def marked_as_lane(additional_config: Any, shape: str) -> dict[str, Any]:
    """`additional_config` of a lane; what was compiled for another shape, or for plain vLLM, is not taken for it."""
    return {**(additional_config or {}), _LANE: shape}


class _Alone:
    """Stands for a group's communicator while its model is compiled: results have the right shape, and no peer."""

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([tensor] * self._size, dim)

    def require_whole(self) -> None:
        """No other member takes part."""


def warm_up(runner: Any, group: LaneGroup) -> None:
    """Compiles the model of `runner`, whose group and configuration must be active, and captures its CUDA graphs. No KV
    is written.

    Raises:
        Exception: vLLM or torch cannot compile this model.
    """
    started_s = time.perf_counter()
    group.collectives = _Alone(group.world_size)
    try:
        with torch.random.fork_rng(devices=_devices(runner.device)):
            run_once(runner)
            if runner.compilation_config.cudagraph_mode is not CUDAGraphMode.NONE:
                runner.capture_model()
    finally:
        group.collectives = None
    logger.info("%s compiled in %.1f s", group.unique_name, time.perf_counter() - started_s)


def run_once(runner: Any) -> None:
    """Runs the model over dummy tokens without attention, and what vLLM compiles besides: it samples log probabilities
    with a function that all runners share.
    """
    if runner.device.type == "cpu":
        runner.warming_up_model()
    else:
        runner.profile_run()
    logits = torch.zeros(1, runner.model_config.get_vocab_size(), device=runner.device)
    runner.sampler.gather_logprobs(logits, 1, torch.zeros(1, dtype=torch.int64, device=runner.device))


def _devices(device: torch.device) -> list[int]:
    return [] if device.type == "cpu" else [device.index or 0]
