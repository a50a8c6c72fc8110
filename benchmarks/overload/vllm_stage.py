"""vLLM's CPU worker as a stage of a pipeline: `--worker-cls benchmarks.overload.vllm_stage.StageWorker`.

vLLM 0.32 allocates what a stage receives in a warm-up run. Its CPU worker skips that run where the model is eager and
the KV cache's size is given, and the second stage then ends with an AssertionError at its first step. This allocates
it; nothing else differs from vLLM's own worker.
"""

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class StageWorker(CPUWorker):
    """One stage."""

    def compile_or_warm_up_model(self) -> Any:
        """Allocates what comes from the stage before this one."""
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return super().compile_or_warm_up_model()
