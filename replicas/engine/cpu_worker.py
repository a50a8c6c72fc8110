"""The CPU worker of a lane. Apart from `worker`, because importing vLLM's CPU worker configures the process."""

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from pengserve.replicas.engine.lanes.lane_groups import give_up_shared_group, one_group_for_all
from pengserve.replicas.engine.lanes.warm_up import is_compiled, run_once
from pengserve.replicas.engine.worker import LaneWorkerMixin, replayable


class LaneCPUWorker(LaneWorkerMixin, CPUWorker):
    """vLLM's CPU worker with a lane's additions."""

    def init_device(self) -> None:
        """As vLLM does, with one process group; then makes seeded sampling survive chunked prefill."""
        with one_group_for_all():
            super().init_device()
        if not self.use_v2_model_runner:  # that one draws by seed and position, and keeps no generator
            runner = self.model_runner
            runner._update_states = replayable(runner._update_states, runner)

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM does; also where weights and KV share memory. vLLM would compile while it looks how much is free."""
        if is_compiled(self.vllm_config):
            with torch.inference_mode():
                run_once(self.model_runner)
        return super().compile_or_warm_up_model()

    def shutdown(self) -> None:
        """Ends the worker as vLLM does, so that vLLM then destroys each process group only once."""
        super().shutdown()
        give_up_shared_group()
