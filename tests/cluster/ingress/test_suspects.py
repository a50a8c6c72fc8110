"""Requests under which instances die: the one that kills is given up, and nobody that only kept it company."""

import time
from collections import Counter, deque
from dataclasses import replace

import pytest

from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.errors import describe, respond
from pengserve.cluster.ingress.in_flight.quarantine import (
    MAX_KILLERS_PER_KEY,
    QUARANTINE_S,
    KeyClosedError,
    PoisonousRequestError,
    Quarantine,
)
from pengserve.cluster.ingress.request.request_options import RequestOptions
from pengserve.replicas.engine.wire import Trial
from pengserve.replicas.trial_gate import PROVEN_STEPS
from tests.support.moving import Cluster, Copy, FakeInstance, FakeLink, a_request

LIMITS = LimitConfig(verdict_wait_s=0.0)
SUSPECT_AFTER = 2  # lives that all die in: each request that was there is a suspect then


def live(
    cluster: Cluster, instance: FakeInstance, killers: set[int], *, num_steps: int, tokens_before_death: int = 0
) -> bool:
    """A life of an instance: it dies after `num_steps`, or of a killer once that had a number of tokens there.

    Returns whether it died of a killer.
    """
    link = cluster.connect(instance)
    num_here: Counter[int] = Counter()  # steps by request
    is_killed = False
    for _ in range(num_steps):
        while link.to_instance:
            link.read()
        while link.to_ingress:  # what an instance says before a step is on its way when that kills it
            cluster.deliver(link)
        numbers = {copy.number for copy in instance.copies.values()}
        is_killed = any(num_here[number] >= tokens_before_death for number in killers & numbers)
        if is_killed:
            break
        num_here.update(numbers)
        instance.step()
        while link.to_ingress:
            cluster.deliver(link)
        cluster.book.tend()
    instance.cut(0, refuses=True)
    cluster.deliver(link)
    return is_killed


@pytest.mark.parametrize("killer", [0, 7, 15])
def test_only_the_killer_is_given_up_however_many_it_keeps_company(killer: int) -> None:
    cluster = Cluster(1, limits=LIMITS)
    for number in range(16):
        cluster.request(number, 20)
    num_lives = 0
    while not cluster.failed and num_lives < 40:
        live(cluster, cluster.instances[0], {killer}, num_steps=100)
        num_lives += 1
    assert list(cluster.failed) == [f"r{killer}"]
    assert num_lives <= LIMITS.max_losses_in_place + 2
    cluster.connect(cluster.instances[0])
    cluster.settle()
    assert cluster.ended == set(range(16)) - {killer}


def test_many_suspects_are_cleared_in_few_steps() -> None:
    cluster = Cluster(1, limits=LIMITS)
    for number in range(200):
        cluster.request(number, 2)
    for _ in range(SUSPECT_AFTER):
        live(cluster, cluster.instances[0], set(), num_steps=0)
    live(cluster, cluster.instances[0], set(), num_steps=20)
    assert len(cluster.ended) >= 144, "sixteen at once: two tokens each, the first of which clears them"
    assert not cluster.failed


def test_one_killer_among_many_is_given_up_as_soon_as_among_few() -> None:
    cluster = Cluster(1, limits=LIMITS)
    for number in range(200):
        cluster.request(number, 2)
    num_lives = 0
    while not cluster.failed and num_lives < 40:
        live(cluster, cluster.instances[0], {0}, num_steps=400)
        num_lives += 1
    assert list(cluster.failed) == ["r0"]
    assert num_lives <= LIMITS.max_losses_in_place + 2
    cluster.connect(cluster.instances[0])
    cluster.settle()
    assert cluster.ended == set(range(1, 200))


def test_two_killers_are_given_up_and_what_comes_meanwhile_is_not() -> None:
    cluster = Cluster(2, limits=LIMITS)
    for number in range(8):
        cluster.request(number, 20)
    for life in range(40):
        live(cluster, cluster.instances[life % 2], {2, 5}, num_steps=100)
        if life < 8:
            cluster.request(8 + life, 20)
    assert set(cluster.failed) == {"r2", "r5"}
    assert cluster.ended == set(range(16)) - {2, 5}


def test_instances_that_die_of_something_else_cost_no_request() -> None:
    """Lives of one step, of which all requests but one stay without a token: each gets its turn."""
    cluster = Cluster(1, limits=LIMITS)
    for number in range(16):
        cluster.request(number, 3)

    for _ in range(16 * 3 + SUSPECT_AFTER):
        instance = cluster.instances[0]
        link = cluster.connect(instance)
        while link.to_instance:
            link.read()
        for wire_id in list(instance.copies)[:-1]:  # the last one that came is computed first
            del instance.copies[wire_id]
        instance.step()
        while link.to_ingress:
            cluster.deliver(link)
        instance.cut(0, refuses=True)
        cluster.deliver(link)
    assert not cluster.failed
    assert cluster.ended == set(range(16))


@pytest.mark.parametrize("num_neighbours", [0, 1, 15])
@pytest.mark.parametrize(("tokens_before_death", "most_lives"), [(0, 3), (1, 4), (7, 4)])
def test_a_killer_ends_few_lives_and_no_neighbour(
    num_neighbours: int, tokens_before_death: int, most_lives: int
) -> None:
    """Neighbours run for long already when it comes. The first death is shared, two more are its own."""
    cluster = Cluster(2, limits=LIMITS)
    for number in range(1, num_neighbours + 1):
        cluster.request(number, 200)
    live(cluster, cluster.instances[0], set(), num_steps=50)
    cluster.request(0, 200)
    lives = [
        live(cluster, cluster.instances[life % 2], {0}, num_steps=100, tokens_before_death=tokens_before_death)
        for life in range(8)
    ]
    assert list(cluster.failed) == ["r0"]
    assert sum(lives) <= (most_lives if num_neighbours else 2)
    cluster.connect(cluster.instances[0])
    cluster.settle(400)
    assert cluster.ended == set(range(1, num_neighbours + 1))


def test_five_killers_of_one_burst_are_found_though_they_blame_each_other() -> None:
    cluster = Cluster(1, limits=LIMITS)
    killers = {1, 4, 9, 12, 15}
    for number in range(16):
        cluster.request(number, 20)
    lives = [live(cluster, cluster.instances[0], killers, num_steps=400) for _ in range(21)]
    assert {int(name[1:]) for name in cluster.failed} == killers
    assert sum(lives) <= 1 + 4 * len(killers)
    cluster.connect(cluster.instances[0])
    cluster.settle()
    assert cluster.ended == set(range(16)) - killers


def test_requests_that_ran_well_go_on_at_once_after_a_death() -> None:
    cluster = Cluster(2, limits=LIMITS)
    for number in range(16):
        cluster.request(number, 40)
    first, second = cluster.connect(cluster.instances[0]), cluster.instances[1]
    while first.to_instance:
        first.read()
    for _ in range(10):
        cluster.instances[0].step()
        cluster.deliver(first)
    link = cluster.connect(second)
    cluster.instances[0].cut(0, refuses=True)
    cluster.deliver(first)
    assert len(link.to_instance) == 16, "no trial one after the other: one death says nothing of them"


def test_new_requests_keep_away_from_a_trial_while_another_instance_is_there() -> None:
    cluster = Cluster(3, limits=LIMITS)
    cluster.request(0, 20)
    live(cluster, cluster.instances[0], {0}, num_steps=1)
    trial, other = cluster.connect(cluster.instances[1]), cluster.connect(cluster.instances[2])
    assert len(trial.to_instance) == 1
    for number in range(1, 5):
        cluster.request(number, 20)
    assert (len(trial.to_instance), len(other.to_instance)) == (1, 4)


def suspect_beside_a_new_request(*, is_only_ingress: bool) -> tuple[Cluster, FakeLink]:
    """Request 0 is a suspect of one death, and goes to an instance where one of another ingress has begun."""
    cluster = Cluster(2, limits=LIMITS, is_only_ingress=is_only_ingress)
    cluster.request(0, 20)
    live(cluster, cluster.instances[0], set(), num_steps=0)
    instance = cluster.instances[1]
    instance.gate.take(Copy(2, 0, "r2"))  # of another ingress
    cluster.lengths[2] = 200
    return cluster, cluster.connect(instance)


def deaths_alone(cluster: Cluster, number: int) -> int:
    suspicion = cluster.book._records[f"r{number}"].suspicion
    return suspicion.num_alone if suspicion is not None else 0


def test_a_suspect_at_the_gate_pays_for_no_request_of_another_ingress() -> None:
    cluster, link = suspect_beside_a_new_request(is_only_ingress=False)
    link.read()
    assert list(cluster.instances[1].copies) == ["r2"], "it waits until the other one is proven"
    cluster.instances[1].cut(0, refuses=True)
    cluster.deliver(link)
    assert deaths_alone(cluster, 0) == 0


def test_in_its_trial_a_suspect_is_the_only_possible_cause_also_beside_others() -> None:
    cluster, link = suspect_beside_a_new_request(is_only_ingress=False)
    link.read()
    for _ in range(PROVEN_STEPS):
        cluster.instances[1].step()
    cluster.request(4, 20)  # is held
    link.read()
    assert set(cluster.instances[1].copies) == {"r2", "r0~2"}
    link.to_ingress = deque(event for event in link.to_ingress if isinstance(event, Trial))
    cluster.deliver(link)
    cluster.instances[1].cut(0, refuses=True)
    cluster.deliver(link)
    assert deaths_alone(cluster, 0) == 1 and deaths_alone(cluster, 4) == 0
    assert not cluster.book._records["r4"].is_suspect, "it was never computed"


@pytest.mark.parametrize("is_only_ingress", [True, False])
def test_beside_other_ingresses_a_death_without_a_trial_proves_nothing(is_only_ingress: bool) -> None:
    cluster = Cluster(1, limits=LIMITS, is_only_ingress=is_only_ingress)
    cluster.request(0, 20)
    live(cluster, cluster.instances[0], {0}, num_steps=1)
    assert deaths_alone(cluster, 0) == is_only_ingress


def test_a_node_that_dies_with_all_its_instances_condemns_no_request() -> None:
    """A lone new request goes from one instance of the dying node to the next: later deaths clear it."""
    cluster = Cluster(8, limits=replace(LIMITS, verdict_wait_s=0.05))
    links = [cluster.connect(instance) for instance in cluster.instances[:7]]
    cluster.request(0, 20)
    for link, instance in zip(links, cluster.instances[:7], strict=True):
        instance.cut(0, refuses=True)
        cluster.deliver(link)
        cluster.book.tend()
    time.sleep(0.1)
    cluster.connect(cluster.instances[7])
    cluster.settle()
    assert not cluster.failed and cluster.ended == {0}


def test_a_killer_that_comes_again_is_refused_at_once_and_clients_do_not_retry() -> None:
    cluster = Cluster(1, limits=LIMITS)
    cluster.request(0, 20)
    for _ in range(3):
        live(cluster, cluster.instances[0], {0}, num_steps=5)
    error = cluster.failed["r0"]
    assert describe(error)[0] == 400
    assert respond(error).headers["x-should-retry"] == "false"
    with pytest.raises(PoisonousRequestError):
        cluster.book.check(a_request(0, 20))
    cluster.book.check(a_request(0, 20, max_tokens=7))  # other parameters: another request


def test_a_key_that_sends_killers_is_closed_for_an_hour_and_no_other_key() -> None:
    now_s = 0.0
    quarantine = Quarantine(clock=lambda: now_s)
    for number in range(MAX_KILLERS_PER_KEY):
        quarantine.check(a_request(100, 20), "a")
        quarantine.add(a_request(number, 20, max_tokens=number + 1), "a")
    with pytest.raises(KeyClosedError) as caught:
        quarantine.check(a_request(100, 20), "a")
    assert respond(caught.value).status_code == 403
    assert respond(caught.value).headers["x-should-retry"] == "false"
    quarantine.check(a_request(100, 20), "b")
    quarantine.check(a_request(100, 20), "")
    now_s = QUARANTINE_S + 1
    quarantine.check(a_request(100, 20), "a")
    quarantine.check(a_request(1, 20, max_tokens=2), "a")


def test_each_of_n_sequences_has_the_digest_of_its_request() -> None:
    quarantine = Quarantine()
    child = a_request(0, 20)
    assert child.sampling_params is not None
    child.sampling_params.seed = 1234
    quarantine.add(child, RequestOptions().key_id)
    parent = a_request(0, 20)
    assert parent.sampling_params is not None
    parent.sampling_params.n, parent.sampling_params.seed = 4, 1200
    with pytest.raises(PoisonousRequestError):
        quarantine.check(parent, "")
