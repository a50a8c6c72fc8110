"""Laws of the counted switches: each end counts once, whoever controls, and nothing of before counts."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pengserve.cluster.metrics import switch_values
from pengserve.cluster.metrics.facade import Metrics
from pengserve.cluster.metrics.switch_values import SwitchValues
from pengserve.planners.types.events import Event, EventKind

END = {"switch": "merge", "strategy": "carry", "prepare_s": 0.004, "meet_s": 0.003, "cutover_s": 0.008, "drain_s": 0.0}


def event(seq: int, kind: EventKind = EventKind.TRANSITION_END, time_s: float | None = None, **data) -> Event:
    """An end of a switch, or what `kind` says."""
    return Event(seq=seq, time_s=float(seq) if time_s is None else time_s, kind=kind, data={**END, **data})


class Log:
    """A controller's events, and what was asked of it."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = list(events)

    async def __call__(self, after: int, limit: int) -> Sequence[Event]:
        return [e for e in self.events if e.seq > after][:limit]


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """Sum of all samples of that name with these labels."""
    families = text_string_to_metric_families(metrics.exposition()[0].decode())
    samples = (one for family in families for one in family.samples if one.name == name)
    return sum(one.value for one in samples if labels.items() <= one.labels.items())


async def test_an_end_is_counted_with_its_phases_requests_and_bytes(metrics: Metrics) -> None:
    values, log = SwitchValues(metrics), Log([])
    await values.follow(log, 1.0)
    log.events += [event(1, EventKind.TRANSITION_START), event(2, num_carried=4, num_paused=1, carried_bytes=4096)]
    log.events += [event(3, EventKind.TRANSITION_ERROR, switch="split", strategy="hard")]
    await values.follow(log, 1.0)
    done = {"kind": "merge", "strategy": "carry", "outcome": "done"}
    assert total(metrics, "pengserve_switches_total", **done) == 1
    assert total(metrics, "pengserve_switches_total", kind="split", strategy="hard", outcome="aborted") == 1
    for phase, seconds in (("prepare", 0.004), ("meet", 0.003), ("cutover", 0.008)):
        assert total(metrics, "pengserve_switch_phase_seconds_count", phase=phase) == 1
        assert total(metrics, "pengserve_switch_phase_seconds_sum", phase=phase) == pytest.approx(seconds)
    assert total(metrics, "pengserve_switch_phase_seconds_count", phase="drain") == 0
    assert total(metrics, "pengserve_switch_requests_total", outcome="carried") == 4
    assert total(metrics, "pengserve_switch_requests_total", outcome="paused") == 1
    assert total(metrics, "pengserve_switch_carried_bytes_total") == 4096


@given(
    past=st.integers(0, 9), looks=st.lists(st.integers(0, 9), max_size=5), page=st.integers(1, 4), restart=st.booleans()
)
async def test_each_end_since_the_first_look_counts_once(past: int, looks: list[int], page: int, restart: bool) -> None:
    metrics = Metrics("prometheus", app="shop")
    values, log = SwitchValues(metrics), Log([event(i + 1, time_s=float(i // 3)) for i in range(past)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switch_values, "PAGE", page)
        await values.follow(log, 1.0)
        for number in looks:
            known = len(log.events)
            log.events += [event(known + i + 1, time_s=float((known + i) // 3)) for i in range(number)]
            await values.follow(log, 1.0)
        if restart:
            # The new controller remembers nothing, and numbers from 1 again.
            log.events = [event(1, time_s=1000.0), event(2, time_s=1000.0)]
            await values.follow(log, 2.0)
    assert total(metrics, "pengserve_switches_total") == sum(looks) + 2 * restart


async def test_a_controller_with_a_log_file_counts_nothing_twice(metrics: Metrics) -> None:
    values, log = SwitchValues(metrics), Log([])
    await values.follow(log, 1.0)
    log.events = [event(1), event(2)]
    await values.follow(log, 1.0)
    log.events += [event(3)]
    await values.follow(log, 2.0)
    assert total(metrics, "pengserve_switches_total") == 3


async def test_a_look_that_failed_half_way_does_not_count_the_past(metrics: Metrics) -> None:
    values, log = SwitchValues(metrics), Log([event(i) for i in range(1, 4)])

    async def breaks(after: int, limit: int) -> Sequence[Event]:
        if after:
            raise TimeoutError
        return (await log(after, limit))[:limit]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switch_values, "PAGE", 1)
        with pytest.raises(TimeoutError):
            await values.follow(breaks, 1.0)
        await values.follow(log, 1.0)
    assert total(metrics, "pengserve_switches_total") == 0
