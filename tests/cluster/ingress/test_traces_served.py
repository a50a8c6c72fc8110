"""Spans of a real ingress over real instances."""

import httpx
import pytest

from tests.support.collector import Collector, attributes
from tests.support.ingress import FixedRoutes, ingress_config, serving, wait_ready
from tests.support.processes import InstanceProcess

pytestmark = pytest.mark.slow

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_each_sequence_is_a_span_of_its_client_s_trace(instances: list[InstanceProcess]) -> None:
    collector = Collector()
    config = ingress_config(instances, otlp_endpoint=collector.endpoint)
    body = {"model": "tiny", "prompt": "a secret prompt", "max_tokens": 8, "n": 2}
    with (
        serving(config, FixedRoutes(instances)) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as http,
    ):
        wait_ready(url)
        parent = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        answer = http.post("/v1/completions", json=body, headers=parent).json()
    collector.close()
    roots = [span for span in collector.spans if span.name == "llm_request"]
    assert len(roots) == 2
    for root in roots:
        assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
        told = attributes(root)
        assert answer["id"] in told["gen_ai.request.id"]
        assert told["gen_ai.usage.completion_tokens"] == 8
        assert told["gen_ai.usage.prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
        inside = {span.name for span in collector.spans if span.parent_span_id == root.span_id}
        assert inside > {"queue", "prefill", "decode"} and any(name.startswith("instance ") for name in inside)
    assert "secret" not in str(collector.spans)
