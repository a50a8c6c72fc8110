"""Spans of requests, as a collector gets them over OTLP: names, times, parents, and what moved the request."""

from collections.abc import Iterator
from typing import Any

import pytest

from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.cluster.ingress.request.request_options import RequestOptions
from pengserve.cluster.ingress.traces import Traces
from pengserve.planners.types.ids import InstanceId, InstanceKey
from tests.support.collector import Collector, attributes

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector."""
    collector = Collector()
    yield collector
    collector.close()


class Request:
    """As much of an engine's request as a record reads."""

    def __init__(self) -> None:
        self.request_id, self.external_req_id = "cmpl-abc-0-1234", "cmpl-abc-0"
        self.prompt_token_ids, self.prompt_embeds, self.priority = [7] * 12, None, 0


def key(text: str) -> InstanceKey:
    slot, _, incarnation = text.partition(".")
    return InstanceKey(instance_id=InstanceId(int(slot)), incarnation=int(incarnation))


def record(traceparent: str = "") -> RequestRecord:
    """A request that was carried, lost and resumed; it came at 100 s of the monotonic clock."""
    request: Any = Request()
    made = RequestRecord(request, RequestOptions(traceparent=traceparent), created_s=100.0)
    made.output_token_ids += [1, 2, 3]
    made.first_token_s, made.num_losses = 100.5, 1
    for at_s, what, where in (
        (100.1, "sent", "0.1"),
        (101.0, "carried", "1.1"),
        (101.0, "shape tp2", "1.1"),
        (102.0, "lost", "1.1"),
        (102.2, "resumed", "0.1"),
    ):
        made.note(at_s, what, key(where))
    return made


def traces(collector: Collector, **changes: Any) -> Traces:
    given: dict[str, Any] = {"app": "shop", "model": "tiny", "clock": lambda: 104.0, "wall_clock": lambda: 1000.0}
    return Traces(collector.endpoint, **(given | changes))


def test_a_request_is_a_span_with_its_parts_and_what_moved_it(collector: Collector) -> None:
    made = traces(collector)
    made.ended(record(f"00-{TRACE_ID}-{PARENT_ID}-01"), "stop")
    made.close()
    root = collector.span("llm_request")
    assert root.trace_id.hex() == TRACE_ID and root.parent_span_id.hex() == PARENT_ID
    told = attributes(root)
    assert (told["gen_ai.request.id"], told["gen_ai.response.model"]) == ("cmpl-abc-0", "tiny")
    assert (told["gen_ai.usage.prompt_tokens"], told["gen_ai.usage.completion_tokens"]) == (12, 3)
    assert told["gen_ai.latency.time_to_first_token"] == pytest.approx(0.5)
    assert told["gen_ai.latency.time_in_queue"] == pytest.approx(0.1)
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (996_000_000_000, 1_000_000_000_000)
    assert [event.name for event in root.events] == ["sent", "carried", "shape tp2", "lost", "resumed"]
    assert root.events[3].time_unix_nano == pytest.approx(998e9, rel=1e-9)
    parts = [span for span in collector.spans if span is not root]
    assert all(span.parent_span_id == root.span_id for span in parts)
    spans = {(s.name, s.start_time_unix_nano // 10**8 - 9960, s.end_time_unix_nano // 10**8 - 9960) for s in parts}
    assert spans == {
        ("queue", 0, 1),
        ("prefill", 1, 5),
        ("decode", 5, 40),
        ("instance 0.1", 1, 10),
        ("instance 1.1", 10, 22),
        ("instance 0.1", 22, 40),
    }
    assert collector.resources[0]["service.name"] == "pengserve"


def test_a_request_that_never_ran_and_one_that_failed_are_told(collector: Collector) -> None:
    request: Any = Request()
    made = traces(collector)
    made.ended(RequestRecord(request, created_s=103.0), "error")
    made.close()
    assert {span.name for span in collector.spans} == {"llm_request", "queue"}
    assert collector.span("llm_request").status.code == 2


def test_a_client_that_is_not_sampled_makes_no_spans_and_the_ratio_holds_for_others(collector: Collector) -> None:
    made = traces(collector, sample_ratio=0.0)
    made.ended(record(f"00-{TRACE_ID}-{PARENT_ID}-00"), "stop")
    made.ended(record("nonsense"), "stop")
    made.ended(record(), "stop")
    made.ended(record(f"00-{TRACE_ID}-{PARENT_ID}-01"), "stop")  # the client has decided
    made.close()
    assert [span.name for span in collector.spans].count("llm_request") == 1


def test_a_collector_that_is_away_holds_up_nothing() -> None:
    made = Traces("http://127.0.0.1:1/v1/traces", app="shop", model="tiny")
    for _ in range(100):
        made.ended(record(), "stop")
    made.close()


def test_notes_of_a_request_are_bounded() -> None:
    made = record()
    for _ in range(1000):
        made.note(200.0, "carried", key("0.1"))
    assert len(made.life) == 64
