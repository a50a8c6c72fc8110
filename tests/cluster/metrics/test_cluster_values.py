"""Laws of the mirrored values: counters never fall over an instance's lives, gauges follow the newest stats."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pengserve.cluster.metrics.catalog import CATALOG
from pengserve.cluster.metrics.cluster_values import ClusterValues
from pengserve.cluster.metrics.facade import Metrics
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey, Version
from pengserve.planners.types.layout import Layout, parse_groups
from pengserve.planners.types.snapshot import (
    ClusterSnapshot,
    InstanceSnapshot,
    InstanceState,
    InstanceStats,
    KvCapacity,
    LaneInfo,
    LayoutPolicy,
    Route,
    RoutingTable,
)
from pengserve.replicas.engine.scheduling.departures import Departures
from tests.support.simulated import SimulatedCluster

CAPACITY = KvCapacity(
    num_blocks=10, block_size=32, bytes_per_block=4096, max_model_len=512, max_num_seqs=8, weight_bytes=1 << 20
)


def key(slot: int, incarnation: int = 1) -> InstanceKey:
    """Key of one life of a slot."""
    return InstanceKey(instance_id=InstanceId(slot), incarnation=incarnation)


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Value of one scraped sample, None where there is none."""
    for family in text_string_to_metric_families(metrics.exposition()[0].decode()):
        for one in family.samples:
            if one.name == name and labels.items() <= one.labels.items():
                return one.value
    return None


def test_stats_of_a_batch_become_gauges_and_step_times(metrics: Metrics) -> None:
    values = ClusterValues(metrics)
    values.on_link_up(key(0), CAPACITY)
    values.on_batch(key(0), InstanceStats(num_running=3, kv_blocks_used=4, queued_tokens=65, last_step_s=0.02))
    assert sample(metrics, "pengserve_instance_requests_running", instance_id="0") == 3
    assert sample(metrics, "pengserve_virtual_kv_load", instance_id="0") == (4 + 3) / 10
    assert sample(metrics, "pengserve_instance_step_seconds_count", instance_id="0") == 1


def test_memory_is_that_of_the_shape_that_runs(metrics: Metrics) -> None:
    """A stage of a pipeline of two holds half of the parameters, and half of the KV of the pipeline's blocks."""
    wide = replace(CAPACITY, num_blocks=30)
    stats = InstanceStats(shape="pp2", kv_blocks_used=4)
    piped = [
        InstanceSnapshot(
            key=key(i),
            state=InstanceState.READY,
            capacity=CAPACITY,
            lanes=(LaneInfo(shape="dp", capacity=CAPACITY), LaneInfo(shape="pp2", capacity=wide)),
            stats=replace(stats, is_follower=i == 0),
        )
        for i in range(2)
    ]
    alone = InstanceSnapshot(key=key(2), state=InstanceState.READY, capacity=CAPACITY)
    layout = Layout(epoch=Epoch(1), groups=parse_groups("pp2@(1,0) dp@(2)"))
    ClusterValues(metrics).on_snapshot(
        ClusterSnapshot(app="shop", time_s=1.0, layout=layout, instances=(*piped, alone))
    )
    for slot, weights, kv in (("0", 1 << 19, 15 * 4096), ("1", 1 << 19, 15 * 4096), ("2", 1 << 20, 10 * 4096)):
        assert sample(metrics, "pengserve_instance_weight_bytes", instance_id=slot) == weights
        assert sample(metrics, "pengserve_instance_kv_bytes", instance_id=slot) == kv


def test_a_heartbeat_tells_the_load_and_is_no_step(metrics: Metrics) -> None:
    values = ClusterValues(metrics)
    values.on_link_up(key(0), CAPACITY)
    values.on_batch(key(0), InstanceStats(num_running=3))
    values.on_heartbeat(key(0), InstanceStats(num_running=0))
    assert sample(metrics, "pengserve_instance_requests_running", instance_id="0") == 0
    assert sample(metrics, "pengserve_instance_step_seconds_count", instance_id="0") == 1


@given(
    lives=st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), min_size=1, max_size=4), scrape=st.booleans()
)
def test_a_counter_is_the_sum_over_all_lives_of_a_slot(lives: list[list[int]], scrape: bool) -> None:
    metrics = Metrics("prometheus", app="shop")
    values = ClusterValues(metrics)
    for incarnation, growth in enumerate(lives, start=1):
        values.on_link_up(key(0, incarnation), CAPACITY)
        total = 0
        for grown in growth:
            total += grown
            values.on_batch(key(0, incarnation), InstanceStats(total_generated_tokens=total))
            if scrape:
                metrics.exposition()
        values.on_link_down(key(0, incarnation), lost=True)
    counted = sample(metrics, "pengserve_instance_generated_tokens_total", instance_id="0") or 0
    assert counted == sum(map(sum, lives))
    assert sample(metrics, "pengserve_link_lost_total", instance_id="0") == len(lives)


def test_departures_from_the_order_of_arrival_are_told_by_rule(metrics: Metrics) -> None:
    values = ClusterValues(metrics)
    values.on_link_up(key(0), CAPACITY)
    for lateness in (3, 5):
        departures = Departures(by_band=1, by_length=2, by_lateness=lateness, by_memory=6, first_steps=4)
        values.on_batch(key(0), InstanceStats(**departures.named()))
        values.publish()
    for rule, expected in (("band", 1), ("length", 2), ("lateness", 5), ("memory", 6), ("first_step", 4)):
        assert sample(metrics, "pengserve_instance_departures_total", instance_id="0", rule=rule) == expected


def test_the_bubble_share_can_be_told_from_the_counters_of_a_stage(metrics: Metrics) -> None:
    values = ClusterValues(metrics)
    values.on_link_up(key(1), CAPACITY)
    values.on_batch(key(1), InstanceStats(shape="pp2", total_stage_busy_s=1.5, total_stage_idle_s=0.5))
    name = "pengserve_instance_stage_{}_seconds_total"
    found = [sample(metrics, name.format(what), instance_id="1") for what in ("idle", "busy")]
    assert found == [0.5, 1.5]


@pytest.mark.parametrize("lost", [True, False])
def test_an_instance_that_is_gone_is_down_and_empty(metrics: Metrics, lost: bool) -> None:
    values = ClusterValues(metrics)
    values.on_link_up(key(0), CAPACITY)
    values.on_batch(key(0), InstanceStats(num_running=3, num_waiting=2, kv_blocks_used=4))
    values.on_link_down(key(0), lost=lost)
    for name in ("up", "requests_running", "queue_length", "kv_blocks_used"):
        assert sample(metrics, f"pengserve_instance_{name}", instance_id="0") == 0
    assert (sample(metrics, "pengserve_link_lost_total", instance_id="0") or 0) == lost


def test_a_replacement_connected_before_the_old_link_ended_stays_up(metrics: Metrics) -> None:
    values = ClusterValues(metrics)
    values.on_link_up(key(0, 1), CAPACITY)
    values.on_link_up(key(0, 2), CAPACITY)
    values.on_link_down(key(0, 1), lost=True)
    assert sample(metrics, "pengserve_instance_up", instance_id="0") == 1


def test_routing_and_snapshot_are_mirrored(metrics: Metrics) -> None:
    values = ClusterValues(metrics)
    route = Route(key=key(0), endpoint="h:1", members=(InstanceId(0),), shape="dp")
    values.on_routing(RoutingTable(version=Version(term=2, counter=4), epoch=Epoch(2), routes=(route,)))
    ready = InstanceSnapshot(key=key(0, 3), state=InstanceState.READY, capacity=CAPACITY, rss_bytes=99)
    starting = replace(ready, key=key(1), state=InstanceState.STARTING, capacity=None)
    layout = Layout.all_dp((InstanceId(0), InstanceId(1)), Epoch(2))
    values.on_snapshot(ClusterSnapshot(app="shop", time_s=0.0, layout=layout, instances=(ready, starting)))
    values.on_controller(up=True)
    assert sample(metrics, "pengserve_controller_term") == 2
    assert sample(metrics, "pengserve_routing_version") == 4
    assert sample(metrics, "pengserve_layout_epoch") == 2
    assert sample(metrics, "pengserve_instances", state="starting") == 1
    assert sample(metrics, "pengserve_instance_up", instance_id="1") == 0
    assert sample(metrics, "pengserve_instance_incarnation", instance_id="0") == 3
    assert sample(metrics, "pengserve_controller_up") == 1


def test_blocks_are_those_of_the_shape_that_runs(metrics: Metrics) -> None:
    values = ClusterValues(metrics)
    values.on_link_up(key(0), CAPACITY)
    stats = InstanceStats(
        shape="tp2", kv_blocks_used=4, queued_tokens=65, block_size=64, kv_blocks_total=20, num_paused=3
    )
    values.on_batch(key(0), stats)
    assert sample(metrics, "pengserve_virtual_kv_load", instance_id="0") == (4 + 2) / 20
    assert sample(metrics, "pengserve_instance_kv_blocks", instance_id="0") == 20
    assert sample(metrics, "pengserve_instance_requests_paused", instance_id="0") == 3


def test_the_layout_is_mirrored_and_a_shape_that_is_gone_goes_to_zero(metrics: Metrics) -> None:
    values = ClusterValues(metrics)
    merged = Layout(epoch=Epoch(3), groups=parse_groups("tp2@(0,1) dp@(2)"))
    alone = Layout.all_dp(tuple(InstanceId(i) for i in range(3)), Epoch(4))
    seen = ClusterSnapshot(app="shop", time_s=0.0, layout=merged, instances=())
    values.on_snapshot(seen)
    assert sample(metrics, "pengserve_groups", shape="tp2") == 1
    assert [sample(metrics, "pengserve_instance_group_size", instance_id=str(i)) for i in range(3)] == [2, 2, 1]
    assert sample(metrics, "pengserve_layout_is_auto") == 1
    values.on_snapshot(replace(seen, layout=alone, policy=LayoutPolicy(is_auto=False)))
    assert [sample(metrics, "pengserve_groups", shape=shape) for shape in ("dp", "tp2")] == [3, 0]
    assert [sample(metrics, "pengserve_instance_group_size", instance_id=str(i)) for i in range(3)] == [1, 1, 1]
    assert sample(metrics, "pengserve_layout_is_auto") == 0


async def test_a_thousand_instances_that_die_often_have_a_thousand_series_of_each_metric(metrics: Metrics) -> None:
    """Lives, keys of tenants and ids of requests are no labels: a slot keeps its series."""
    values, cluster = ClusterValues(metrics), SimulatedCluster(1000, groups="tp2@(0,1) pp2@(2,3)", host_blocks=50)
    for life in range(3):
        snapshot = await cluster.snapshot()
        for instance in snapshot.instances:
            one = replace(instance, key=key(instance.instance_id, life))
            values.on_link_up(one.key, CAPACITY)
            values.on_batch(one.key, replace(one.stats, total_evicted_bytes=5, total_staged_bytes=5))
            values.on_link_down(one.key, lost=True)
        values.on_snapshot(snapshot)
    series = Counter[str]()
    for family in text_string_to_metric_families(metrics.exposition()[0].decode()):
        buckets = {tuple(sorted(s.labels.items() - {("le", s.labels.get("le"))})) for s in family.samples}
        if family.name.startswith("pengserve_"):
            series[family.name] = len(buckets)
    assert series["pengserve_instance_up"] == 1000
    assert {name: count for name, count in series.items() if count > 5 * 1000} == {}
    # `tenant` is a label as well: test_tenant_meters.py shows that it is bounded.
    assert {label for spec in CATALOG.values() for label in spec.labels} & {
        "key",
        "request",
        "model",
    } == set()
