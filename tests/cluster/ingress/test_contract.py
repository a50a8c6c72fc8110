"""What a request may ask for, what its class adds, and that bad values are refused by name with their limits."""

from typing import Any

import httpx
import pytest

from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.cluster.ingress.request.contract import ContractReader, without_own_fields
from pengserve.planners.types.contract import (
    BUILT_IN_CLASSES,
    NO_CONTRACT,
    Contract,
    Pacing,
    ServiceClass,
    Slo,
    SloPolicy,
    by_name,
)
from tests.support.ingress import MODEL_NAME

CHAT = ServiceClass(name="chat", slo=Slo(ttft_s=2.0, tbt_s=0.1, pacing=Pacing.STEADY), min_priority=-5, max_priority=5)
MINUTE = Contract(queue_limit_s=61.5)
READER = ContractReader(by_name([CHAT]))


def read(
    body: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
    *,
    key_id: str = "",
    session: str = "",
    reader: ContractReader = READER,
) -> Contract:
    return reader.read(headers or {}, body or {}, key_id=key_id, session=session)


def test_a_request_that_asks_for_nothing_has_the_one_empty_contract() -> None:
    assert read({"prompt": "x", "slo": None}, {"accept": "*/*", "x-session-id": ""}) is NO_CONTRACT


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"slo": {"ttft_ms": 500}}, {}, Contract(slo=Slo(ttft_s=0.5))),
        (
            {"slo": {"ttft_ms": 500, "tbt_ms": 50.5, "policy": "reject", "pacing": "steady"}, "stream": True},
            {},
            Contract(slo=Slo(ttft_s=0.5, tbt_s=0.0505, policy=SloPolicy.REJECT, pacing=Pacing.STEADY)),
        ),
        ({}, {"x-llm-d-slo-ttft-ms": "500", "x-slo-tpot-ms": " 50 "}, Contract(slo=Slo(ttft_s=0.5, tbt_s=0.05))),
        ({"slo": {"ttft_ms": 1000}}, {"x-slo-ttft-ms": "9"}, Contract(slo=Slo(ttft_s=1.0))),  # the body beats headers
        ({}, {"x-slo-ttft-ms": "9", "x-llm-d-slo-ttft-ms": "9.0"}, Contract(slo=Slo(ttft_s=0.009))),
        ({"priority": 3}, {}, Contract(priority=3)),
        ({"priority": 0}, {"x-vllm-priority": "7"}, NO_CONTRACT),
        ({}, {"x-vllm-priority": "-7"}, Contract(priority=-7)),
        ({}, {"x-dynamo-request-priority": "7", "x-vllm-priority": "-7"}, Contract(priority=-7)),
        ({"service_tier": "flex"}, {}, Contract(service_class="flex", priority=1)),
        ({"service_tier": "priority", "priority": -9}, {}, Contract(service_class="priority", priority=-9)),
        ({"service_tier": "auto"}, {}, NO_CONTRACT),
        ({"service_tier": "scale"}, {}, NO_CONTRACT),
        ({"service_tier": "chat", "stream": True}, {}, Contract(service_class="chat", slo=CHAT.slo)),
        ({"stream": True}, {"x-dynamo-inference-objective": "chat"}, Contract(service_class="chat", slo=CHAT.slo)),
        ({"service_tier": "chat"}, {}, Contract(service_class="chat", slo=Slo(ttft_s=2.0, tbt_s=0.1))),  # no stream
        (
            {"service_tier": "chat", "slo": {"ttft_ms": 100, "pacing": "none"}},
            {},
            Contract(service_class="chat", slo=Slo(ttft_s=0.1, tbt_s=0.1)),
        ),
        ({}, {"x-pengserve-queue-timeout-ms": "1500"}, Contract(queue_limit_s=1.5)),
        ({}, {"x-llm-d-inference-ttl": "1500ms"}, Contract(queue_limit_s=1.5)),
        ({}, {"x-llm-d-inference-ttl": "1m1.5s", "x-pengserve-queue-timeout-ms": "61500"}, MINUTE),
        ({}, {"x-gateway-inference-fairness-id": "alice"}, NO_CONTRACT),  # from no proxy that is trusted
    ],
)  # fmt: skip
def test_a_contract_is_read(body: dict[str, Any], headers: dict[str, str], expected: Contract) -> None:
    assert read(body, headers) == expected


def test_tenant_and_session_are_part_of_it() -> None:
    assert read(key_id="k1", session="s") == Contract(tenant="k1", session="s")
    trusting = ContractReader(BUILT_IN_CLASSES, is_tenant_trusted=True)
    for header in ("x-pengserve-tenant", "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"):
        assert read({}, {header: "alice"}, key_id="k1", reader=trusting).tenant == "alice"
    assert read({}, {}, key_id="k1", reader=trusting).tenant == "k1"


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        ({"slo": {"ttft_ms": 0}}, {}, ("slo.ttft_ms", "1 to 3,600,000", "got 0")),
        ({"slo": {"ttft_ms": -5}}, {}, ("slo.ttft_ms", "got -5")),
        ({"slo": {"ttft_ms": 1e12}}, {}, ("slo.ttft_ms", "3,600,000")),
        ({"slo": {"tbt_ms": 60001}}, {}, ("slo.tbt_ms", "1 to 60,000")),
        ({"slo": {"tbt_ms": 0}}, {}, ("slo.tbt_ms", "1 to 60,000", "got 0")),
        ({"slo": {"tbt_ms": -50}}, {}, ("slo.tbt_ms", "got -50")),
        ({"slo": {"tbt_ms": 1e-9}}, {}, ("slo.tbt_ms", "1 to 60,000")),
        ({"slo": {"tbt_ms": float("nan")}}, {}, ("slo.tbt_ms", "1 to 60,000")),
        ({"slo": {"ttft_ms": float("inf")}}, {}, ("slo.ttft_ms", "3,600,000")),
        ({"slo": {"tbt_ms": "50"}}, {}, ("slo.tbt_ms", '"50"')),
        ({"slo": {"tbt_ms": True}}, {}, ("slo.tbt_ms",)),
        ({"slo": {"ttft_ms": [1] * 99}}, {}, ("slo.ttft_ms",)),
        ({"slo": {"ttft": 5}}, {}, ("slo.ttft", "no such field", "tbt_ms")),
        ({"slo": {"x" * 999: 5}}, {}, ("slo.x", "no such field")),
        ({"slo": 500}, {}, ("slo", "an object")),
        ({"slo": []}, {}, ("slo", "an object")),
        ({"slo": {"policy": "drop", "ttft_ms": 5}}, {}, ("slo.policy", "best_effort or reject")),
        ({"slo": {"pacing": "slow", "tbt_ms": 5}}, {}, ("slo.pacing", "none or steady")),
        ({"slo": {"pacing": "steady"}}, {}, ("slo.pacing", "slo.tbt_ms")),
        ({"slo": {"pacing": "steady", "ttft_ms": 9}}, {}, ("slo.pacing", "slo.tbt_ms", "60,000")),
        ({"slo": {"policy": "reject", "tbt_ms": 9}}, {}, ("slo.policy", "slo.ttft_ms", "3,600,000")),
        ({"service_tier": "gold"}, {}, ("service_tier", "gold", "chat, default, flex, priority")),
        ({"service_tier": 5}, {}, ("service_tier", "a string")),
        ({}, {"x-llm-d-inference-objective": "gold"}, ("x-llm-d-inference-objective", "gold")),
        ({}, {"x-llm-d-inference-objective": "a b\n"}, ("x-llm-d-inference-objective",)),
        ({"service_tier": "chat", "priority": 6}, {}, ("priority", "service_tier", "from -5 to 5", "got 6")),
        ({"service_tier": "flex", "priority": -1}, {}, ("priority", "flex", "from 0 to any")),
        ({"service_tier": "chat"}, {"x-vllm-priority": "-6"}, ("x-vllm-priority", "service_tier", "-5 to 5")),
        ({"priority": 1 << 40}, {}, ("priority", "2,147,483,648")),
        ({"priority": 1.5}, {}, ("priority", "whole number")),
        ({}, {"x-vllm-priority": "high"}, ("x-vllm-priority", "whole number")),
        (
            {},
            {"x-vllm-priority": "1", "x-dynamo-request-priority": "1"},
            ("x-vllm-priority", "x-dynamo-request-priority", "contradict"),
        ),
        (
            {},
            {"x-slo-ttft-ms": "9", "x-llm-d-slo-ttft-ms": "10"},
            ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "contradict", "3,600,000"),
        ),
        ({}, {"x-slo-tpot-ms": "nan"}, ("x-slo-tpot-ms", "60,000")),
        ({}, {"x-slo-tpot-ms": "1e3"}, ("x-slo-tpot-ms",)),
        ({}, {"x-slo-tbt-ms": "0"}, ("x-slo-tbt-ms", "1 to 60,000")),
        ({}, {"x-slo-ttft-ms": "-5"}, ("x-slo-ttft-ms", "3,600,000")),
        ({"slo": {"pacing": "steady"}}, {"x-slo-ttft-ms": "9"}, ("slo.pacing", "slo.tbt_ms")),
        ({"slo": {"policy": "reject"}}, {"x-slo-tbt-ms": "9"}, ("slo.policy", "slo.ttft_ms")),
        ({}, {"x-pengserve-queue-timeout-ms": "0"}, ("x-pengserve-queue-timeout-ms", "1 to 3,600,000")),
        ({}, {"x-llm-d-inference-ttl": "2 fortnights"}, ("x-llm-d-inference-ttl", "1500ms")),
        ({}, {"x-llm-d-inference-ttl": "2h"}, ("x-llm-d-inference-ttl",)),
        (
            {},
            {"x-llm-d-inference-ttl": "2s", "x-pengserve-queue-timeout-ms": "1"},
            ("x-pengserve-queue-timeout-ms", "x-llm-d-inference-ttl", "contradict"),
        ),
        ({}, {"x-pengserve-tenant": "alice"}, ("x-pengserve-tenant", "API keys")),
    ],
)
def test_a_bad_value_is_refused_by_name_and_with_its_limits(
    body: dict[str, Any], headers: dict[str, str], words: tuple[str, ...]
) -> None:
    with pytest.raises(RequestRefused) as caught:
        read(body, headers)
    message = caught.value.message
    assert caught.value.status == 400 and caught.value.param is not None
    assert all(word in message for word in words), message
    assert len(message) < 400, "the value may be huge"


def test_odd_names_of_tenants_are_refused_from_a_trusted_proxy_too() -> None:
    trusting = ContractReader(BUILT_IN_CLASSES, is_tenant_trusted=True)
    for name in ("a b", "é", "x" * 129, "-a", 'a"b'):
        with pytest.raises(RequestRefused, match="x-pengserve-tenant"):
            read({}, {"x-pengserve-tenant": name}, reader=trusting)


def test_vllm_sees_no_field_that_it_would_refuse() -> None:
    assert without_own_fields({"prompt": "x", "service_tier": "flex"}) is None
    body = {"prompt": "x", "slo": {"ttft_ms": 5}, "service_tier": "chat", "priority": 2}
    assert without_own_fields(body) == {"prompt": "x", "priority": 2}
    assert without_own_fields({"slo": {}, "service_tier": "flex"}) == {"service_tier": "flex"}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_each_route_serves_a_request_with_a_contract_and_refuses_a_bad_one(http: httpx.Client, path: str) -> None:
    prompt = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
        "/v1/completions": {"prompt": "hello", "max_tokens": 4},
        "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    }[path]
    body = {"model": MODEL_NAME, **prompt, "temperature": 0}
    plain = http.post(path, json=body)
    given = http.post(path, json=body | {"slo": {"ttft_ms": 60000, "tbt_ms": 1000}, "service_tier": "flex"})
    assert (plain.status_code, given.status_code) == (200, 200), given.text
    assert given.json()["usage"]["total_tokens"] == plain.json()["usage"]["total_tokens"]
    refused = http.post(path, json=body | {"slo": {"ttft_ms": 0}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "slo.ttft_ms")
