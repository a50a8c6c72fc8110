"""What waits before a request: as counted one by one, at a cost that does not grow with the requests in flight."""

import random
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.cluster.ingress.request.request_options import RequestOptions
from pengserve.cluster.ingress.tenants.queued_tokens import PERIOD_S, VISITS, QueuedTokens
from pengserve.planners.types.contract import Contract
from tests.support.vllm_requests import sent_request

HERE: Any = object()
THERE: Any = object()


def record(number: int, tenant: str, length: int, link: Any = HERE) -> RequestRecord:
    sent = sent_request(f"r{number}", [1] * length, SamplingParams(max_tokens=3))
    return RequestRecord(sent, RequestOptions(contract=Contract(tenant=tenant)), link=link)


def one_by_one(found: list[RequestRecord], asked: RequestRecord) -> int:
    queued: Counter[str] = Counter()
    for each in found:
        if each.link is HERE and each.first_token_s is None and each is not asked:
            queued[each.options.contract.tenant] += each.num_prompt_tokens
    own = queued.pop(asked.options.contract.tenant, 0)
    return own + sum(min(tokens, own + asked.num_prompt_tokens) for tokens in queued.values())


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_counting_one_by_one_gives(seed: int) -> None:
    rng = random.Random(seed)
    found = [
        record(i, rng.choice("abcd"), rng.randrange(1, 90), rng.choice([HERE, HERE, THERE, None])) for i in range(60)
    ]
    for each in rng.sample(found, 20):
        each.first_token_s = 1.0
    new = record(99, rng.choice("abcde"), 30, None)
    for asked in (new, *found):
        if asked.link is not THERE and asked.first_token_s is None:
            assert QueuedTokens().before(HERE, asked, found, len(found), 0.0) == one_by_one(found, asked)


def test_a_question_costs_as_much_with_ten_thousand_in_flight() -> None:
    found = {i: record(i, f"t{i % 5000}", 5) for i in range(10_000)}
    queued = QueuedTokens()
    asked = record(-1, "new", 5, None)
    for number in range(1000):
        queued.before(HERE, asked, found.values(), len(found), now_s=1e-4 * number)
    assert queued.num_visits <= 1000 * (VISITS + 1) + 2 * len(found)
    before = queued.num_visits
    queued.before(HERE, asked, found.values(), len(found), now_s=0.1 + PERIOD_S)
    assert queued.num_visits == before + len(found), "what is old is made anew"
