"""What the ingress counts: PengServe's own metrics, and vLLM's through vLLM's own loggers."""

from collections.abc import Callable, Sequence

from pengserve.cluster.ingress.request.record import RequestRecord, Resumption
from pengserve.cluster.ingress.slo.expected_lengths import LEARNED_ENDS
from pengserve.cluster.ingress.slo.slo_meters import SloMeters
from pengserve.cluster.ingress.vllm_openai_seam import (
    IterationStats,
    PrometheusStatLogger,
    SchedulerStats,
    StatLoggerManager,
    VllmConfig,
    ray_stat_logger,
)
from pengserve.cluster.metrics import catalog
from pengserve.cluster.metrics.cluster_values import ClusterValues
from pengserve.cluster.metrics.facade import Counter, Metrics
from pengserve.cluster.metrics.switch_values import SwitchValues
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.engine.link import InstanceLink, StepBatch


class IngressMeters:
    """Bound once, so that a token batch costs no look-up by name."""

    def __init__(self, metrics: Metrics, vllm_config: VllmConfig, num_instances: int) -> None:
        """Args:
        metrics: the facade; its backend decides where vLLM's metrics go as well.
        vllm_config: for vLLM's labels and buckets.
        num_instances: slots; slot i is vLLM's label `engine="i"`.
        """
        self.metrics = metrics
        self.cluster = ClusterValues(metrics)
        self.switches = SwitchValues(metrics)
        stat_logger = ray_stat_logger() if metrics.backend_name == "ray" else PrometheusStatLogger
        self.vllm = StatLoggerManager(
            vllm_config=vllm_config,
            engine_idxs=list(range(num_instances)),
            custom_stat_loggers=[stat_logger],
            enable_default_loggers=False,
        )
        self._vllm_config = vllm_config
        self._num_instances = num_instances
        self._has_engine_info = False
        self._outcomes = {o: metrics.counter(catalog.REQUESTS, outcome=o) for o in ("ok", "aborted", "failed")}
        self._resume_seconds = metrics.histogram(catalog.RESUME_SECONDS)
        self._resumed = {why: metrics.counter(catalog.RESUMED, reason=why) for why in ("lost", "drained")}
        self._resumed_tokens = metrics.counter(catalog.RESUMED_TOKENS)
        self._moved = {kind: metrics.counter(catalog.MOVED, kind=kind) for kind in ("carried", "redirected")}
        self._switch_gaps = metrics.histogram(catalog.SWITCH_GAP_SECONDS)
        self._dispatched: dict[InstanceKey, Counter] = {}
        self._slo: dict[str, SloMeters] = {}  # by class
        # While a page is open. Seconds until first tokens; the class of an answer with an SLO, and whether it was kept.
        self.on_first_tokens: Callable[[Sequence[float]], None] | None = None
        self.on_slo: Callable[[str, bool], None] | None = None

    def link_up(self, link: InstanceLink) -> None:
        """A request channel is open."""
        self.cluster.on_link_up(link.key, link.capacity)
        if not self._has_engine_info:
            self._has_engine_info = True
            self._vllm_config.cache_config.num_gpu_blocks = link.capacity.num_blocks
            self.vllm.log_engine_initialized()

    def link_down(self, link: InstanceLink, *, lost: bool) -> None:
        """A request channel is gone; vLLM's gauges of that slot go back to nothing."""
        self.cluster.on_link_down(link.key, lost=lost)
        self._dispatched.pop(link.key, None)
        self._record(link.key, SchedulerStats(), None)

    def batch(self, link: InstanceLink, batch: StepBatch, iteration_stats: IterationStats | None) -> None:
        """A batch was handed on."""
        if not batch.outputs.outputs and batch.outputs.scheduler_stats is None:
            self.cluster.on_heartbeat(link.key, batch.stats)
            return  # it is no step
        self.cluster.on_batch(link.key, batch.stats)
        self._record(link.key, batch.outputs.scheduler_stats, iteration_stats)

    def late(self, key: InstanceKey, iteration_stats: IterationStats) -> None:
        """Outputs of an instance counted after the batches they came with."""
        self._record(key, None, iteration_stats)

    def dispatched(self, key: InstanceKey, resumed: Resumption | None) -> None:
        """A request went to an instance."""
        counter = self._dispatched.get(key)
        if counter is None:
            counter = self.metrics.counter(catalog.DISPATCHED, instance_id=str(key.instance_id))
            self._dispatched[key] = counter
        counter.inc()
        if resumed is not None:
            self._resumed[resumed.why].inc()
            if resumed.num_tokens:
                self._resumed_tokens.inc(resumed.num_tokens)

    def resumed(self, gap_s: float) -> None:
        """A lost request went on after `gap_s`."""
        self._resume_seconds.observe(gap_s)

    def moved(self, *, carried: bool) -> None:
        """A switch carried a request, or left it to be sent again."""
        self._moved["carried" if carried else "redirected"].inc()

    def switched(self, gap_s: float) -> None:
        """A moved request went on after a gap in its tokens."""
        self._switch_gaps.observe(gap_s)

    def ended(self, outcome: str) -> None:
        """A request ended: `ok`, `aborted` or `failed`."""
        self._outcomes[outcome].inc()

    def kept(self, record: RequestRecord, finish: str) -> None:
        """A request with an SLO ended."""
        kept, service_class = record.kept, record.options.contract.service_class
        if kept is None or not kept.is_counted:
            return
        meters = self._slo.get(service_class)
        if meters is None:
            meters = self._slo[service_class] = SloMeters(self.metrics, service_class)
        outcome = kept.outcome()
        meters.ended(outcome)
        if self.on_slo is not None:
            self.on_slo(service_class, outcome.is_kept)
        if record.expected is not None and finish in LEARNED_ENDS:
            meters.length(record.expected, len(record.output_token_ids))

    def rejected(self, reason: str) -> None:
        """A request was refused."""
        self.metrics.counter(catalog.REJECTED, reason=reason).inc()

    def _record(
        self, key: InstanceKey, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        if self.on_first_tokens is not None and iteration_stats is not None:
            self.on_first_tokens(iteration_stats.time_to_first_tokens_iter)
        if key.instance_id < self._num_instances:
            self.vllm.record(scheduler_stats, iteration_stats, engine_idx=key.instance_id)
