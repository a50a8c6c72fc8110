"""Requests with an SLO take along how long their answer will be, learned from the answers that ended."""

from typing import Any

from pengserve.cluster.ingress.request.request_options import NO_OPTIONS, RequestOptions
from pengserve.planners.lengths import MIN_ANSWERS
from pengserve.planners.types.contract import NO_CONTRACT, Contract, Slo
from tests.support.moving import Cluster, FakeLink

ASKING = RequestOptions(contract=Contract(slo=Slo(tbt_s=1.0)))
LENGTH = 30


def taught(num_answers: int) -> tuple[Cluster, FakeLink]:
    """A cluster in which so many answers of `LENGTH` tokens have ended."""
    cluster = Cluster(1)
    link = cluster.connect(cluster.instances[0])
    for number in range(num_answers):
        cluster.request(2 * number, LENGTH)
    cluster.settle(LENGTH + 5)
    link.contracts.clear()
    return cluster, link


def sent(cluster: Cluster, link: FakeLink, options: RequestOptions, **more: Any) -> Contract:
    cluster.request(1001, LENGTH, options, **more)
    return link.contracts[-1]


def test_what_was_learned_goes_along() -> None:
    contract = sent(*taught(MIN_ANSWERS), ASKING, max_tokens=1000)
    assert 24 <= contract.low_tokens <= contract.median_tokens <= LENGTH
    assert contract.slo == ASKING.contract.slo


def test_a_request_gets_no_more_than_it_may_have() -> None:
    contract = sent(*taught(MIN_ANSWERS), ASKING, max_tokens=10)
    assert (contract.low_tokens, contract.median_tokens) == (10, 10)


def test_nothing_known_promises_one_token() -> None:
    contract = sent(*taught(0), ASKING)
    assert (contract.low_tokens, contract.median_tokens) == (1, 1)


def test_how_long_it_has_waited_goes_along() -> None:
    cluster = Cluster(1)
    cluster.request(1, LENGTH, ASKING)
    cluster.passed_s += 3.0
    link = cluster.connect(cluster.instances[0])
    assert 3.0 <= link.contracts[-1].waited_s < 4.0


def test_without_an_slo_nothing_goes_along() -> None:
    assert sent(*taught(MIN_ANSWERS), NO_OPTIONS) is NO_CONTRACT


def test_what_was_broken_off_teaches_nothing() -> None:
    cluster = Cluster(1)
    link = cluster.connect(cluster.instances[0])
    for number in range(MIN_ANSWERS):
        cluster.request(2 * number, LENGTH)
    cluster.settle(5)
    for number in range(MIN_ANSWERS):
        cluster.abort(2 * number)
    assert sent(cluster, link, ASKING).median_tokens == 1


def test_a_copy_that_is_sent_again_is_predicted_anew() -> None:
    cluster, link = taught(MIN_ANSWERS)
    cluster.request(1001, 2 * LENGTH, ASKING, max_tokens=1000)
    cluster.settle(LENGTH + 2)  # it has more tokens by now than any before it
    cluster.instances[0].cut(0, refuses=True)
    cluster.deliver(link)
    again = cluster.connect(cluster.instances[0])
    assert again.contracts[-1].low_tokens > LENGTH
