"""Makes one cluster switch back and forth, idle and under load, and takes the times."""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.client import Client, Load, Request
from benchmarks.figures import complete
from benchmarks.harness import MIB, degrees, engine_flags, text
from benchmarks.ingress import settled_ingress
from benchmarks.sse import Answer
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.strategy import SwitchStrategy
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.ingress import MODEL_NAME

STRATEGIES = tuple(strategy.value for strategy in SwitchStrategy)
SETTLE_S = 0.2  # after the controller's last word: tokens that were on their way, ingresses that follow a MOVED
PROBE = "a new request that comes during the switch"
PROBE_S = 0.05  # after the switch is asked for: draining members have heard of it by then


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One benchmark run."""

    model: Path
    sizes: tuple[int, ...] = (2, 4)  # instances; each switch is to and from the widest group
    strategies: tuple[str, ...] = STRATEGIES
    repetitions: int = 10
    idle_repetitions: int = 20
    streams_per_instance: int = 8
    prompt_words: int = 20
    output_tokens: int = (
        800  # of a stream, over the number of instances: steps are the longer, the more share the cores
    )
    before_s: float = 0.5  # of undisturbed streaming before a switch
    after_s: float = 0.5  # in the new shape, before anything else happens
    seed: int = 7
    engine: Mapping[str, Any] = field(
        # All streams of four instances fit into one group.
        default_factory=partial(engine_flags, kv_cache_memory_bytes=128 * MIB, max_num_seqs=64)
    )

    def streams(self, num_instances: int, seed: str) -> list[Request]:
        """The streams of one case, all different."""
        source = random.Random(f"{self.seed}/{seed}")
        max_tokens = self.output_tokens // num_instances
        return [
            Request(prompt=text(source, self.prompt_words), max_tokens=max_tokens)
            for _ in range(self.streams_per_instance * num_instances)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """What streams that ran when a switch was asked for saw of it, in seconds. None: there was nothing to see."""

    num_streams: int
    failed: int
    gap_s: float | None  # longest wait of any stream for its next event, of those that overlap the switch
    quiet_gap_s: float | None  # the same in as long a time before the switch
    step_before_s: float | None  # median wait before the switch
    step_after_s: float | None  # ... and in the new shape
    probe_ttft_s: float | None  # of a new request that came `PROBE_S` after the switch was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One switch."""

    num_instances: int
    is_loaded: bool
    is_merge: bool
    strategy: str
    repetition: int
    wall_s: float = 0.0  # from asking until the controller has the new layout
    report: Mapping[str, Any] = field(default_factory=dict)  # data of TRANSITION_END
    streams: Streams | None = None
    errors: tuple[str, ...] = ()  # of transitions that failed on the way, and of streams

    @property
    def switch_s(self) -> float:
        """Drain, meeting and cutover together, as the leader took them."""
        return float(sum(self.report.get(name, 0.0) for name in ("drain_s", "meet_s", "cutover_s")))


def gaps(answers: Iterable[Answer], start_s: float, stop_s: float) -> list[float]:
    """Waits between two events of a stream that overlap `[start_s, stop_s]`."""
    return [
        later - earlier
        for answer in answers
        for earlier, later in pairwise(answer.event_times_s)
        if later > start_s and earlier < stop_s
    ]


def seen(answers: Sequence[Answer], probe: Answer | None, asked_s: float, done_s: float) -> Streams:
    """What the answers of one case say about a switch between these two times of `time.perf_counter`."""
    good = complete(answers)
    begun_s = max((answer.first_text_s for answer in good), default=asked_s)
    end_s = done_s + SETTLE_S
    running = [a for a in good if a.event_times_s and a.event_times_s[-1] > asked_s]
    before = gaps(running, begun_s, asked_s)
    after = [gap for answer in running for gap in _inside(answer.event_times_s, end_s)]
    return Streams(
        num_streams=len(running),
        failed=len(answers) - len(good) + (1 if probe is not None and probe.error else 0),
        gap_s=max(gaps(running, asked_s, end_s), default=None),
        quiet_gap_s=max(gaps(running, max(begun_s, asked_s - (end_s - asked_s)), asked_s), default=None),
        step_before_s=statistics.median(before) if before else None,
        step_after_s=statistics.median(after) if after else None,
        probe_ttft_s=None if probe is None or probe.error else probe.first_text_s - probe.sent_s,
    )


def _inside(times_s: Sequence[float], start_s: float) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times_s) if earlier >= start_s]


def measure(plan: Plan, on_sample: Callable[[Sample], None]) -> None:
    """Runs every case of the plan."""
    for num_instances in plan.sizes:
        with (
            elastic_cluster(plan.model, num_instances, degrees=degrees(num_instances), engine=plan.engine) as cluster,
            settled_ingress(cluster) as url,
            Client(url, MODEL_NAME) as client,
        ):
            bench = _Bench(plan, cluster, client, num_instances)
            bench.warm_up()
            for sample in bench.all():
                on_sample(sample)


def num_samples(plan: Plan) -> int:
    """How many switches `measure` reports."""
    return 2 * len(plan.sizes) * len(plan.strategies) * (plan.repetitions + plan.idle_repetitions)


class _Bench:
    """All cases of one cluster."""

    def __init__(self, plan: Plan, cluster: ElasticCluster, client: Client, num_instances: int) -> None:
        self._plan, self._cluster, self._client, self._num_instances = plan, cluster, client, num_instances

    def warm_up(self) -> None:
        """Every shape serves once, so that nothing is built within what is measured."""
        for layout in ("dp", "tp", "dp"):
            self._cluster.set_layout(layout)
            streams = self._plan.streams(self._num_instances, f"warm/{layout}")
            self._client.send([Request(prompt=s.prompt, max_tokens=32) for s in streams]).result()

    def all(self) -> Iterator[Sample]:
        """Strategies take turns, so that drifts of the machine meet all of them."""
        for is_loaded, repetitions in ((False, self._plan.idle_repetitions), (True, self._plan.repetitions)):
            for repetition in range(repetitions):
                for strategy in self._plan.strategies:
                    for is_merge in (True, False):
                        yield self._one(is_loaded, is_merge, strategy, repetition)

    def _one(self, is_loaded: bool, is_merge: bool, strategy: str, repetition: int) -> Sample:
        self._cluster.set_layout("dp" if is_merge else "tp")
        case = {"is_loaded": is_loaded, "is_merge": is_merge, "strategy": strategy, "repetition": repetition}
        load: Load | None = None
        if is_loaded:
            load = self._client.send(self._plan.streams(self._num_instances, str(sorted(case.items()))))
            load.wait_begun()
            time.sleep(self._plan.before_s)
        self._cluster.wait_formable()
        known = len(self._cluster.events())
        asked_s, clock_s = time.perf_counter(), time.time() - time.perf_counter()
        probe = self._client.send([Request(prompt=PROBE, max_tokens=8, at_s=PROBE_S)]) if is_loaded else None
        self._cluster.set_layout("tp" if is_merge else "dp", strategy)
        events = self._cluster.events()[known:]
        ends = [event for event in events if event.kind is EventKind.TRANSITION_END]
        done_s = (ends[-1].time_s if ends else time.time()) - clock_s
        streams = None
        errors = [f"{e.data.get('what')}: {e.why}" for e in events if e.kind is EventKind.TRANSITION_ERROR]
        if load is not None and probe is not None:
            answers, probed = self._finish(load, probe)
            streams = seen(answers, probed, asked_s, done_s)
            errors += sorted({answer.error for answer in [*answers, probed] if answer.error})
        return Sample(
            num_instances=self._num_instances,
            wall_s=done_s - asked_s,
            report=_report(ends),
            streams=streams,
            errors=tuple(errors) if ends else (*errors, "no switch was reported"),
            **case,  # type: ignore[arg-type]
        )

    def _finish(self, load: Load, probe: Load) -> tuple[list[Answer], Answer]:
        """Lets the streams end; those that a merge has paused go on in dp after a while."""
        time.sleep(self._plan.after_s)
        if any(instance.stats.num_paused for instance in self._cluster.snapshot().instances):
            self._cluster.set_layout("dp")
        return load.result(), probe.result()[0]


def _report(ends: Sequence[Event]) -> dict[str, Any]:
    return dict(ends[-1].data) if ends else {}


def as_data(sample: Sample) -> dict[str, Any]:
    """A sample as JSON."""
    return asdict(sample)
