"""The CPU worker of a lane. Apart from `worker`, because importing vLLM's CPU worker configures the process."""

from vllm.v1.worker.cpu_worker import CPUWorker

from pengserve.replicas.engine.lane_groups import give_up_shared_group, one_group_for_all
from pengserve.replicas.engine.worker import LaneWorkerMixin, replayable


class LaneCPUWorker(LaneWorkerMixin, CPUWorker):
    """vLLM's CPU worker with a lane's additions."""

    def init_device(self) -> None:
        """As vLLM does, with one process group; then makes seeded sampling survive chunked prefill."""
        with one_group_for_all():
            super().init_device()
        runner = self.model_runner
        runner._update_states = replayable(runner._update_states, runner)

    def shutdown(self) -> None:
        """Ends the worker as vLLM does, so that vLLM then destroys each process group only once."""
        super().shutdown()
        give_up_shared_group()
