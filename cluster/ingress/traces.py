"""Spans of a request for OpenTelemetry, made when it has ended; off unless an endpoint is named.

    llm_request                         as vLLM names it, with `gen_ai.*`; its parent is the client's `traceparent`
      queue | prefill | decode          until it was sent, until its first token, until its end
      instance 0.1, instance 1.0, ...   where it ran
      events: carried, handed back, lost, resumed, shape tp2 ...

What is exported comes from the record's own notes, so a request costs nothing before its end. A thread sends.
"""

import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.planners.types.errors import ConfigError

STAYS = frozenset({"sent", "resumed", "carried"})  # notes that say where it runs from then on
ERRORS = frozenset({"error"})


class Traces:
    """Exports to an OTLP endpoint over HTTP, such as `http://127.0.0.1:4318/v1/traces`."""

    def __init__(
        self,
        endpoint: str,
        *,
        app: str,
        model: str,
        sample_ratio: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError where OpenTelemetry's packages are not installed."""
        try:
            sdk, exporter = (import_module(name) for name in _MODULES)
            self._trace: Any = import_module("opentelemetry.trace")
            self._propagator: Any = import_module("opentelemetry.trace.propagation.tracecontext")
            resources, sampling = (
                import_module("opentelemetry.sdk.resources"),
                import_module("opentelemetry.sdk.trace.sampling"),
            )
            processors = import_module("opentelemetry.sdk.trace.export")
        except ImportError as error:
            raise ConfigError(
                f"traces.otlp_endpoint needs OpenTelemetry ({error.name} is missing): pip install 'pengserve[traces]'"
            ) from error
        self._model, self._clock, self._wall_clock = model, clock, wall_clock
        self._provider = sdk.TracerProvider(
            resource=resources.Resource.create({"service.name": "pengserve", "service.namespace": app}),
            sampler=sampling.ParentBased(sampling.TraceIdRatioBased(sample_ratio)),
        )
        sender = exporter.OTLPSpanExporter(endpoint=endpoint, timeout=5)
        self._provider.add_span_processor(processors.BatchSpanProcessor(sender))
        self._tracer = self._provider.get_tracer("pengserve.ingress")

    def ended(self, record: RequestRecord, finish: str) -> None:
        """Makes the spans of a request that is over."""
        parent = None
        if record.options.traceparent:
            carrier = {"traceparent": record.options.traceparent}
            parent = self._propagator.TraceContextTextMapPropagator().extract(carrier)
        took_s = self._clock() - record.created_s
        at_ns = _clock_from(self._wall_clock() - took_s)
        root = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=self._trace.SpanKind.SERVER,
            start_time=at_ns(0.0),
            attributes=_attributes(record, finish, took_s, self._model),
        )
        if not root.is_recording():
            return
        for offset_s, what, where in record.life:
            root.add_event(what, {"pengserve.instance": where}, timestamp=at_ns(offset_s))
        if finish in ERRORS:
            root.set_status(self._trace.StatusCode.ERROR)
        inside = self._trace.set_span_in_context(root)
        for name, start_s, end_s, attributes in _parts(record, took_s):
            span = self._tracer.start_span(name, context=inside, start_time=at_ns(start_s), attributes=attributes)
            span.end(at_ns(end_s))
        root.end(at_ns(took_s))

    def close(self) -> None:
        """Sends what was not sent yet; waits some seconds at most."""
        self._provider.force_flush(timeout_millis=3000)
        self._provider.shutdown()


_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def _clock_from(began_s: float) -> Callable[[float], int]:
    """Nanoseconds since the Unix epoch of a moment so many seconds after `began_s`."""
    return lambda offset_s: int((began_s + offset_s) * 1e9)


def _attributes(record: RequestRecord, finish: str, took_s: float, model: str) -> dict[str, Any]:
    """As vLLM's own spans have them; times in seconds."""
    found: dict[str, Any] = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.response.model": model,
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": len(record.output_token_ids),
        "gen_ai.latency.e2e": took_s,
        "gen_ai.response.finish_reasons": [finish],
        "pengserve.losses": record.num_losses,
    }
    if record.life:
        found["gen_ai.latency.time_in_queue"] = record.life[0][0]
    if record.first_token_s is not None:
        found["gen_ai.latency.time_to_first_token"] = record.first_token_s - record.created_s
    return found


def _parts(record: RequestRecord, took_s: float) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """The spans within a request: (name, start, end, attributes), in seconds after it came."""
    sent_s = record.life[0][0] if record.life else took_s
    yield "queue", 0.0, sent_s, {}
    if record.first_token_s is not None:
        first_s = record.first_token_s - record.created_s
        yield "prefill", sent_s, first_s, {}
        yield "decode", first_s, took_s, {}
    elif record.life:
        yield "prefill", sent_s, took_s, {}
    stays = [(offset_s, where) for offset_s, what, where in record.life if what in STAYS]
    ends_s = [offset_s for offset_s, _ in stays[1:]] + [took_s]
    for (start_s, where), end_s in zip(stays, ends_s, strict=False):  # none where it never ran
        yield f"instance {where}", start_s, end_s, {"pengserve.instance": where}
