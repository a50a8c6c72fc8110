"""vLLM's `EngineClient` over a whole cluster: no engine in this process, requests that outlive instances."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from copy import copy
from time import monotonic
from typing import Any

from pengserve.cluster.ingress.answering import collector_of, next_output, refuse_guide_fault
from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.errors import OverloadedError
from pengserve.cluster.ingress.guides.guide_check import guide_checker
from pengserve.cluster.ingress.in_flight.records import RequestBook
from pengserve.cluster.ingress.meters import IngressMeters
from pengserve.cluster.ingress.request.begun import Begun, current_begun
from pengserve.cluster.ingress.request.kept import current_kept
from pengserve.cluster.ingress.request.record import RequestRecord, Resumption
from pengserve.cluster.ingress.request.request_options import current_deadline_s, current_options
from pengserve.cluster.ingress.request_log import RequestLog
from pengserve.cluster.ingress.slo.reject import require_ttft
from pengserve.cluster.ingress.tenants.tenant_figures import TenantFigures
from pengserve.cluster.ingress.tenants.tenant_meters import TenantMeters
from pengserve.cluster.ingress.tenants.tenants import Tenants
from pengserve.cluster.ingress.traces import Traces
from pengserve.cluster.ingress.unoffered import UnofferedCalls
from pengserve.cluster.ingress.vllm_openai_seam import (
    STREAM_FINISHED,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineGenerateError,
    GenerationError,
    GracefulHTTPError,
    InputProcessor,
    IterationStats,
    OutputProcessor,
    ParentRequest,
    RequestOutput,
    RequestOutputCollector,
    RetryableRequestError,
    VLLMClientError,
    VllmConfig,
    extract_prompt_components,
    renderer_from_config,
)
from pengserve.planners.types.contract import SloPolicy
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.tenants import FairnessConfig
from pengserve.replicas.engine.link import InstanceLink, Moved, Paused, StepBatch, Trial

logger = logging.getLogger(__name__)

NO_LIMITS = Tenants(FairnessConfig())
OUTPUTS_PER_SLICE = 128  # outputs processed before other tasks get a turn


class ClusterEngineClient(UnofferedCalls):
    """What vLLM's OpenAI layer calls. Also the `LinkHandler` of the link pool and the `RecordEvents` of the book.

    The path of a token: link -> `on_batch` -> book (noted, stale ones dropped) -> OutputProcessor (text, stop
    strings, logprobs) -> collector -> `generate`.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        limits: LimitConfig,
        meters: IngressMeters,
        admit: Callable[[int], None] = lambda n: None,
        request_log: RequestLog | None = None,
        traces: Traces | None = None,
    ) -> None:
        """`admit(n)` raises GracefulHTTPError where n more sequences are too many. None: no request log, no traces."""
        self._traces = traces
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self._guides = guide_checker(vllm_config, self.renderer, limits)
        self.book: RequestBook  # set by `use_book`: book and links need this client, and it needs them
        self._output_processor = OutputProcessor(
            self.renderer.tokenizer,
            log_stats=meters.vllm is not None,
            stream_interval=vllm_config.scheduler_config.stream_interval,
        )
        self._limits, self._meters, self._admit = limits, meters, admit
        self._request_log = request_log or RequestLog()
        self.tenants, self.tenant_figures = NO_LIMITS, TenantFigures()
        self._tenant_meters = TenantMeters(meters.metrics, lambda: self.book.records())
        self._closed = False
        self._widest = 0  # what the controller says of the widest group; 0: nothing yet
        self._shapes: dict[InstanceKey, str] = {}

    def use_book(self, book: RequestBook) -> None:
        """Sends requests through `book` from now on."""
        self.book = book

    # What vLLM's OpenAI layer calls --------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return not self._closed

    @property
    def is_stopped(self) -> bool:
        """Whether this client was shut down."""
        return self._closed

    @property
    def errored(self) -> bool:
        """A cluster does not fail as an engine does: requests wait for the next instance."""
        return False

    @property
    def dead_error(self) -> BaseException:
        """Never raised while `errored` is False."""
        return RetryableRequestError("The server is shutting down.")

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        """Text generation."""
        return ("generate",)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuses before anything of the answer is sent.

        Raises:
            GracefulHTTPError: too much is in flight, or the application drains.
        """
        self._admit(n)

    def require_slo(self, prompt: Any) -> None:
        """Refuses a request whose SLO says so, where its first token is predicted too late.

        Raises:
            OverloadedError: 429.
        """
        slo = current_options.get().contract.slo
        if slo is None or slo.policy is not SloPolicy.REJECT:
            return
        token_ids = extract_prompt_components(self.model_config, prompt).token_ids
        try:
            require_ttft(token_ids or (), self.book.predict_ttft_s)
        except OverloadedError:
            self._meters.rejected("slo")
            raise

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        prompt_text: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        **inputs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request as they come, from whichever instances it needs.

        Raises:
            VLLMClientError: the request cannot be run.
            GenerationError: it was given up; only a `RetryableRequestError` is worth another try.
        """
        collector: RequestOutputCollector | None = None
        outcome, begun = "failed", current_begun.get() or Begun()
        try:
            deadline_s = current_deadline_s.get()
            async with asyncio.timeout_at(deadline_s):
                request = await self._process_inputs(request_id, prompt, sampling_params, inputs)
            request.reasoning_ended = reasoning_ended
            request.reasoning_parser_kwargs = reasoning_parser_kwargs
            if begun.is_over:
                raise asyncio.CancelledError
            collector = self._start(request, extract_prompt_components(self.model_config, prompt).text)
            begun.add(collector.request_id)
            is_guided = sampling_params.structured_outputs is not None
            finished = False
            while not finished:
                if deadline_s is None:
                    output = collector.get_nowait() or await collector.get()
                else:
                    output = await next_output(collector, deadline_s)
                finished = output.finished
                if output is not STREAM_FINISHED:
                    if is_guided:
                        refuse_guide_fault(output)
                    yield output
            outcome = "aborted" if begun.is_over else "ok"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "aborted"
            raise
        except TimeoutError as error:
            raise RetryableRequestError("The request took longer than this server allows.") from error
        except (VLLMClientError, GracefulHTTPError, GenerationError):
            raise
        except Exception as error:
            if isinstance(error, ValueError) and collector is None:
                raise  # vLLM's checks of the input
            logger.exception("request %s failed", request_id)
            raise EngineGenerateError() from error
        finally:
            if collector is not None:
                begun.discard(collector.request_id)
                if outcome != "ok":
                    finish = "error" if outcome == "failed" else "abort"
                    self._abort([collector.request_id], internal=True, finish=finish)
                collector.close()
            self._meters.ended(outcome)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Aborts requests by the ids they were given to `generate` with."""
        self._abort([request_id] if isinstance(request_id, str) else list(request_id), internal=False)

    def abort_begun(self, request_ids: list[str]) -> None:
        """Aborts what an HTTP request that is over has left running, by the ids noted in its `Begun`."""
        self._abort(request_ids, internal=True)

    def shutdown(self, timeout: float | None = None) -> None:
        """Frees the renderer's threads."""
        if not self._closed:
            self._closed = True
            if self._guides is not None:
                self._guides.close()
            self.renderer.shutdown()

    # What links and the book call ----------------------------------------------------------------------------

    def on_up(self, link: InstanceLink) -> None:
        """A link is open."""
        max_model_len = link.capacity.max_model_len
        if not self._widest and max_model_len < self.model_config.max_model_len:
            self.model_config.max_model_len = max_model_len  # the engine fitted it to its memory
        self._meters.link_up(link)
        self.book.wake()

    def hold(self, max_model_len: int) -> None:
        """The widest group that can be formed holds requests of so many tokens. It never shrinks again.

        While an instance is replaced the group cannot be formed; its requests wait for that, and are not cut short.
        """
        if max_model_len > self._widest:
            self._widest = self.model_config.max_model_len = max_model_len

    def on_down(self, link: InstanceLink, *, lost: bool) -> None:
        """A link is gone: its requests go on elsewhere."""
        self._shapes.pop(link.key, None)
        # Before the figures: a fault in them must cost no request.
        self.book.lose(link, is_death=lost and link.was_closed_there)
        self._meters.link_down(link, lost=lost)

    def is_busy(self, link: InstanceLink) -> bool:
        """Whether a request runs over `link`."""
        return self.book.is_busy(link)

    async def on_batch(self, link: InstanceLink, batch: StepBatch) -> None:
        """Hands a batch's tokens to their requests."""
        outputs, shape = batch.outputs, batch.stats.shape
        if (before := self._shapes.get(link.key)) != shape:
            self._shapes[link.key] = shape
            if before is not None:
                self.book.note_shape(link, shape)
            self.book.wake()
        iteration_stats = IterationStats() if self._meters.vllm is not None and outputs.outputs else None
        for start in range(0, len(outputs.outputs), OUTPUTS_PER_SLICE):
            if start:
                await asyncio.sleep(0)
            accepted = self.book.accept(link, outputs.outputs[start : start + OUTPUTS_PER_SLICE])
            self._process(accepted, outputs.timestamp, iteration_stats, outputs.weight_version)
        self._output_processor.update_scheduler_stats(outputs.scheduler_stats)
        self._meters.batch(link, batch, iteration_stats)

    def on_moved(self, link: InstanceLink, moved: Moved) -> None:
        """Requests left `link`: follows them, and hands on what had come of them from elsewhere."""
        outputs = self.book.move(link, moved)
        if not outputs:
            return
        iteration_stats = IterationStats() if self._meters.vllm is not None else None
        self._process(outputs, monotonic(), iteration_stats, None)
        if iteration_stats is not None and moved.to is not None:
            self._meters.late(moved.to, iteration_stats)

    def on_trial(self, link: InstanceLink, trial: Trial) -> None:
        """A suspect is alone on its instance from now on, or not."""
        self.book.note_trial(link, trial)

    def on_paused(self, link: InstanceLink, paused: Paused) -> None:
        """A request was parked, and goes on."""
        self.book.note_pause(link, paused)

    def on_failed(self, request_id: str, error: Exception) -> None:
        """The book gave a request up."""
        state = self._output_processor.request_states.get(request_id)
        if state is not None and state.queue is not None:
            state.queue.put(error)  # `generate` raises it and aborts what else belongs to the request

    def on_ended(self, record: RequestRecord, finish: str) -> None:
        """A request is over."""
        if record.kept is not None:
            record.kept.finish = finish
            self._meters.kept(record, finish)
        self.tenants.ended(record)
        self.tenant_figures.ended(record)
        self._tenant_meters.ended(record)
        self._request_log.note(record, finish)
        if self._traces is not None:
            self._traces.ended(record, finish)

    def on_finished(self, output: EngineCoreOutput) -> None:
        """A request was complete when its instance died."""
        self._process([output], 0.0, None, None)

    def on_dispatched(self, key: InstanceKey, resumed: Resumption | None) -> None:
        """A request went to an instance."""
        self._meters.dispatched(key, resumed)

    def on_resumed(self, gap_s: float) -> None:
        """A lost request's next token came."""
        self._meters.resumed(gap_s)

    def on_request_moved(self, *, carried: bool) -> None:
        """A switch moved a request."""
        self._meters.moved(carried=carried)

    def on_switched(self, gap_s: float) -> None:
        """A moved request's next token came."""
        self._meters.switched(gap_s)

    # Inside --------------------------------------------------------------------------------------------------

    async def _process_inputs(
        self, request_id: str, prompt: Any, params: Any, inputs: Mapping[str, Any]
    ) -> EngineCoreRequest:
        tasks = await self.get_supported_tasks()
        inputs = {**inputs, "trace_headers": None, "data_parallel_rank": None}
        if priority := current_options.get().contract.priority:  # a header's or the class's, which vLLM has not seen
            inputs["priority"] = priority
        processor = self.input_processor
        is_guided = params.structured_outputs is not None
        is_rendered = isinstance(prompt, dict) and "type" in prompt
        if is_rendered and not (is_guided and self._guides is None):  # nothing here blocks
            request = processor.process_inputs(request_id, prompt, params, supported_tasks=tasks, **inputs)
        else:
            request = await processor.process_inputs_async(request_id, prompt, params, supported_tasks=tasks, **inputs)
        processor.assign_request_id(request)
        if is_guided and self._guides is not None:
            await self._guides.check(request.sampling_params)
        return request

    def _start(self, request: EngineCoreRequest, prompt_text: str | None) -> RequestOutputCollector:
        """Registers the request, as `n` sequences, and sends them off."""
        params = request.sampling_params
        assert params is not None, "only generation is supported"
        options = current_options.get()
        self.book.check(request, options)
        kept = current_kept.get()
        collector = collector_of(request.request_id, params.output_kind, kept)
        if params.n == 1:
            self._output_processor.add_request(request, prompt_text, None, 0, collector)
            self.tenants.come(request, options)
            self.book.add(request, options, None if kept is None else kept.begin())
            return collector
        parent = ParentRequest(request)
        children = []
        for index in range(params.n):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            self._output_processor.add_request(child, prompt_text, parent, index, collector)
            children.append(child)
        for child in children:
            self.tenants.come(child, options)
            self.book.add(child, options, None if kept is None else kept.begin())
        return collector

    def _process(
        self,
        outputs: list[EngineCoreOutput],
        timestamp_s: float,
        iteration_stats: IterationStats | None,
        weight_version: str | None,
    ) -> None:
        try:
            processed = self._output_processor.process_outputs(
                outputs, timestamp_s, iteration_stats, weight_version=weight_version
            )
        except Exception as error:
            # Nothing can be said of the requests in this batch; those of other batches go on.
            logger.exception("a batch of outputs could not be processed")
            for output in outputs:
                failure = EngineGenerateError()
                failure.__cause__ = error
                self.on_failed(output.request_id, failure)
            return
        if processed.reqs_to_abort:
            self.book.abort(processed.reqs_to_abort, finish="stop")  # the text holds a stop string

    def _abort(self, request_ids: list[str], *, internal: bool, finish: str = "abort") -> None:
        self.book.abort(self._output_processor.abort_requests(request_ids, internal), finish)
