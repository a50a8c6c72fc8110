"""`pengserve.replicas.host`, an instance as a process, which is killed by each batch with a poisonous prompt in it.

A prompt is poisonous that holds the token `POISON`. The process ends by SIGKILL, as by a fault in a kernel: it sends no
last message.
"""

import os
import signal
import sys
from typing import Any

from pengserve.replicas import host
from pengserve.replicas.instance import Instance

POISON = 7


def poison_runner() -> None:
    """Makes vLLM's model runner die of poisonous prompts in this process."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    execute = GPUModelRunner.execute_model

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if any(POISON in request.prompt_token_ids for request in scheduler_output.scheduled_new_reqs):
            os.kill(os.getpid(), signal.SIGKILL)
        return execute(self, scheduler_output, *args, **kwargs)

    GPUModelRunner.execute_model = execute_model


if __name__ == "__main__":
    build = Instance._build_lanes

    def build_poisoned(self: Instance) -> Any:
        poison_runner()  # here, and not before: vLLM is imported with the instance's variables
        return build(self)

    Instance._build_lanes = build_poisoned
    sys.exit(host.main())
