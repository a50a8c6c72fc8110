"""`pengserve.replicas.host` that notes how vLLM runs, with asynchronous scheduling on a CPU, where vLLM turns it off.

On a CPU vLLM's own scheduler, engine and runner do what they do on a GPU: a step is scheduled, and given to the runner,
before the tokens of the one before are known. The runner computes at once. With VLLM_USE_V2_MODEL_RUNNER=1 it is vLLM's
V2 runner, whose kernels Triton's interpreter runs. On a GPU nothing is changed.

In a file of its own, in the folder that PENGSERVE_TEST_AHEAD names, the process notes how many steps it has scheduled
before the one before ended, and the module of its runner: now and then, as it may be killed, and at its end.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

VARIABLE = "PENGSERVE_TEST_AHEAD"
NOTE_EVERY = 50  # steps that were scheduled ahead
V2_ON_CPU = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


def interpret_triton() -> None:
    """Before vLLM is imported: it takes the interpreter for a backend of Triton for CPUs, which no index has."""
    from types import SimpleNamespace

    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # type: ignore[assignment]


class GrammarMask:
    """Stands for the kernel that takes tokens which grammars do not allow out of the logits."""

    def __getitem__(self, grid: Any) -> Any:
        """A launch of it."""
        return self.run

    def run(
        self, logits: Any, _: int, indices: Any, starts: Any, mask: Any, __: int, vocabulary: int, **sizes: int
    ) -> None:
        """`mask` has a bit for each token, 32 in a word; `indices`: which row of `logits` each row is for."""
        import torch

        for row, index in zip(mask, indices.tolist(), strict=True):
            request, position = divmod(index, sizes["MASK_STRIDE"])
            if position < starts[request + 1] - starts[request]:
                denied = ((row[:, None] >> torch.arange(32)) & 1 == 0).flatten()[:vocabulary]
                logits[starts[request] + position].masked_fill_(denied, -torch.inf)


def notes_of(folder: Path, pid: int) -> tuple[int, str]:
    """Of a process: steps that were scheduled ahead, and the runner's module."""
    num_ahead, runner = json.loads((folder / str(pid)).read_text())
    return num_ahead, runner


def write_notes(found: dict[str, Any]) -> None:
    """What `notes_of` reads, in one step, of what `install` has returned."""
    if (folder := os.environ.get(VARIABLE)) is None:
        return
    file = Path(folder) / str(os.getpid())
    scratch = file.with_suffix(".new")
    scratch.write_text(json.dumps([found["num_ahead"], found["runner"]]))
    scratch.replace(file)


def install() -> dict[str, Any]:
    """From here on steps are scheduled ahead. What is returned counts them, and has the runner's module."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu import structured_outputs

    from pengserve.replicas.engine.lanes import dp_lane
    from pengserve.replicas.engine.vllm_seam import EngineCore

    if current_platform.is_cpu():
        # Two kernels that the interpreter cannot run: vLLM's own form without Triton, and a stand-in.
        topk_topp_sampler.HAS_TRITON = False
        structured_outputs._apply_grammar_bitmask_kernel = GrammarMask()
    found = {"num_ahead": 0, "runner": ""}
    create, step = dp_lane.AsyncEngineArgs.create_engine_config, EngineCore.step_with_batch_queue

    def create_ahead(*args: Any) -> Any:
        config = create(*args)
        if current_platform.is_cpu():
            config.scheduler_config.async_scheduling = True
        return config

    def step_counting(self: Any) -> Any:
        is_ahead = bool(self.batch_queue and self.scheduler.has_requests())
        found["num_ahead"] += is_ahead
        found["runner"] = type(self.model_executor.driver_worker.worker.model_runner).__module__
        if is_ahead and found["num_ahead"] % NOTE_EVERY == 0:
            write_notes(found)
        return step(self)

    dp_lane.AsyncEngineArgs.create_engine_config = create_ahead
    EngineCore.step_with_batch_queue = step_counting  # type: ignore[method-assign]
    return found


if __name__ == "__main__":
    from pengserve.replicas import host

    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        interpret_triton()
    found = install()
    status = host.main()
    write_notes(found)
    sys.exit(status)
