"""Requests that would come too late are refused where they ask for that, and say so in the field's way."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pengserve.cluster.ingress.errors import DROPPED_REASON_HEADER, OverloadedError, respond
from pengserve.cluster.ingress.request.kept import KeptAnswer, current_kept
from pengserve.cluster.ingress.request.request_options import RequestOptions, current_options
from pengserve.cluster.ingress.slo.reject import DROPPED_REASON, QUEUE_TIMEOUT, require_ttft
from pengserve.planners.ttft import MIN_SEEN
from pengserve.planners.types.contract import Contract, Slo, SloPolicy
from tests.support.ingress import MODEL_NAME
from tests.support.moving import Cluster, a_request


@pytest.fixture
def asking() -> Iterator[Any]:
    """Sets what the request of this test asks for."""
    undo = []

    def ask(slo: Slo) -> None:
        undo.append((current_options, current_options.set(RequestOptions(contract=Contract(slo=slo)))))
        undo.append((current_kept, current_kept.set(KeptAnswer(slo, 100.0))))

    yield ask
    for variable, token in reversed(undo):
        variable.reset(token)


def required(predicted_s: float | None, now_s: float = 100.5) -> None:
    require_ttft([1, 2, 3], lambda request, options: predicted_s, lambda: now_s)


def test_a_late_first_token_is_refused_with_what_was_predicted(asking: Any) -> None:
    asking(Slo(ttft_s=2.0, policy=SloPolicy.REJECT))
    required(1.4)
    required(None)  # nothing is known: it is served
    with pytest.raises(OverloadedError) as caught:
        required(4.0)
    answer = respond(caught.value)
    assert answer.status_code == 429
    assert answer.headers["Retry-After"] == "3" and answer.headers[DROPPED_REASON_HEADER] == DROPPED_REASON
    assert "4500 ms" in str(answer.body) and "slo.ttft_ms is 2000" in str(answer.body)


@pytest.mark.parametrize("slo", [Slo(ttft_s=2.0), Slo(tbt_s=1.0)])
def test_best_effort_is_served(asking: Any, slo: Slo) -> None:
    asking(slo)
    required(1e6)


def test_what_was_not_refused_for_this_has_no_such_header() -> None:
    plain = respond(OverloadedError("Too many.", 429, 1))  # type: ignore[arg-type]
    assert DROPPED_REASON_HEADER not in plain.headers


def test_the_prediction_is_learned_from_first_tokens() -> None:
    cluster = Cluster(1)
    cluster.connect(cluster.instances[0])
    options = RequestOptions()
    assert cluster.book.predict_ttft_s(a_request(1, 5), options) is None
    for number in range(MIN_SEEN):
        cluster.request(2 * number, 3)
        for link in cluster.open_links.values():
            link.read()
        cluster.passed_s += 5.0
        cluster.settle(5)
    found = cluster.book.predict_ttft_s(a_request(1, 5), options)
    assert found == pytest.approx(5.0, abs=1.0)


@pytest.mark.parametrize("has_instance", [True, False])
def test_a_queue_limit_ends_the_wait_for_the_first_token_and_no_other(has_instance: bool) -> None:
    cluster = Cluster(1)
    options = RequestOptions(contract=Contract(queue_limit_s=2.0))
    if has_instance:
        link = cluster.connect(cluster.instances[0])
        cluster.request(4, 50, options)
        link.read()
        cluster.instances[0].step()
        cluster.deliver(link)  # it has its first token
    cluster.request(2, 5, options)
    cluster.request(6, 5)
    cluster.passed_s += 1.5
    cluster.book.tend()
    assert not cluster.failed
    cluster.passed_s += 1.0
    cluster.book.tend()
    assert list(cluster.failed) == ["r2"]
    answer = respond(cluster.failed["r2"])
    assert (answer.status_code, answer.headers[DROPPED_REASON_HEADER]) == (429, QUEUE_TIMEOUT)
    assert "2000 ms" in str(answer.body)
    if has_instance:
        assert link.aborts == [["r2"]], "the instance does not compute it"
        cluster.settle(60)
        assert len(cluster.seen[4]) == 50 and len(cluster.seen[6]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_real_ingress_refuses_before_the_answer_begins(http: httpx.Client, stream: bool) -> None:
    body = {
        "model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 2,
        "stream": stream,
    }  # fmt: skip
    for _ in range(MIN_SEEN):
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    late = http.post("/v1/chat/completions", json=body | {"slo": {"ttft_ms": 1, "policy": "reject"}})
    assert late.status_code == 429 and late.json()["error"]["type"] == "RateLimitError"
    assert late.headers[DROPPED_REASON_HEADER] == DROPPED_REASON and int(late.headers["Retry-After"]) >= 1
    assert "predicted after" in late.json()["error"]["message"]
    easy = http.post("/v1/chat/completions", json=body | {"slo": {"ttft_ms": 600_000, "policy": "reject"}})
    assert easy.status_code == 200
    served = http.post("/v1/chat/completions", json=body | {"slo": {"ttft_ms": 1}})
    assert served.status_code == 200, "best effort is served late"
    counted = [line for line in http.get("/metrics").text.splitlines() if 'reason="slo"' in line]
    assert any(float(line.rpartition(" ")[2]) >= 1 for line in counted if "_total{" in line)
