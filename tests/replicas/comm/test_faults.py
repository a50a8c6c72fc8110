"""Laws under faults, with real processes: a killed or frozen member is an error for the others, never a hang."""

import itertools
import signal
import time
from collections.abc import Iterator

import pytest

from tests.replicas.comm.member import spec_of
from tests.replicas.comm.members import Cluster

pytestmark = pytest.mark.slow  # each process imports torch

TIMEOUT_S = 3.0
_rounds = itertools.count()


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    made = Cluster(4, TIMEOUT_S)
    yield made
    made.stop()


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """Four living members; who died in a test is replaced after it."""
    yield shared
    for slot, member in enumerate(shared.members):
        if member.process.poll() is not None:
            shared.replace(slot)


@pytest.fixture(scope="module")
def gloo() -> Iterator[Cluster]:
    made = Cluster(2, TIMEOUT_S, "gloo")
    yield made
    made.stop()


def build(cluster: Cluster, *slots: int) -> str:
    """Builds one new group; its name."""
    lives, round_ = cluster.lives(*slots), next(_rounds)
    name = spec_of(lives, round_).name
    answers = cluster.all("build", [[lives, round_]], among=slots)
    assert all(answer["result"]["ready"] == [name] for answer in answers), answers
    return name


def assert_computes_the_same(cluster: Cluster, *slots: int) -> None:
    digests = {answer.get("result") for answer in cluster.all("collectives", build(cluster, *slots), among=slots)}
    assert len(digests) == 1 and None not in digests


@pytest.mark.parametrize("slots", [(0, 1), (2, 3), (0, 1, 2, 3)])
def test_members_compute_the_same(cluster: Cluster, slots: tuple[int, ...]) -> None:
    assert_computes_the_same(cluster, *slots)


@pytest.mark.parametrize("victim", [0, *(pytest.param(v, marks=pytest.mark.faults) for v in (2, 3))])
def test_a_killed_member_surfaces_before_the_time_out_and_its_replacement_works(cluster: Cluster, victim: int) -> None:
    slots = (0, 1, 2, 3)
    name = build(cluster, *slots)
    survivors = [slot for slot in slots if slot != victim]
    for slot in slots:
        cluster.members[slot].ask("reduce", name, 1_000_000)
    time.sleep(0.5)
    cluster.members[victim].process.kill()
    start_s = time.monotonic()
    answers = [cluster.members[slot].answer() for slot in survivors]
    assert time.monotonic() - start_s < 0.9 * TIMEOUT_S
    assert all("EngineError" in answer["error"] and name in answer["error"] for answer in answers), answers

    dead = "{}.{}".format(*cluster.members[victim].life)
    deadline_s = time.monotonic() + 20.0  # told by another thread than that of the calls
    while not all(dead in answer["result"] for answer in cluster.all("losses", among=survivors)):
        assert time.monotonic() < deadline_s
    cluster.replace(victim)
    assert_computes_the_same(cluster, *slots)


def test_a_frozen_member_is_given_up_after_the_time_out(cluster: Cluster) -> None:
    name = build(cluster, 0, 1)
    cluster.members[1].process.send_signal(signal.SIGSTOP)
    cluster.members[0].ask("reduce", name)
    answer = cluster.members[0].answer()
    cluster.members[1].process.kill()
    cluster.members[1].process.wait(10)
    assert "EngineError" in answer["error"]
    assert TIMEOUT_S * 0.9 < answer["took_s"] < TIMEOUT_S + 8.0


def test_an_abort_ends_a_call_that_waits(cluster: Cluster) -> None:
    name = build(cluster, 0, 1)
    cluster.all("abort_soon", name, among=(0,))
    answer = cluster.all("reduce", name, among=(0,))[0]
    assert "EngineError" in answer["error"] and answer["took_s"] < 0.9 * TIMEOUT_S
    assert_computes_the_same(cluster, 0, 1)


def test_a_member_killed_while_a_group_is_built_fails_it_at_once(cluster: Cluster) -> None:
    lives, round_ = cluster.lives(0, 1), next(_rounds)
    cluster.members[0].ask("build", [[lives, round_]])
    time.sleep(0.3)
    cluster.members[1].process.kill()
    answer = cluster.members[0].answer()
    cluster.members[1].process.wait(10)
    assert answer["result"]["failed"] == [spec_of(lives, round_).name] and answer["took_s"] < 0.9 * TIMEOUT_S


def test_gloo_is_right_too_over_the_peer_store(gloo: Cluster) -> None:
    assert_computes_the_same(gloo, 0, 1)


def test_gloo_gives_up_a_killed_member_within_the_time_out_and_works_with_its_replacement(gloo: Cluster) -> None:
    name = build(gloo, 0, 1)
    gloo.all("reduce", name)
    gloo.members[0].ask("reduce", name, 1_000_000)
    gloo.members[1].process.kill()
    answer = gloo.members[0].answer()
    assert "EngineError" in answer["error"] and answer["took_s"] < TIMEOUT_S + 8.0
    gloo.replace(1)
    assert_computes_the_same(gloo, 0, 1)
