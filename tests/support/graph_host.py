"""`pengserve.replicas.host` whose engine captures graphs as on CUDA, on a CPU: `tests.support.compile_host` with them.

vLLM's own backend cuts the compiled model into pieces and its own dispatcher chooses the graphs. What stands for a CUDA
graph keeps its rule: it reads its inputs, and writes its outputs, where they were when it was captured.
"""

import sys
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from pengserve.replicas.engine.cpu_worker import LaneCPUWorker
from pengserve.replicas.engine.lanes import dp_lane
from tests.support import compile_host

SIZES = [1, 2, 4, 8, 16]


class StaticGraph:
    """Stands for vLLM's `CUDAGraphWrapper` around one piece of a model."""

    is_capturing: ClassVar[bool] = False
    num_replayed: ClassVar[int] = 0

    def __init__(self, runnable: Any, vllm_config: Any, runtime_mode: CUDAGraphMode, cudagraph_options: Any) -> None:
        self.runnable, self._mode = runnable, runtime_mode  # by this name vLLM finds what its cache stores
        self._captured: dict[Any, tuple[tuple[Any, ...], Any]] = {}  # inputs and outputs, by size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runnable, name)

    def __call__(self, *inputs: Any) -> Any:
        """Runs the piece, or replays what was captured for this size."""
        context = get_forward_context()
        if context.cudagraph_runtime_mode is not self._mode:
            return self.runnable(*inputs)
        with patch.object(parallel_state, "_groups", {}):  # a graph that called a group would call it for ever
            outputs = self.runnable(*inputs)
        size = context.batch_descriptor
        if size not in self._captured:
            assert StaticGraph.is_capturing, "a graph was captured in a step"
            self._captured[size] = inputs, outputs
            return outputs
        before, kept = self._captured[size]
        assert _places(before) == _places(inputs), "a graph's input is not where it was when the graph was captured"
        StaticGraph.num_replayed += 1
        for old, new in zip(_tensors(kept), _tensors(outputs), strict=True):
            old.copy_(new)
        return kept


def _tensors(values: Any) -> list[torch.Tensor]:
    values = values if isinstance(values, tuple | list) else (values,)
    return [value for value in values if isinstance(value, torch.Tensor)]


def _places(values: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in _tensors(values)]


def capture_model(runner: Any) -> int:
    """As vLLM's, without streams."""
    StaticGraph.is_capturing = True
    for mode, sizes in runner.cudagraph_dispatcher.get_capture_descs():
        for size in sizes:
            runner._dummy_run(size.num_tokens, cudagraph_runtime_mode=mode, skip_eplb=True)
    StaticGraph.is_capturing = False
    return 0


def install() -> None:
    """From here on this process captures graphs."""
    create, warm_up = dp_lane.AsyncEngineArgs.create_engine_config, LaneCPUWorker.compile_or_warm_up_model

    def create_with_graphs(*args: Any) -> Any:
        config = create(*args)
        compilation = config.compilation_config
        compilation.mode, compilation.cudagraph_mode = CompilationMode.VLLM_COMPILE, CUDAGraphMode.FULL_AND_PIECEWISE
        compilation.splitting_ops, compilation.compile_sizes = list(compilation._attention_ops), []
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = SIZES, SIZES[-1]
        return config

    def warm_up_and_capture(self: Any) -> Any:
        done = warm_up(self)
        self.model_runner.capture_model()
        return done

    dp_lane.AsyncEngineArgs.create_engine_config = create_with_graphs
    LaneCPUWorker.compile_or_warm_up_model = warm_up_and_capture  # type: ignore[method-assign]
    GPUModelRunner.capture_model = capture_model
    name = f"{StaticGraph.__module__}.{StaticGraph.__qualname__}"
    type(current_platform).get_static_graph_wrapper_cls = classmethod(lambda cls: name)  # type: ignore[assignment]


if __name__ == "__main__":
    from tests.support.graph_host import StaticGraph as Imported  # vLLM imports it by its name
    from tests.support.graph_host import install as install_imported

    install_imported()
    compile_host.install(num_replayed=lambda: Imported.num_replayed)
    sys.exit(compile_host.host.main())
