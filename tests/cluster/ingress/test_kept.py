"""What was kept of an SLO: by hand-made times, and as the book tells it."""

import re
from typing import Any

import pytest

from pengserve.cluster.ingress.request.kept import KeptAnswer, KeptSequence, Outcome
from pengserve.cluster.ingress.request.request_options import NO_OPTIONS
from pengserve.cluster.ingress.slo.slo_meters import SloMeters
from pengserve.cluster.metrics.facade import Metrics
from pengserve.planners.lengths import LengthRange
from pengserve.planners.types.contract import Slo
from pengserve.replicas.engine.wire import Paused
from tests.support.moving import Cluster, a_request

COUNTERS = r"pengserve_(slo_\w+|length_predictions)_total{"
SLO = Slo(ttft_s=1.0, tbt_s=0.1)


def sequence(times_s: list[float], slo: Slo = SLO, *, is_paced: bool = False, finish: str = "stop") -> KeptSequence:
    kept = KeptSequence(slo, 0.0, is_paced=is_paced)
    for time_s in times_s:
        kept.add(1, time_s)
    kept.finish = finish
    return kept


def test_each_latency_is_measured_and_compared() -> None:
    found = sequence([0.5, 0.6, 0.65, 0.9]).outcome()
    assert found.ttft_s == 0.5 and found.num_gaps == 3 and found.num_late_gaps == 1
    assert found.tbt_p99_s == pytest.approx(0.25) and found.tpot_s == pytest.approx(0.4 / 3)
    assert (found.is_ttft_kept, found.is_tbt_kept, found.is_tpot_kept, found.is_kept) == (True, False, False, False)


def test_the_99th_percentile_forgives_one_gap_in_a_hundred() -> None:
    times = [0.5 + 0.05 * i for i in range(200)]
    late = [*times[:100], *(time_s + 1.0 for time_s in times[100:])]
    assert sequence(late).outcome().is_tbt_kept and sequence(late).outcome().num_late_gaps == 1
    assert not sequence(late[95:105]).outcome().is_tbt_kept


def test_a_deposit_hides_what_no_client_sees() -> None:
    times = [0.01 * i for i in range(20)] + [1.5]
    assert not sequence(times).outcome().is_tbt_kept
    paced = sequence(times, is_paced=True).outcome()
    assert paced.is_kept and paced.num_late_gaps == 0 and paced.tbt_p99_s == pytest.approx(0.1)


def test_an_slo_speaks_of_what_it_names() -> None:
    found = sequence([2.0, 3.0], Slo(ttft_s=1.0)).outcome()
    assert (found.is_ttft_kept, found.is_tbt_kept, found.is_tpot_kept) == (False, None, None)
    found = sequence([2.0, 3.0], Slo(tbt_s=1.0)).outcome()
    assert (found.is_ttft_kept, found.is_tbt_kept, found.is_kept) == (None, True, True)


@pytest.mark.parametrize("times", [[], [0.1, 0.2]])
def test_what_failed_was_not_kept(times: list[float]) -> None:
    found = sequence(times, finish="error").outcome()
    assert not found.is_kept and found.is_ttft_kept is False and found.is_tbt_kept is False


def test_an_answer_is_as_good_as_the_worst_of_its_sequences() -> None:
    answer = KeptAnswer(SLO, 10.0)
    assert not answer.is_over
    first, second = answer.begin(), answer.begin()
    for each, times in ((first, (10.2, 10.25)), (second, (10.4, 10.7))):
        for time_s in times:
            each.add(1, time_s)
    first.finish = "stop"
    assert not answer.is_over
    second.finish, second.paused_s = "length", 0.05
    assert answer.is_over
    assert answer.usage() == {"ttft_ms": 400.0, "tbt_p99_ms": 300.0, "paused_ms": 50.0, "slo_met": False}


def test_the_book_tells_each_token_once_through_a_death() -> None:
    cluster = Cluster(2)
    link = cluster.connect(cluster.instances[0])
    kept = KeptSequence(SLO, 0.0, is_paced=False)
    cluster.lengths[1], cluster.seen[1] = 6, []
    cluster.book.add(a_request(1, 6), NO_OPTIONS, kept)
    link.read()
    for _ in range(3):
        cluster.instances[0].step()
        cluster.deliver(link)
    cluster.connect(cluster.instances[1])
    cluster.instances[0].cut(0, refuses=True)
    cluster.settle(20)
    assert cluster.seen[1] and kept.outcome().num_gaps == 5


def test_pauses_are_added_up_by_the_name_of_the_copy() -> None:
    cluster = Cluster(1)
    cluster.connect(cluster.instances[0])
    kept = KeptSequence(SLO, 0.0, is_paced=False)
    cluster.lengths[1], cluster.seen[1] = 6, []
    cluster.book.add(a_request(1, 6), NO_OPTIONS, kept)
    link: Any = next(iter(cluster.open_links.values()))
    for seconds, swapped_bytes in ((0.25, 0), (0.5, 4096)):
        cluster.book.note_pause(link, Paused("r1", seconds, swapped_bytes))
    cluster.book.note_pause(link, Paused("another", 9.0, 9))
    assert kept.paused_s == 0.75
    (record,) = cluster.book.records()
    assert (record.num_parks, record.swapped_bytes) == (2, 4096)


def test_attainment_is_counted_by_class() -> None:
    metrics = Metrics("prometheus", app="tests")
    meters = SloMeters(metrics, "chat")
    late = Outcome(
        ttft_s=0.5, tbt_p99_s=0.2, tpot_s=0.05, num_gaps=10, num_late_gaps=3,
        is_ttft_kept=True, is_tbt_kept=False, is_tpot_kept=True,
    )  # fmt: skip
    meters.ended(late)
    meters.length(LengthRange(low=5, median=20), 10)
    body, _ = metrics.exposition()
    lines = [
        line for line in body.decode().splitlines() if re.match(r"pengserve_(slo_\w+|length_predictions)_total{", line)
    ]
    counted = {frozenset(line.split('"')[1::2]) - {"tests"}: float(line.rpartition(" ")[2]) for line in lines}
    assert {labels: value for labels, value in counted.items() if value} == {
        frozenset({"chat", "ttft", "kept"}): 1,
        frozenset({"chat", "tpot", "kept"}): 1,
        frozenset({"chat", "tbt", "missed"}): 1,
        frozenset({"chat", "kept"}): 7,
        frozenset({"chat", "missed"}): 3,
        frozenset({"chat", "low", "reached"}): 1,
        frozenset({"chat", "median", "below"}): 1,
    }
