"""Has streams migrate, one alone and sixteen in the drain of an instance, and takes the times."""

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.client import Client, Load, Request
from benchmarks.figures import complete
from benchmarks.harness import MIB, Stolen, engine_flags, text
from benchmarks.ingress import settled_ingress
from benchmarks.migrate.link import bytes_per_s, shape_of
from benchmarks.sse import Answer
from benchmarks.switch.measure import SETTLE_S, gaps
from pengserve.planners.types.drains import DrainOperation
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.snapshot import InstanceSnapshot
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.ingress import MODEL_NAME

ONE, DRAIN = "one", "drain"
TOKENS_PER_WORD = 1.2
LOOK_S = 0.005  # between two looks at what the source says
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One benchmark run."""

    model: Path
    repetitions: int = 10  # of the migration of one stream
    drains: int = 5
    streams: int = 16  # of each instance when one is drained
    prompt_words: int = 400
    output_tokens: int = 200
    before_s: float = 0.5  # of undisturbed streaming
    link_bytes: int = 64 * MIB  # with which the link is measured
    seed: int = 7
    engine: Mapping[str, Any] = field(
        default_factory=partial(engine_flags, kv_cache_memory_bytes=256 * MIB, max_num_seqs=64)
    )

    def requests(self, what: str, repetition: int) -> list[Request]:
        """The streams of one case, all different; the same with a migration and undisturbed."""
        source = random.Random(f"{self.seed}/{what}/{repetition}")
        count = 2 * (1 if what == ONE else self.streams)
        return [Request(prompt=text(source, self.prompt_words), max_tokens=self.output_tokens) for _ in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One migration or drain, beside the same streams undisturbed. Times in seconds; None: there was nothing to see."""

    what: str
    repetition: int
    num_streams: int  # that were to move
    num_moved: int = 0  # with their KV
    moved_bytes: int = 0
    moving_s: float = 0.0  # from asking until nothing of it is at the source
    done_s: float = 0.0  # of a drain: until its process has ended
    need_s: float = 0.0  # for so many bytes over the link, with nothing beside
    gap_s: float | None = None  # longest wait of any stream for its next event, of those that overlap the migration
    quiet_gap_s: float | None = None  # the same of the same streams undisturbed, over as long a time
    step_s: float | None = None  # median wait of these
    steal: float = 0.0  # share of the machine's time that its host gave to others
    errors: tuple[str, ...] = ()

    @property
    def in_need(self) -> float:
        """How many times as long it took as its bytes need."""
        return self.moving_s / self.need_s if self.need_s else 0.0


def measure(plan: Plan, on_sample: Callable[[Sample], None]) -> float:
    """Runs every case of the plan; the link's rate, in bytes per second."""
    rate = bytes_per_s(shape_of(plan.model, plan.engine, plan.link_bytes))
    with (
        elastic_cluster(plan.model, 2, engine=plan.engine) as cluster,
        settled_ingress(cluster) as url,
        Client(url, MODEL_NAME) as client,
    ):
        bench = _Bench(plan, cluster, client, rate)
        bench.one(-1)  # everything has run once
        for repetition in range(plan.repetitions):
            on_sample(bench.one(repetition))
        for repetition in range(plan.drains):
            on_sample(bench.drain(repetition))
    return rate


class _Bench:
    """All cases of one cluster."""

    def __init__(self, plan: Plan, cluster: ElasticCluster, client: Client, rate: float) -> None:
        self._plan, self._cluster, self._client, self._rate = plan, cluster, client, rate
        self._source_id = InstanceId(1)
        self._last: tuple[InstanceSnapshot, float] | None = None  # what the source said before it was killed, and when
        kill = cluster.port.kill

        async def noted(key: InstanceKey) -> None:
            with contextlib.suppress(EngineError):
                self._last = await cluster.port.status(key), time.perf_counter()
            await kill(key)

        cluster.port.kill = noted  # type: ignore[method-assign]

    def one(self, repetition: int) -> Sample:
        """One of two streams goes to the instance of the other."""

        def move() -> Callable[[InstanceSnapshot], bool]:
            before, key = self._source().stats.total_migrated, self._cluster.key
            most = int(1.5 * TOKENS_PER_WORD * self._plan.prompt_words) + self._plan.output_tokens // 2  # of one stream
            source, target = key(self._source_id), key(1 - self._source_id)
            order = Migrate(order_id=f"one-{repetition}", source=source, target=target, max_tokens=most)
            self._cluster.call(self._cluster.port.order(order.source, [order]))
            return lambda answer: answer.stats.total_migrated > before

        return self._run(ONE, repetition, move)

    def drain(self, repetition: int) -> Sample:
        """All streams of one instance go to the other, and its process ends."""

        def move() -> Callable[[InstanceSnapshot], bool]:
            before = self._source().stats
            self._cluster.call(self._cluster.controller.drain_instance(self._source_id, TIMEOUT_S))
            return lambda answer: answer.stats.total_migrated - before.total_migrated >= before.num_running

        return self._run(DRAIN, repetition, move)

    def _run(self, what: str, repetition: int, move: Callable[[], Callable[[InstanceSnapshot], bool]]) -> Sample:
        requests = self._plan.requests(what, repetition)
        self._cluster.wait_formable()
        stolen = Stolen()
        load, begun_s = self._begin(requests)
        self._source_id = self._fullest()
        before = self._source()
        asked_s = time.perf_counter()
        is_moved = move()
        last, moved_s = self._follow(is_moved, asked_s)
        done_s = self._await_end(asked_s) if what == DRAIN else 0.0
        answers = load.result()
        steal = stolen.share()
        if what == DRAIN:
            self._cluster.call(self._cluster.controller.undrain(self._source_id))
            self._cluster.wait_formable()
        # Not before: the target would have their prompts in its prefix cache.
        quiet, quiet_begun_s = self._begin(requests)
        undisturbed = quiet.result()
        num_moved = last.stats.total_migrated - before.stats.total_migrated
        moved_bytes = last.stats.total_migrated_bytes - before.stats.total_migrated_bytes
        start_s, stop_s = asked_s, moved_s + SETTLE_S
        shift_s = quiet_begun_s - begun_s  # the same time of the streams' lives
        quiet_gaps = gaps(complete(undisturbed), start_s + shift_s, stop_s + shift_s)
        return Sample(
            what=what,
            repetition=repetition,
            num_streams=before.stats.num_running,
            num_moved=num_moved,
            moved_bytes=moved_bytes,
            moving_s=moved_s - asked_s,
            done_s=done_s,
            need_s=moved_bytes / self._rate,
            gap_s=max(gaps(complete(answers), start_s, stop_s), default=None),
            quiet_gap_s=max(quiet_gaps, default=None),
            step_s=statistics.median(quiet_gaps) if quiet_gaps else None,
            steal=steal,
            errors=tuple(_errors(answers, undisturbed)),
        )

    def _begin(self, requests: Sequence[Request]) -> tuple[Load, float]:
        """Sends the streams; returns when all have been streaming for a while, and when that began."""
        load = self._client.send(requests)
        load.wait_begun()
        begun_s = time.perf_counter()
        time.sleep(self._plan.before_s)
        return load, begun_s

    def _fullest(self) -> InstanceId:
        """The instance with the most streams: the ingress spreads them by what it predicts, not by their number."""
        instances = self._cluster.snapshot().instances
        return max(instances, key=lambda found: (found.stats.num_running, found.key)).instance_id

    def _source(self) -> InstanceSnapshot:
        key = self._cluster.key(self._source_id)
        answer: InstanceSnapshot = self._cluster.call(self._cluster.port.status(key))
        return answer

    def _follow(self, is_moved: Callable[[InstanceSnapshot], bool], asked_s: float) -> tuple[InstanceSnapshot, float]:
        """The last that the source said, and when. It may be killed as soon as nothing is there."""
        key = self._cluster.key(self._source_id)
        self._last = None
        answer = self._source()
        while True:
            with contextlib.suppress(EngineError):
                answer = self._cluster.call(self._cluster.port.status(key))
            now_s = time.perf_counter()
            if self._last is not None:
                return self._last
            if is_moved(answer):
                return answer, now_s
            if now_s - asked_s > TIMEOUT_S:
                raise TimeoutError(f"the streams had not moved after {TIMEOUT_S:g} s: {answer.stats}")
            time.sleep(LOOK_S)

    def _await_end(self, asked_s: float) -> float:
        operation: DrainOperation
        while True:
            operation = self._cluster.now(lambda: self._cluster.controller.drain_operation(self._source_id))
            if operation.safe_to_delete:
                return time.perf_counter() - asked_s
            if time.perf_counter() - asked_s > 2 * TIMEOUT_S:
                raise TimeoutError(f"the drain did not end: {operation}")
            time.sleep(LOOK_S)


def _errors(answers: Sequence[Answer], undisturbed: Sequence[Answer]) -> Iterable[str]:
    yield from sorted({answer.error for answer in [*answers, *undisturbed] if answer.error})
    if [a.output_tokens for a in answers] != [a.output_tokens for a in undisturbed]:
        yield "streams have other lengths than undisturbed"
