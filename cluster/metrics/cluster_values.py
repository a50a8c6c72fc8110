"""Keeps the metrics of instances and of the cluster in step with what the ingress hears of them."""

from collections import Counter
from importlib.metadata import version

from pengserve.cluster.memory_parts import leader_of, memory_parts
from pengserve.cluster.metrics import catalog
from pengserve.cluster.metrics.catalog import MetricSpec
from pengserve.cluster.metrics.facade import Histogram, Metrics
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.snapshot import (
    ClusterSnapshot,
    InstanceSnapshot,
    InstanceState,
    InstanceStats,
    KvCapacity,
    RoutingTable,
)
from pengserve.planners.types.units import blocks_for

_TOTALS: tuple[tuple[MetricSpec, str], ...] = (
    (catalog.INSTANCE_PROMPT_TOKENS, "total_prompt_tokens"),
    (catalog.INSTANCE_GENERATED_TOKENS, "total_generated_tokens"),
    (catalog.INSTANCE_PREEMPTIONS, "total_preemptions"),
    (catalog.INSTANCE_RESUMED, "total_resumed"),
    (catalog.PREFIX_QUERIES, "total_prefix_queries"),
    (catalog.PREFIX_HITS, "total_prefix_hits"),
    (catalog.PREFIX_PREDICTED, "total_prefix_predicted"),
    (catalog.STAGE_BUSY_SECONDS, "total_stage_busy_s"),
    (catalog.STAGE_IDLE_SECONDS, "total_stage_idle_s"),
    (catalog.PARKS, "total_parked"),
    (catalog.DISPLACED, "total_displaced"),
    (catalog.HOST_HITS, "total_host_hits"),
    (catalog.COPY_WAIT_SECONDS, "total_copy_wait_s"),
)
_BY_LABEL: tuple[tuple[MetricSpec, dict[str, str], str], ...] = (  # metric, labels, field
    (catalog.TIER_BYTES, {"direction": "to_device", "reason": "stage"}, "total_staged_bytes"),
    (catalog.TIER_BYTES, {"direction": "to_device", "reason": "bring"}, "total_brought_bytes"),
    (catalog.TIER_BYTES, {"direction": "to_host", "reason": "evict"}, "total_evicted_bytes"),
    (catalog.TIER_BYTES, {"direction": "to_host", "reason": "behind"}, "total_behind_bytes"),
    (catalog.TIER_BYTES, {"direction": "none", "reason": "reuse"}, "total_reused_bytes"),
    (catalog.DEPARTURES, {"rule": "band"}, "total_departures_by_band"),
    (catalog.DEPARTURES, {"rule": "length"}, "total_departures_by_length"),
    (catalog.DEPARTURES, {"rule": "lateness"}, "total_departures_by_lateness"),
    (catalog.DEPARTURES, {"rule": "memory"}, "total_departures_by_memory"),
    (catalog.DEPARTURES, {"rule": "first_step"}, "total_short_first_steps"),
)
_COUNTERS = (*((spec, dict[str, str](), field) for spec, field in _TOTALS), *_BY_LABEL)
_TIER_GAUGES: tuple[tuple[MetricSpec, str], ...] = (
    (catalog.DEVICE_BLOCKS, "device_blocks"),
    (catalog.DEVICE_BLOCKS_USED, "device_blocks_used"),
    (catalog.HOST_BLOCKS, "host_blocks"),
    (catalog.HOST_BLOCKS_USED, "host_blocks_used"),
    (catalog.REQUESTS_PARKED, "num_parked"),
)


class ClusterValues:
    """Newest stats, snapshot and routing table, turned into metrics when they are read.

    Only `on_batch` is on the hot path: one dict store and one histogram observation. Totals of an instance only grow
    within one incarnation; the counters add the differences, so a replacement's totals go on top of the dead one's.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._stats: dict[InstanceKey, InstanceStats] = {}
        self._capacity: dict[InstanceKey, KvCapacity] = {}
        self._counted: dict[InstanceKey, InstanceStats] = {}
        self._step_seconds: dict[int, Histogram] = {}
        self._shapes = {"dp"}
        metrics.gauge(catalog.BUILD_INFO, version=version("pengserve")).set(1)
        metrics.on_refresh(self.publish)

    def on_batch(self, key: InstanceKey, stats: InstanceStats) -> None:
        """A token batch arrived from an instance with these stats."""
        self.on_heartbeat(key, stats)
        histogram = self._step_seconds.get(key.instance_id)
        if histogram is None:
            histogram = self._metrics.histogram(catalog.INSTANCE_STEP_SECONDS, instance_id=str(key.instance_id))
            self._step_seconds[key.instance_id] = histogram
        histogram.observe(stats.last_step_s)

    def on_heartbeat(self, key: InstanceKey, stats: InstanceStats) -> None:
        """These are an instance's stats now, with no step to tell of: it is idle, or works for other ingresses."""
        self._stats[key] = stats

    def on_link_up(self, key: InstanceKey, capacity: KvCapacity) -> None:
        """A request channel to an instance was opened."""
        self._capacity[key] = capacity
        self._metrics.gauge(catalog.INSTANCE_UP, instance_id=str(key.instance_id)).set(1)
        self._metrics.gauge(catalog.INSTANCE_INCARNATION, instance_id=str(key.instance_id)).set(key.incarnation)
        self._metrics.gauge(catalog.LINKS_UP).set(len(self._capacity))

    def on_link_down(self, key: InstanceKey, *, lost: bool) -> None:
        """A request channel is gone: `lost` if unasked, else closed by us."""
        self.publish()  # what the instance did until its end is still to be counted
        self._capacity.pop(key, None)
        self._stats.pop(key, None)
        self._counted.pop(key, None)
        self._metrics.gauge(catalog.LINKS_UP).set(len(self._capacity))
        slot = str(key.instance_id)
        if lost:
            self._metrics.counter(catalog.LINK_LOST, instance_id=slot).inc()
        if not any(other.instance_id == key.instance_id for other in self._capacity):
            for spec in (
                catalog.INSTANCE_UP,
                catalog.INSTANCE_RUNNING,
                catalog.INSTANCE_WAITING,
                catalog.INSTANCE_PAUSED,
            ):
                self._metrics.gauge(spec, instance_id=slot).set(0)
            for spec in (catalog.KV_BLOCKS_USED, catalog.VIRTUAL_KV_LOAD):
                self._metrics.gauge(spec, instance_id=slot).set(0)

    def on_routing(self, table: RoutingTable) -> None:
        """A routing table is in use."""
        self._metrics.gauge(catalog.CONTROLLER_TERM).set(table.version.term)
        self._metrics.gauge(catalog.ROUTING_VERSION).set(table.version.counter)
        self._metrics.gauge(catalog.LAYOUT_EPOCH).set(table.epoch)
        self._metrics.gauge(catalog.ROUTES).set(len(table.routes))

    def on_controller(self, *, up: bool) -> None:
        """Notes whether the controller answered."""
        self._metrics.gauge(catalog.CONTROLLER_UP).set(up)

    def on_snapshot(self, snapshot: ClusterSnapshot) -> None:
        """The controller's view of all instances, dead and starting ones too."""
        for state in InstanceState:
            num = sum(instance.state is state for instance in snapshot.instances)
            self._metrics.gauge(catalog.INSTANCES, state=state.value).set(num)
        group_of = {member: group for group in snapshot.layout.groups for member in group.members}
        for instance in snapshot.instances:
            group = group_of.get(instance.instance_id)
            self._publish_snapshot(instance, leader_of(snapshot.instances, instance, group))
        self._publish_layout(snapshot)

    def publish(self) -> None:
        """Sets all gauges and counters from the newest stats."""
        for key, stats in self._stats.items():
            self._publish_stats(key, stats)

    def _publish_stats(self, key: InstanceKey, stats: InstanceStats) -> None:
        slot, metrics = str(key.instance_id), self._metrics
        metrics.gauge(catalog.INSTANCE_RUNNING, instance_id=slot).set(stats.num_running)
        metrics.gauge(catalog.INSTANCE_WAITING, instance_id=slot).set(stats.num_waiting)
        metrics.gauge(catalog.KV_BLOCKS_USED, instance_id=slot).set(stats.kv_blocks_used)
        metrics.gauge(catalog.INSTANCE_PAUSED, instance_id=slot).set(stats.num_paused)
        capacity = self._capacity.get(key)
        if capacity is not None:
            # Counts of blocks are of the shape that runs; one from before it is known is of the instance's own.
            block_size, num_blocks = (
                stats.block_size or capacity.block_size,
                stats.kv_blocks_total or capacity.num_blocks,
            )
            metrics.gauge(catalog.KV_BLOCKS, instance_id=slot).set(num_blocks)
            load = (stats.kv_blocks_used + blocks_for(stats.queued_tokens, block_size)) / max(num_blocks, 1)
            metrics.gauge(catalog.VIRTUAL_KV_LOAD, instance_id=slot).set(load)
        for spec, field in _TIER_GAUGES:
            metrics.gauge(spec, instance_id=slot).set(getattr(stats, field))
        before = self._counted.get(key, InstanceStats())
        for spec, labels, field in _COUNTERS:
            grown = getattr(stats, field) - getattr(before, field)
            if grown > 0:
                metrics.counter(spec, instance_id=slot, **labels).inc(grown)
        self._counted[key] = stats

    def _publish_layout(self, snapshot: ClusterSnapshot) -> None:
        groups = Counter(group.shape for group in snapshot.layout.groups)
        self._shapes.update(groups)  # a shape that is gone goes to zero
        for shape in self._shapes:
            self._metrics.gauge(catalog.GROUPS, shape=shape).set(groups[shape])
        for group in snapshot.layout.groups:
            for member in group.members:
                self._metrics.gauge(catalog.GROUP_SIZE, instance_id=str(member)).set(group.degree)
        self._metrics.gauge(catalog.LAYOUT_AUTO).set(snapshot.policy.is_auto)

    def _publish_snapshot(self, instance: InstanceSnapshot, leader: InstanceSnapshot) -> None:
        slot = str(instance.instance_id)
        ready = instance.state is InstanceState.READY
        self._metrics.gauge(catalog.INSTANCE_UP, instance_id=slot).set(ready)
        self._metrics.gauge(catalog.INSTANCE_INCARNATION, instance_id=slot).set(instance.key.incarnation)
        self._metrics.gauge(catalog.RSS_BYTES, instance_id=slot).set(instance.rss_bytes)
        if instance.capacity is not None:
            weight_bytes, kv_bytes, _ = memory_parts(instance, leader)  # a stage of a pipeline holds a share of each
            self._metrics.gauge(catalog.WEIGHT_BYTES, instance_id=slot).set(weight_bytes)
            self._metrics.gauge(catalog.KV_BYTES, instance_id=slot).set(kv_bytes)
