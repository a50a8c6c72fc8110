"""Workers of a lane: vLLM's own, and what a lane asks of them beyond vLLM.

vLLM picks the class by `worker_cls`. Requests taken over in mid-decode and generators that can be rewound live here.
"""

import copy
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from vllm.sampling_params import SamplingType

from pengserve.planners.types.errors import ConfigError, PengServeError, one_line
from pengserve.planners.types.units import format_bytes
from pengserve.replicas.engine.lanes.base_memory import OPTIONS, BaseMemory, MemoryOptions, block_bytes_of, layer_of
from pengserve.replicas.engine.lanes.kv_binding import bind_memory
from pengserve.replicas.engine.scheduling.block_groups import blocks_of, grouped
from pengserve.replicas.engine.tiers.tier_memory import OPTIONS as TIER_OPTIONS
from pengserve.replicas.engine.tiers.tier_memory import (
    TierOptions,
    TierSizes,
    check_engine,
    check_one_kind,
    chunks_of_blocks,
    host_bytes_of,
    open_tiers,
    tier_sizes,
)
from pengserve.replicas.engine.tiers.tier_runner import TierRunner
from pengserve.replicas.engine.vllm_seam import (
    CachedRequestState,
    GPUWorker,
    Request,
    SchedulerOutput,
    initialize_model,
    set_current_vllm_config,
    set_default_torch_dtype,
)
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.memory.arena.cpu import available_bytes
from pengserve.replicas.memory.arena.open import backend_of
from pengserve.replicas.parent_death import signal_when_parent_ends

logger = logging.getLogger(__name__)

SHAPES = "pengserve_shapes"
"""Key of vLLM's `additional_config`: how many lanes there will be beside `dp`."""
CPU_SHARE = 0.2  # of the machine's free memory, for the KV of one instance whose memory_bytes is auto


class ReplayGenerator(torch.Generator):
    """A seeded CPU generator that can be put back to "just before output token n".

    vLLM takes back the draw of a prefill chunk whose token is discarded by `set_offset(get_offset() - 4)`, which
    PyTorch has for CUDA generators alone: on CPU it raises and takes the engine down with it (vLLM 0.32). A request
    draws once per sampled token, so its state is a function of its seed and of how many tokens it has.
    """

    def get_offset(self) -> int:
        """Nothing to tell apart: `set_offset` knows where to go back to."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Undoes the draw after the last output token."""
        self.replay()

    def bind(self, seed: int, state: CachedRequestState) -> "ReplayGenerator":
        """Names the seed and the request, which has drawn once for each of its output tokens.

        Not their list: a runner that is a step ahead makes another one where a request goes on that was preempted.
        """
        self._seed, self._state = seed, state
        return self.replay()

    def replay(self) -> "ReplayGenerator":
        """Puts the state where it stands before the next output token is drawn."""
        self.manual_seed(self._seed)
        for _ in self._state.output_token_ids:
            torch.randint(0, 2**31, (1,), generator=self, dtype=torch.long)  # as vLLM's CPU sampler draws
        return self


class LaneWorkerMixin:
    """Added to vLLM's worker class; reached through `collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    update_max_model_len: Callable[[int], None]  # vLLM's
    memory: BaseMemory | None = None  # where weights and KV share memory
    memory_failure = ""  # why they do not, though they were to
    tiers: TieredKv | None = None  # where KV is on the device and on the host
    tier_sizes: TierSizes | None = None
    tier_failure = ""  # why there is no host tier, though there was to be one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if multiprocessing.parent_process() is not None:
            end_with_parent()
        super().__init__(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM does; then weights move into the arena, where memory may change hands."""
        if self.vllm_config.model_config.enforce_eager:
            # vLLM compiles the masking of a sharded embedding, also where eager execution is asked for. That takes
            # seconds, and on processors with AVX2 alone what the compiler makes of it looks up rows that are not there.
            torch.compiler.set_stance("force_eager")
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        options = self._memory_options()
        if options is not None and not options.is_auto:
            self._share_memory(options)

    @cached_property
    def _page_bytes(self) -> int:
        """What the device's memory is mapped in."""
        return backend_of(self.device).granularity

    def _memory_options(self) -> MemoryOptions | None:
        given = self.vllm_config.additional_config.get(OPTIONS)
        return MemoryOptions(**given) if given is not None else None

    def _share_memory(self, options: MemoryOptions) -> None:
        """Weights and KV share memory from now on, or the log and `memory_failure` say why not, and `dp` serves.

        Raises:
            ConfigError: the memory that the user gives does not hold the model.
        """
        runner = self.model_runner
        try:
            block_bytes = block_bytes_of(runner)
            if TIER_OPTIONS in self.vllm_config.additional_config:
                chunk_bytes = chunks_of_blocks(options.chunk_bytes, block_bytes, self._page_bytes)
                options = replace(options, chunk_bytes=chunk_bytes)
            memory = BaseMemory(runner.get_model(), self.device, options, block_bytes)
        except ConfigError:
            raise
        except Exception as error:
            self.memory_failure = f"weights and KV share no memory here ({one_line(error)})"
            logger.warning("%s", self.memory_failure, exc_info=not isinstance(error, PengServeError))
            return
        self.memory = memory
        runner.initialize_kv_cache_tensors = partial(
            bind_memory, runner, lambda _, name: memory.layers.kv(layer_of(name))
        )

    def determine_available_memory(self) -> int:
        """Bytes of KV: what the weights leave of the memory that they share, or were to share, with it."""
        memory = self._memory_options()
        free_bytes = 0
        if memory is not None and memory.is_auto:
            free_bytes = self._free_bytes(memory)
            self._share_memory(replace(memory, memory_bytes=self.weight_bytes() + free_bytes))
        if self.memory is not None:
            layers = self.memory.layers
            device_bytes = layers.base_blocks * layers.sizes.block_bytes * layers.sizes.num_layers
        else:
            device_bytes = free_bytes or self._kv_bytes(int(super().determine_available_memory()))  # type: ignore[misc]
        options = self.vllm_config.additional_config.get(TIER_OPTIONS)
        if options is not None:
            self._open_tiers(TierOptions(**options), device_bytes)
        return device_bytes if self.tier_sizes is None else self.tier_sizes.num_bytes

    def _free_bytes(self, options: MemoryOptions) -> int:
        """What the loaded weights leave for KV. On CUDA vLLM runs the model to see what activations and graphs take;
        each further shape has graphs of its own, and its group communicators. On CPUs a share of what the machine has
        free: others share it too.

        Raises:
            ConfigError: nothing is left.
        """
        num_shapes = self.vllm_config.additional_config.get(SHAPES, 0)
        if self.device.type == "cpu":
            free = int(available_bytes() * CPU_SHARE) // self.vllm_config.parallel_config.world_size
        else:
            free = int(super().determine_available_memory())  # type: ignore[misc]
            free -= num_shapes * int(getattr(self, "cudagraph_memory_estimate", 0)) + options.communicator_bytes
        if free <= 0:
            weights = format_bytes(self.weight_bytes())
            raise ConfigError(
                f"{self.device} has no room for KV beside {weights} of weights: {format_bytes(-free)} are missing; take"
                " a smaller model, lower engine.max_num_batched_tokens, or raise engine.gpu_memory_utilization"
            )
        return free

    def _kv_bytes(self, available: int) -> int:
        """Of the device: `available`, less the weights where these are counted in it."""
        if OPTIONS not in self.vllm_config.additional_config:
            return available
        left = available - self.weight_bytes()
        if left <= 0:
            raise ConfigError(
                f"memory_bytes of {format_bytes(available)} do not hold the {format_bytes(self.weight_bytes())} of the "
                "model's weights; raise it"
            )
        return left

    def _open_tiers(self, options: TierOptions, device_bytes: int) -> None:
        """KV has a host tier from now on, or the log and `tier_failure` say why not, and vLLM's own KV serves."""
        runner = self.model_runner
        try:
            check_engine(self.vllm_config)
            num_layers, block_size, block_bytes = check_one_kind(runner)
            model = self.vllm_config.model_config
            sizes = tier_sizes(
                num_layers=num_layers,
                block_size=block_size,
                block_bytes=block_bytes,
                device_bytes=device_bytes,
                host_bytes=host_bytes_of(options, device_bytes if self.device.type == "cpu" else 0),
                page_bytes=self._page_bytes,
                max_model_len=model.max_model_len,
                fits_itself=model.original_max_model_len == -1,
            )
            tiers = open_tiers(sizes, options, self.device, self.memory.layers if self.memory is not None else None)
            if sizes.max_model_len != model.max_model_len:
                self.update_max_model_len(sizes.max_model_len)
        except Exception as error:
            self.tier_failure = f"no host tier here: {one_line(error)}"
            logger.warning("%s", self.tier_failure, exc_info=not isinstance(error, PengServeError))
            return
        self.tiers, self.tier_sizes = tiers, sizes
        runner.initialize_kv_cache_tensors = partial(bind_memory, runner, lambda layer, _: tiers.pool.layer(layer))
        TierRunner(runner, tiers, list(runner.get_kv_cache_spec()), block_size)

    def end_tiers(self) -> None:
        """A copy has failed: KV is on the device alone, each block in its own place. `tier_failure` says why."""
        assert self.tiers is not None
        self.tier_failure = f"the host tier has ended: {self.tiers.failure}"
        self.tiers.give_up()
        self.tiers = self.tier_sizes = None

    def adopt_request(self, state: CachedRequestState) -> str:
        """Makes the runner know a half-decoded request as one that it had preempted itself; why not, where it cannot.

        An error is an answer: all workers are asked, and one that raised would leave the answers of others unread.
        """
        try:
            adopt_state(self.model_runner, state)
        except Exception as error:
            logger.exception("request %s cannot be taken over", state.req_id)
            return one_line(error)
        return ""

    def forget_requests(self, request_ids: Iterable[str]) -> None:
        """Drops all state of requests now, as the next step would: their ids may come back before it."""
        forget_requests(self.model_runner, request_ids)

    def weight_bytes(self) -> int:
        """Bytes of parameters, tied ones once."""
        model = self.model_runner.get_model()
        if any(parameter.numel() == 0 for parameter in model.parameters()):
            # vLLM packs CPU weights into its kernels and deletes the parameters. A model without storage has them.
            model = self._model_without_storage()
        return sum(parameter.nbytes for parameter in model.parameters())

    def _model_without_storage(self) -> torch.nn.Module:
        config = copy.deepcopy(self.vllm_config)
        config.compilation_config.static_forward_context = {}
        with (
            set_current_vllm_config(config),
            set_default_torch_dtype(config.model_config.dtype),
            torch.device("meta"),
        ):
            return initialize_model(config)


def adopt_request(runner: Any, request: Request, num_kv_groups: int) -> None:
    """Makes `runner` know a half-decoded request as one that it had preempted itself.

    The scheduler gives it blocks when it resumes; penalties, minimum lengths and seeds read the output tokens.
    """
    adopt_state(runner, half_decoded(request, num_kv_groups))


def half_decoded(request: Request, num_kv_groups: int) -> CachedRequestState:
    """A half-decoded request as a runner keeps it. It can be pickled: vLLM's worker may be in another process."""
    return CachedRequestState(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        prompt_embeds=request.prompt_embeds,
        prompt_is_token_ids=request.prompt_is_token_ids,
        mm_features=request.mm_features,
        sampling_params=request.sampling_params,
        generator=None,
        block_ids=tuple([] for _ in range(num_kv_groups)),
        num_computed_tokens=0,
        output_token_ids=list(request.output_token_ids),
        lora_request=request.lora_request,
    )


def adopt_state(runner: Any, state: CachedRequestState) -> None:
    """As `adopt_request`; of what `half_decoded` made."""
    state.generator = _generator(runner, state)
    if runner.uses_mrope:
        runner._init_mrope_positions(state)
    runner.requests[state.req_id] = state


def forget_requests(runner: Any, request_ids: Iterable[str]) -> None:
    """Drops all state of requests from `runner` now, by a step that schedules nothing."""
    nothing = SchedulerOutput.make_empty()
    nothing.finished_req_ids = set(request_ids)
    runner.execute_model(nothing)


def place_blocks(runner: Any, moved: Mapping[int, int]) -> None:
    """Tells `runner` that the content of KV blocks is elsewhere: {where it was: where it is}."""
    if not moved:
        return
    batch = runner.input_batch
    for request_id, state in runner.requests.items():
        blocks = blocks_of(state.block_ids)
        if any(block_id in moved for block_id in blocks):
            state.block_ids = grouped([moved.get(block_id, block_id) for block_id in blocks])
            if request_id in batch.req_id_to_index:
                batch.block_table.add_row(state.block_ids, batch.req_id_to_index[request_id])


def _generator(runner: Any, state: CachedRequestState) -> torch.Generator | None:
    sampling_params = state.sampling_params
    if sampling_params is None or sampling_params.sampling_type is not SamplingType.RANDOM_SEED:
        return None
    assert sampling_params.seed is not None
    if runner.device.type == "cpu":
        return ReplayGenerator().bind(sampling_params.seed, state)
    generator = torch.Generator(device=runner.device)
    generator.manual_seed(sampling_params.seed)
    noise = torch.empty(runner.input_batch.vocab_size, device=runner.device)
    for _ in state.output_token_ids:
        noise.exponential_(generator=generator)  # as vLLM's sampler draws, one row per token
    return generator


def replayable(update_states: Callable[[Any], Any], runner: Any) -> Callable[[Any], Any]:
    """Wraps a CPU runner's `_update_states` so that new seeded requests get a generator that can be rewound."""

    def update(scheduler_output: Any) -> Any:
        result = update_states(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            state = runner.requests[new.req_id]
            if state.generator is not None and not isinstance(state.generator, ReplayGenerator):
                state.generator = ReplayGenerator().bind(state.sampling_params.seed, state)
                runner.input_batch.generators[runner.input_batch.req_id_to_index[new.req_id]] = state.generator
        return result

    return update


class LaneGPUWorker(LaneWorkerMixin, GPUWorker):
    """vLLM's CUDA worker with a lane's additions. It has run on one H200 (benchmarks/results/gpu-h200.md)."""


def end_with_parent() -> None:
    """Has the kernel end this process when the thread that started it ends: that of an instance that was killed.

    A worker that waits for another one in a collective would not notice, and one that does takes seconds: on a GPU the
    instance's successor needs the memory at once.
    """
    parent = multiprocessing.parent_process()
    pid = os.getppid() if parent is None or parent.pid is None else parent.pid
    try:
        if not signal_when_parent_ends(signal.SIGKILL, pid):
            os._exit(1)  # it ended before the kernel was told
    except OSError as error:
        logger.warning("%s; a killed instance may leave this worker behind", error)


def worker_class_name(device: str) -> str:
    """Value of vLLM's `worker_cls` for a device. The CPU class has its own module: importing it sets up the CPU."""
    if device == "cpu":
        return "pengserve.replicas.engine.cpu_worker.LaneCPUWorker"
    return "pengserve.replicas.engine.worker.LaneGPUWorker"
