"""The `dp` lane: the ordinary vLLM engine of one instance, and requests that come to it half decoded."""

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import ConfigError, EngineError, UnsupportedShapeError
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.comm.budget import communicator_bytes
from pengserve.replicas.engine.lanes.base_memory import OPTIONS, BaseMemory, MemoryOptions
from pengserve.replicas.engine.lanes.engine_steps import EngineSteps, StepResult
from pengserve.replicas.engine.lanes.handoff import Handoff, as_preempted
from pengserve.replicas.engine.lanes.kv_shares import LaneKv, shares_of
from pengserve.replicas.engine.lanes.lane import FREE, Lane
from pengserve.replicas.engine.lanes.shared_model import plain_weights
from pengserve.replicas.engine.lanes.warm_up import marked_as_lane
from pengserve.replicas.engine.placement.placement_notes import PlacementNotes
from pengserve.replicas.engine.placement.slo_gate import Contracts, SloGate
from pengserve.replicas.engine.scheduling.grammar_budget import bound_grammars
from pengserve.replicas.engine.scheduling.grammars import explaining_rejections, guide_config
from pengserve.replicas.engine.tiers.lane_tiers import LaneTiers
from pengserve.replicas.engine.tiers.residency import ResidentRequests
from pengserve.replicas.engine.tiers.session_pins import SessionPins
from pengserve.replicas.engine.tiers.tier_memory import OPTIONS as TIER_OPTIONS
from pengserve.replicas.engine.tiers.tier_memory import TierOptions, TierSizes
from pengserve.replicas.engine.vllm_seam import (
    AsyncEngineArgs,
    EngineCore,
    EngineCoreOutputs,
    EngineCoreRequest,
    Executor,
    Request,
    UsageContext,
)
from pengserve.replicas.engine.worker import SHAPES, half_decoded, worker_class_name
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.memory.kv_views import KvView
from pengserve.replicas.own_arguments import OWN_ARGUMENTS

logger = logging.getLogger(__name__)

# Requests name URLs of images, and the server would fetch them from inside its network. vLLM takes an empty list for
# "from everywhere", so this names a domain that cannot exist (RFC 2606).
NO_MEDIA_DOMAINS = ["none-until-engine.allowed_media_domains-is-set.invalid"]


def engine_arguments(config: InstanceConfig) -> dict[str, Any]:
    """vLLM engine arguments of an instance: the user's, with PengServe's defaults where the user gave none.

    Raises:
        ConfigError: an argument that PengServe sets itself, or that vLLM does not have; or no such model.
    """
    own = [name for name in OWN_ARGUMENTS if name in config.engine]
    if own:
        raise ConfigError(f"engine.{own[0]} is set by PengServe; leave it out of `engine:`")
    unknown = sorted(set(config.engine) - set(AsyncEngineArgs.__dataclass_fields__))
    if unknown:
        raise ConfigError(f"engine.{unknown[0]} is no vLLM engine argument; see `vllm serve --help` for their names")
    if Path(config.model).is_absolute() and not Path(config.model).is_dir():
        raise ConfigError(f"the model directory {config.model} does not exist on this machine")
    if config.memory_bytes and "kv_cache_memory_bytes" in config.engine:
        raise ConfigError("memory_bytes already says what KV may have: leave engine.kv_cache_memory_bytes out")
    if config.max_stages > 1 and not config.memory_bytes:
        raise ConfigError("dropping parameters needs a budget of memory: set memory_bytes, or leave max_stages at 1")
    defaults: dict[str, Any] = {
        "enable_prefix_caching": True,
        # vLLM keeps this cache twice, in one frontend and in its one engine. Here are several of both.
        "mm_processor_cache_gb": 0,
        "allowed_media_domains": NO_MEDIA_DOMAINS,
    }
    if config.host_bytes:
        defaults["async_scheduling"] = False  # what is on the device is chosen by what the step before has left there
    if config.device == "cpu":
        defaults |= {"enforce_eager": True}
        if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & set(config.engine):
            defaults["kv_cache_memory_bytes"] = 256 << 20
    num_workers = math.prod(config.engine.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "pipeline"))
    if num_workers > 1:
        # In a placement group vLLM would choose Ray, and wait for GPUs that this instance has itself.
        defaults["distributed_executor_backend"] = "mp"
    own_arguments: dict[str, Any] = {
        "model": config.model,
        "structured_outputs_config": guide_config(config.engine.get("structured_outputs_config") or {}),
    }
    additional = dict(config.engine.get("additional_config") or {})
    if config.memory_bytes:
        options = MemoryOptions(
            memory_bytes=config.memory_bytes // num_workers,  # the workers share what the instance has
            chunk_bytes=config.chunk_bytes,
            max_stages=config.max_stages,
            is_gradual=config.device != "cpu",
            communicator_bytes=(
                communicator_bytes(config.degrees, config.max_stages)
                if config.device != "cpu" and config.communicator in ("", "nccl")
                else 0
            ),
            is_packed=config.device == "cpu" and not config.degrees,
        )
        num_shapes = len(config.degrees) + config.max_stages.bit_length() - 1
        additional |= {OPTIONS: asdict(options), SHAPES: num_shapes}
        # Until the worker has loaded the weights, and knows what they leave. Without it vLLM looks what CUDA has free.
        if not options.is_auto or config.device == "cpu":
            own_arguments["kv_cache_memory_bytes"] = max(options.memory_bytes, 1)
        else:
            own_arguments["kv_cache_memory_bytes"] = None
    if config.host_bytes:
        tier = TierOptions(
            host_bytes=config.host_bytes, link_bytes_per_s=config.link_bytes_per_s, file=config.host_file
        )
        additional |= {TIER_OPTIONS: asdict(tier)}
    if config.degrees or config.memory_bytes:  # the model computes with weights as they are loaded: `plain_weights`
        additional = marked_as_lane(additional, "dp")
    if additional:
        own_arguments["additional_config"] = additional
    return defaults | dict(config.engine) | own_arguments


class DpLane(Lane):
    """vLLM's engine as it is, stepped by one thread. Its block ids are the instance's physical ones.

    `prepare` may be called from one other thread; everything else belongs to the thread that steps.
    """

    residency: ResidentRequests | None

    def __init__(self, config: InstanceConfig) -> None:
        """Loads the model and allocates its KV cache.

        Raises:
            ConfigError: an engine argument is not usable.
        """
        arguments = AsyncEngineArgs(**engine_arguments(config), worker_cls=worker_class_name(config.device))
        # What `vllm serve` gives: vLLM's defaults for the size of steps go by it, 8,192 tokens for 2,048 on an H100.
        vllm_config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
        is_elastic = config.changes_shape
        self.pristine_config: Any = _copied(vllm_config) if is_elastic else None  # before it holds a model
        if is_elastic:
            # A group may hold longer contexts than one instance: the dp lane takes as much context as fits its memory.
            vllm_config.model_config.original_max_model_len = -1
        self.log_stats = not arguments.disable_log_stats
        with plain_weights() if is_elastic or config.memory_bytes else contextlib.nullcontext():
            self.core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=self.log_stats)
        self._engine_steps = EngineSteps(self.core)
        guides: Any = self.core.structured_output_manager
        bound_grammars(guides)
        guides.accept_tokens = explaining_rejections(guides)
        scheduler: Any = self.core.scheduler
        kv_config = scheduler.kv_cache_config
        self.num_kv_groups = len(kv_config.kv_cache_groups)
        self._num_lent = 0
        self.contracts: Contracts | None = None  # of requests, where they are known
        self.placement_notes = PlacementNotes()  # of this lane, and of groups that are led here
        self._lost_tiers = ""  # why there is no host tier any more
        self._pins: SessionPins | None = None  # where sessions may pin their KV
        self._pin_s = config.session_pin_s
        self.places_by_slo = config.places_by_slo
        super().__init__(
            shape="dp",
            scheduler=scheduler,
            block_hasher=self.core.request_block_hasher,
            begins_short=is_elastic,
            capacity=KvCapacity(
                num_blocks=kv_config.num_blocks - 1,  # vLLM keeps block 0 as the null block
                block_size=vllm_config.cache_config.block_size,
                bytes_per_block=sum(tensor.size for tensor in kv_config.kv_cache_tensors) // kv_config.num_blocks,
                max_model_len=vllm_config.model_config.max_model_len,
                max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
                weight_bytes=sum(self.core.model_executor.collective_rpc("weight_bytes")),
            ),
        )

        if (tiers := self.tiers) is not None:
            tiers.watch_uses(self.scheduler.uses)
            self.residency = ResidentRequests(self.scheduler, LaneTiers(tiers), self.num_unsaved, self)

    @property
    def worker(self) -> Any:
        """vLLM's worker, which lives in this process.

        Raises:
            UnsupportedShapeError: it lives in others.
        """
        if not self._has_worker:
            raise UnsupportedShapeError("lanes need vLLM's worker in the instance's process; leave its executor alone")
        return self.core.model_executor.driver_worker.worker

    @property
    def _has_worker(self) -> bool:
        return hasattr(self.core.model_executor, "driver_worker")

    @property
    def memory(self) -> BaseMemory | None:
        """Where weights and KV share memory; None where they do not, or not in this process."""
        memory: BaseMemory | None = self.worker.memory if self._has_worker else None
        return memory

    @property
    def memory_failure(self) -> str:
        """Why weights and KV share no memory, though they were to; else empty."""
        return str(self.worker.memory_failure) if self._has_worker else ""

    @property
    def tiers(self) -> TieredKv | None:
        """Where KV is on the device and on the host; None where there is no host tier."""
        tiers: TieredKv | None = self.worker.tiers if self._has_worker else None
        return tiers

    @property
    def tier_sizes(self) -> TierSizes | None:
        """Of both tiers; None where there is no host tier."""
        sizes: TierSizes | None = self.worker.tier_sizes if self._has_worker else None
        return sizes

    @property
    def device_capacity(self) -> KvCapacity:
        """As `capacity`, of the device alone."""
        if self.tiers is None:
            return self.capacity
        return replace(self.capacity, num_blocks=min(self.capacity.num_blocks, self.tiers.pool.num_blocks - 1))

    def take_as_computed(self, block_ids: Sequence[int]) -> None:
        """These blocks have places, and what is there counts as KV: for steps that are only timed."""
        if self.tiers is not None:
            self.tiers.claim(np.unique(np.array(block_ids, dtype=np.int64)))

    @property
    def num_unsaved(self) -> int:
        """Blocks that have room on the device alone, once the host is full."""
        assert self.tiers is not None
        return max(0, self.capacity.num_blocks - self.tiers.host.num_rows)

    @property
    def num_held(self) -> int:
        """Blocks that are not lent to other lanes."""
        return self.capacity.num_blocks - self._num_lent

    def lend(self, count: int) -> list[int]:
        """Lends `count` free blocks; physical ids. What they cached is forgotten.

        Raises:
            ValueError: there are not so many.
        """
        block_ids = self.scheduler.withhold(count)
        self._num_lent += count
        return block_ids

    def take_back(self, block_ids: Sequence[int]) -> None:
        """Ends a loan."""
        self.scheduler.offer(block_ids)
        self._num_lent -= len(block_ids)

    def kv(self, dp_view: KvView) -> LaneKv:
        """All of it. Its blocks are their own."""
        [share] = shares_of(self.shape, dp_view.num_layers, dp_view.layout.num_heads)
        return LaneKv(dp_view, share, dp_view.layout.num_tokens, list)

    def adopt(self, request: Request) -> None:
        """Makes each of vLLM's workers, also those in other processes, know a half-decoded request as a preempted one.

        vLLM's V2 runner needs no telling: the scheduler gives it each preempted request as a new one, with all tokens.

        Raises:
            EngineError: one of them cannot take the request.
        """
        if self.core.vllm_config.use_v2_model_runner:
            return
        state = half_decoded(request, self.num_kv_groups)
        answers = self.core.model_executor.collective_rpc("adopt_request", args=(state,))
        if why := next(filter(None, answers), ""):
            raise EngineError(f"request {request.request_id} cannot be taken over: {why}")

    def forget(self, request_ids: Iterable[str]) -> None:
        """Makes each of vLLM's workers forget requests now, so that they can come back under the same ids."""
        if ids := list(request_ids):
            self.core.model_executor.collective_rpc("forget_requests", args=(ids,))
            self.scheduler.bring_all_tokens()

    def prepare(
        self, request: EngineCoreRequest, output_token_ids: Sequence[int], then: Callable[[Request], None]
    ) -> None:
        """Hashes the prompt's blocks and starts compiling its grammar; calls `then` when `add` may be called.

        With output tokens the grammar is first led through them, so that it stands where the lost instance's stood.
        """
        prepared, _ = self.core.preprocess_add_request(request)
        if not output_token_ids:
            then(prepared)
            return
        self._lead_through(prepared, output_token_ids, then)

    def revive(self, handoff: Handoff, then: Callable[[Request], None]) -> None:
        """Makes the request as it was in another instance, and calls `then`: at once, or where it has a grammar from
        another thread, when that stands where it stood there. The request is PREEMPTED then, unless its grammar cannot
        be compiled.
        """
        request = Request.from_engine_core_request(handoff.request, None)
        self.core.structured_output_manager.grammar_init(request)
        self._lead_through(request, handoff.output_token_ids, then)

    def _lead_through(self, request: Request, output_token_ids: Sequence[int], then: Callable[[Request], None]) -> None:
        """Appends output tokens, also to the grammar, and calls `then` with a request as one that was preempted."""
        structured = request.structured_output_request
        if structured is None:
            request.append_output_token_ids(list(output_token_ids))
            then(as_preempted(request))
            return

        def replay(_: object) -> None:
            # A grammar that does not compile stays WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: the scheduler fails it.
            if not isinstance(structured.grammar, Exception):
                self.append(request, output_token_ids)
                as_preempted(request)
            then(request)

        structured._grammar.add_done_callback(replay)

    def append(self, request: Request, output_token_ids: Iterable[int]) -> None:
        """Appends tokens that another instance has sampled, also to the request's grammar, whichever lane it is in."""
        for token_id in output_token_ids:
            request.append_output_token_ids(token_id)
            self.core.structured_output_manager.accept_tokens(request, [token_id])

    def _end(self, request_ids: Sequence[str]) -> None:
        if self._pins is not None:
            self._pins.forget(request_ids)
        self.core.abort_requests(list(request_ids))

    @property
    def step_tokens(self) -> int:
        """New tokens of a step at most, prompts' and answers' together; of groups as well."""
        return int(self.core.vllm_config.scheduler_config.max_num_batched_tokens)

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return super().has_work() or self.is_mid_step

    @property
    def is_mid_step(self) -> bool:
        """Whether a step is under way that `step` or `end_step` will end."""
        return self._engine_steps.under_way

    def step(self) -> Mapping[int, EngineCoreOutputs]:
        """Schedules, executes and samples one step; outputs by client index. No other overlaps it.

        Where a step is under way, it is ended, and none is scheduled.
        """
        return self._step(self._engine_steps.whole)

    def step_ahead(self) -> Mapping[int, EngineCoreOutputs]:
        """As `step`. With asynchronous scheduling the next step is under way when this one has ended, until `end_step`.

        Requests may be added, aborted and reordered meanwhile. All else waits for `end_step`.
        """
        return self._step(self._engine_steps.step)

    def end_step(self) -> Mapping[int, EngineCoreOutputs] | None:
        """Ends the oldest step that is under way; its outputs, or None where there is none."""
        return self.step() if self.is_mid_step else None

    def _step(self, run: Callable[..., StepResult]) -> Mapping[int, EngineCoreOutputs]:
        gate = self._slo_gate if self._slo_gate is not None and self._slo_gate.is_on else None
        outputs, seconds, num_read = run(
            lambda: self._scheduling(gate), gate.unread_tokens if gate is not None else lambda: None
        )
        if gate is not None and num_read is not None:
            gate.learn(seconds, num_read, self.core.vllm_config.parallel_config.pipeline_parallel_size)
        if self._pins is not None:
            self._pins.ended(outputs.values())
        self._count(outputs.values(), seconds)
        return outputs

    def _scheduling(self, gate: SloGate | None) -> AbstractContextManager[None]:
        """Around a step that vLLM schedules: what it may choose from."""
        if self._pins is not None and self._pins.num_sessions:
            self._pins.make_room(self._most_blocks_of_a_step())
        hurrying = self._hurrying()
        return self._choices(gate) if hurrying is FREE else self._within(hurrying, gate)

    @contextlib.contextmanager
    def _within(self, hurrying: AbstractContextManager[None], gate: SloGate | None) -> Iterator[None]:
        with hurrying, self._choices(gate):
            yield

    def _choices(self, gate: SloGate | None) -> AbstractContextManager[None]:
        short = self._shortening()
        if gate is None and short is FREE and self._chunking() is FREE:
            return self._choosing()
        return self._limited(gate, short)

    @contextlib.contextmanager
    def _limited(self, gate: SloGate | None, short: AbstractContextManager[None]) -> Iterator[None]:
        with gate.limiting() if gate is not None else FREE, short, self._choosing(), self._chunking():
            yield

    def use_contracts(self, contracts: Contracts) -> None:
        """Begins prompts, and places KV, as SLOs allow from now on; groups that are led here do so too."""
        self.contracts = contracts
        self.keep_slos(contracts, self.placement_notes, places=self.places_by_slo)
        if self._pin_s:
            self._pins = SessionPins(self.scheduler, contracts, self._pin_s)

    def add(self, request: Request) -> None:
        """As of any lane; a request's session may pin its KV when it has ended.

        Raises:
            EngineError: since the host tier has ended, the request is too long.
        """
        if self._lost_tiers and request.num_tokens >= self.capacity.max_model_len:
            raise EngineError(f"a request of {request.num_tokens} tokens is too long here: {self._lost_tiers}")
        super().add(request)
        if self._pins is not None:
            self._pins.began(request)

    def unpin(self) -> None:
        """Ends all pins of sessions: the blocks are needed elsewhere."""
        if self._pins is not None:
            self._pins.end_all()

    def num_used(self) -> int:
        """Blocks that requests hold. What is pinned can be had."""
        return super().num_used() - (self._pins.num_blocks() if self._pins is not None else 0)

    def _most_blocks_of_a_step(self) -> int:
        """Blocks that the next step can take at most: of those that run, and of the first that waits."""
        scheduler = self.scheduler
        waiting = next(iter(scheduler.waiting), None)
        num_tokens = scheduler.max_step_tokens + (waiting.num_tokens if waiting is not None else 0)
        return self.blocks_for(num_tokens) + len(scheduler.running) + len(scheduler.holding) + 1

    def give_up_tiers(self) -> list[str]:
        """The host tier has failed: from now on the device alone serves. All requests are computed again.

        Returns those that are too long for that, which are let go. No migration and no other lane has blocks.
        """
        assert self.tiers is not None and self.tier_sizes is not None and self.residency is not None
        num_blocks, residency = self.tiers.pool.num_blocks, self.residency
        self.unpin()
        self.stop_placing()
        held = [*self.scheduler.running, *self.scheduler.holding, *residency.parked]
        for request in sorted(held, key=lambda r: (r.priority, r.arrival_time), reverse=True):
            self.set_aside(request)
            self.scheduler.preempt(request)
        self.residency = None
        self.scheduler.keep_only(num_blocks)
        self.worker.end_tiers()
        self._lost_tiers = self.worker.tier_failure
        longest = min(self.capacity.max_model_len, (num_blocks - 1) * self.capacity.block_size)
        self.capacity = replace(self.capacity, num_blocks=num_blocks - 1, max_model_len=longest)
        self.scheduler.end_at(longest)
        stranded = [r.request_id for r in self.requests() if r.num_tokens >= longest]
        self.release(stranded)
        return stranded

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False while requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Frees the model, its memory and its process groups."""
        self.stop_placing()
        if (tiers := self.tiers) is not None:
            tiers.close()
        self.core.shutdown()


def _copied(vllm_config: Any) -> Any:
    """A copy for the lanes; None where there can be none, and then there are no lanes."""
    try:
        return copy.deepcopy(vllm_config)
    except Exception:
        logger.exception("vLLM's configuration cannot be copied; this instance works alone")
        return None
