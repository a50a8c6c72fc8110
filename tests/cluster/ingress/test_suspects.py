"""Requests under which instances die: the one that kills is given up, and nobody that only kept it company."""

import pytest

from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.record import SUSPECT_AFTER
from tests.support.moving import Cluster, FakeInstance

LIMITS = LimitConfig()


def live(cluster: Cluster, instance: FakeInstance, killers: set[int], *, num_steps: int) -> None:
    """A life of an instance: it dies of its first step with a killer, or after `num_steps`."""
    link = cluster.connect(instance)
    for _ in range(num_steps):
        while link.to_instance:
            link.read()
        if killers & {copy.number for copy in instance.copies.values()}:
            break
        instance.step()
        while link.to_ingress:
            cluster.deliver(link)
        cluster.book.tend()
    instance.cut(0, refuses=True)
    cluster.deliver(link)


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
        cluster.deliver(link)
        instance.cut(0, refuses=True)
        cluster.deliver(link)
    assert not cluster.failed
    assert cluster.ended == set(range(16))
