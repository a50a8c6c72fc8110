"""What a group's lane is built of: a config of its own, and a runner over weights and KV that exist already."""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pengserve.planners.types.errors import UnsupportedShapeError
from pengserve.replicas.engine.lanes.base_memory import layer_of
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.engine.lanes.kv_binding import bind_memory
from pengserve.replicas.engine.lanes.lane_groups import SUM_IN_PLACE, ActiveGroup, LaneGroup
from pengserve.replicas.engine.lanes.shared_model import check_supported
from pengserve.replicas.engine.lanes.warm_up import is_compiled, marked_as_lane, warm_up
from pengserve.replicas.engine.vllm_seam import (
    CUDAGraphMode,
    Scheduler,
    VllmConfig,
    generate_scheduler_kv_cache_config,
    get_hash_fn_by_name,
    get_kv_cache_configs,
    get_request_block_hasher,
    initialize_model,
    set_current_vllm_config,
    set_default_torch_dtype,
)
from pengserve.replicas.engine.worker import forget_requests, replayable
from pengserve.replicas.memory.kv_layout import kv_memory

logger = logging.getLogger(__name__)

Share = Callable[[nn.Module, nn.Module], None]
"""Gives a model that was built on `meta` (first) the storage of the base model (second)."""

KvOf = Callable[[int], torch.Tensor]
"""KV of a layer of the model, uint8 `[blocks, bytes of a block]`."""


@dataclass(frozen=True, slots=True)
class LaneModel:
    """What a lane computes with. It can outlive the lane: the next one need not compile it again."""

    config: VllmConfig
    runner: Any
    kv_config: Any
    tiers: Any = None  # of a pipeline's stage, where its runner has them: `StageTiers`

    def emptied(self) -> "LaneModel | None":
        """This model, without the requests of the lane that had it, however that ended.

        None where another one is as cheap to build, or where vLLM's runner does not let its requests go.
        """
        if not is_compiled(self.config):
            return None
        runner = self.runner
        runner.execute_model_state = None  # of a step that was not sampled
        try:
            with set_current_vllm_config(self.config):
                forget_requests(runner, list(runner.requests))
        except Exception:
            logger.exception("a lane's runner cannot be used again; its model is compiled anew")
            return None
        return self if not runner.requests and not runner.input_batch.num_reqs else None


@contextlib.contextmanager
def active_lane(active: ActiveGroup, group: LaneGroup, config: VllmConfig) -> Iterator[None]:
    """Within it, vLLM's code sees the group and the configuration of a lane that is being built."""
    before = active.activate(group)
    try:
        with set_current_vllm_config(config), torch.inference_mode():
            yield
    finally:
        active.activate(before)


def group_config(base: DpLane, *, tp: int = 1, pp: int = 1, rank: int, block_size: int, num_blocks: int) -> VllmConfig:
    """vLLM's config of one rank; a copy of the base's from before it held a model.

    Args:
        num_blocks: blocks that may be handed out, without vLLM's null block.
    """
    config = copy.deepcopy(base.pristine_config)
    parallel, cache = config.parallel_config, config.cache_config
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size = tp, pp
    parallel.world_size, parallel.rank = tp * pp, rank
    parallel.disable_custom_all_reduce = True
    cache.block_size = block_size
    cache.num_gpu_blocks = num_blocks + 1
    cache.kv_cache_layout = base.core.vllm_config.cache_config.kv_cache_layout
    config.scheduler_config.async_scheduling = False  # members step together, and each step's tokens go to all of them
    config.model_config.max_model_len = min(config.model_config.max_model_len, num_blocks * block_size)
    config.compilation_config.static_forward_context = {}
    _capture_between_sums(config)
    config.additional_config = marked_as_lane(config.additional_config, f"tp{tp}" if tp > 1 else f"pp{pp}")
    return config


def _capture_between_sums(config: VllmConfig) -> None:
    """Where vLLM captures CUDA graphs, a lane's hold what lies between attention and sums over the group.

    So the lane can be captured before it has peers, and the graphs stay valid when a group gets another communicator.
    Fusions with vLLM's own all-reduce are off. Where the user wants whole graphs alone, lanes have none.
    """
    compilation = config.compilation_config
    if compilation.cudagraph_mode in (None, CUDAGraphMode.NONE):
        return
    if not compilation.cudagraph_mode.has_piecewise_cudagraphs():
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        return
    compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    compilation.splitting_ops = [*(compilation.splitting_ops or ()), SUM_IN_PLACE]
    compilation.pass_config.fuse_allreduce_rms = False


def block_hasher(base: DpLane, config: VllmConfig) -> Any:
    """As `EngineCore` makes its own, in this lane's block size; None where prefix caching is off."""
    if base.core.request_block_hasher is None:
        return None
    return get_request_block_hasher(
        config.cache_config.block_size, get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    )


def build_scheduler(base: DpLane, model: LaneModel) -> Any:
    """A scheduler of vLLM's own."""
    return Scheduler(
        vllm_config=model.config,
        kv_cache_config=generate_scheduler_kv_cache_config([model.kv_config]),
        structured_output_manager=base.core.structured_output_manager,
        log_stats=base.log_stats,
        block_size=model.config.cache_config.block_size,
    )


def build_model(
    base: DpLane,
    group: LaneGroup,
    config: VllmConfig,
    share: Share,
    block_bytes: int,
    kv: KvOf | None = None,
) -> LaneModel:
    """A runner of the base runner's class whose model and KV are views. Within `active_lane`.

    Where vLLM compiles models, this one is compiled when it returns: that takes from seconds to minutes.

    Args:
        block_bytes: of a block over all layers of this rank.
        kv: where the KV is; where the base runner has its own if it is None.

    Raises:
        UnsupportedShapeError: this model cannot be run so.
    """
    model = _build_model(base, config, share, block_bytes, kv)
    if is_compiled(config):
        warm_up(model.runner, group)
    return model


def _build_model(base: DpLane, config: VllmConfig, share: Share, block_bytes: int, kv: KvOf | None) -> LaneModel:
    base_runner = base.worker.model_runner
    base_model = base_runner.get_model()
    check_supported(base_model)
    _check_features(base)
    runner = _runner_class(type(base_runner))(config, base.worker.device)
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        runner.model = initialize_model(config)
    share(runner.model, base_model)
    if base.worker.device.type == "cpu":
        runner._update_states = replayable(runner._update_states, runner)
    specs = runner.get_kv_cache_spec()
    kinds = {type(spec).__name__ for spec in specs.values()}
    if kinds != {"FullAttentionSpec"} or len(base_runner.kv_cache_config.kv_cache_groups) != 1:
        raise UnsupportedShapeError(f"KV caches of kind {', '.join(sorted(kinds))} cannot be shared by shapes yet")
    page = next(iter(specs.values())).page_size_bytes
    if page * len(specs) != block_bytes:
        raise UnsupportedShapeError(f"a block would have {page * len(specs)} bytes, not {block_bytes}")
    num_blocks = config.cache_config.num_gpu_blocks
    kv_config = get_kv_cache_configs(config, [specs], [page * len(specs) * num_blocks])[0]
    kv_config.kv_cache_layout = config.cache_config.kv_cache_layout
    layers = base_runner.compilation_config.static_forward_context
    if kv is None:
        runner.memory = {name: kv_memory(layers[name].kv_cache) for name in specs}
    else:
        runner.memory = {name: kv(layer_of(name)) for name in specs}
    runner.initialize_kv_cache(kv_config)
    return LaneModel(config, runner, kv_config)


def _check_features(base: DpLane) -> None:
    for feature, asked in (
        ("speculative decoding", base.worker.vllm_config.speculative_config),
        ("LoRA", base.worker.vllm_config.lora_config),
        ("multi-modal input", base.worker.vllm_config.model_config.multimodal_config),
    ):
        if asked is not None:
            raise UnsupportedShapeError(f"{feature} works in dp alone; leave it out, or leave out `degrees`")


def _runner_class(base: type) -> type:
    """`base` (vLLM's CPU or GPU runner) with KV in memory that exists already."""

    class SharedKvRunner(base):
        memory: dict[str, torch.Tensor]  # by layer, [blocks, elements of a block]

        def initialize_kv_cache_tensors(
            self, kv_cache_config: Any, kernel_block_sizes: list[int], *args: Any, **kwargs: Any
        ) -> dict[str, Any]:
            """Binds views of existing KV memory where vLLM would allocate, over all blocks that there may ever be."""
            return bind_memory(self, lambda _, name: self.memory[name], kv_cache_config, kernel_block_sizes)

    return SharedKvRunner
