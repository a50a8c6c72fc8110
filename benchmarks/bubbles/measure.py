"""Serves the same mixed-length load on two pipelines in turn, one for each way to form microbatches."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.client import Client, Load, Request
from benchmarks.figures import complete, percentile, tpots_s, ttfts_s
from benchmarks.harness import MIB, engine_flags, text
from benchmarks.ingress import settled_ingress
from benchmarks.sse import Answer
from pengserve.planners.types.config import DropConfig, MicrobatchPolicy
from pengserve.planners.types.snapshot import InstanceStats
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.ingress import MODEL_NAME

WAYS = (MicrobatchPolicy.TOKENS, MicrobatchPolicy.LOOKAHEAD)
PROBE_WORDS = (8, 200)
LOOK_S = 0.1  # as often as the cluster's controller asks its instances
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One benchmark run."""

    model: Path
    num_instances: int = 2  # all of them are one pipeline
    rounds: int = 3
    num_requests: int = 120
    least_tokens: int = 16  # of a prompt beside the chat template; lengths are spread evenly over their logarithm
    most_tokens: int = 900
    output_tokens: tuple[int, int] = (8, 64)
    memory_bytes: int = 448 * MIB  # of an instance, for weights and KV
    seed: int = 7
    engine: Mapping[str, Any] = field(default_factory=partial(engine_flags, max_model_len=1152))

    def requests(self, round_index: int, words: "Words") -> list[Request]:
        """The load of one round, the same for both ways: all at once, many more than may run at a time."""
        source = random.Random(f"{self.seed}/{round_index}")
        growth = self.most_tokens / self.least_tokens
        return [
            Request(
                prompt=text(source, words.of(self.least_tokens * growth ** source.random())),
                max_tokens=source.randint(*self.output_tokens),
            )
            for _ in range(self.num_requests)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How many tokens words are, with this model's tokenizer and chat template."""

    template_tokens: float
    tokens_per_word: float

    def of(self, num_tokens: float) -> int:
        """Words of a prompt of about so many tokens beside the template."""
        return max(1, round(num_tokens / self.tokens_per_word))


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What all stages have counted at one time. `waiting`: prompts that have not begun."""

    time_s: float
    waiting: int
    busy_s: tuple[float, ...]  # by stage, the first one first
    idle_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """How long stages stood idle between two looks."""

    share: float  # of the time of all stages
    stages: tuple[float, ...]  # of each stage's own time
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load, served in one way."""

    way: str
    round_index: int
    queued: Bubble  # while prompts wait
    whole: Bubble
    num_microbatches: int
    failed: int
    first_error: str
    prompt_tokens: int  # of all requests
    output_tokens: int
    makespan_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens."""
        return (self.prompt_tokens + self.output_tokens) / self.makespan_s


def measure(plan: Plan, on_run: Callable[[Run], None]) -> None:
    """Runs all rounds. Both pipelines are up all the time, and one of them serves; the other way begins each round."""
    with ExitStack() as stack:
        benches = [stack.enter_context(_bench(plan, way)) for way in WAYS]
        words = benches[0].probe()
        for round_index in range(plan.rounds):
            requests = plan.requests(round_index, words)
            for bench in benches if round_index % 2 == 0 else benches[::-1]:
                on_run(bench.run(round_index, requests))


class _Bench:
    """One pipeline with its client."""

    def __init__(self, plan: Plan, way: MicrobatchPolicy, cluster: ElasticCluster, client: Client) -> None:
        self._plan, self._way, self._cluster, self._client = plan, way, cluster, client

    def probe(self) -> Words:
        """Asks how many tokens prompts of so many words are."""
        source = random.Random(f"{self._plan.seed}/probe")
        probes = [Request(prompt=text(source, num), max_tokens=2) for num in PROBE_WORDS]
        few, many = (answer.prompt_tokens for answer in complete(self._client.send(probes).result()))
        per_word = (many - few) / (PROBE_WORDS[1] - PROBE_WORDS[0])
        return Words(template_tokens=few - per_word * PROBE_WORDS[0], tokens_per_word=per_word)

    def warm_up(self) -> None:
        """Every kind of step once, and an online fit that has seen this machine's stages."""
        words = self.probe()
        requests = replace(self._plan, num_requests=max(8, self._plan.num_requests // 4)).requests(-1, words)
        self._client.send(requests).result()

    def run(self, round_index: int, requests: Sequence[Request]) -> Run:
        """Serves the load."""
        time.sleep(SETTLE_S)
        looks, first = [self._look()], self._leader_stats()
        start_s = time.perf_counter()
        load = self._client.send(requests)
        looks += self._looks(load)
        answers = load.result()
        time.sleep(SETTLE_S)
        looks.append(self._look())
        return make_run(
            self._way, round_index, looks, answers, start_s, num_microbatches=self._leader_stats().step - first.step
        )

    def _looks(self, load: Load) -> Iterator[Look]:
        while not load.answers.done():
            time.sleep(LOOK_S)
            yield self._look()

    def _leader_stats(self) -> InstanceStats:
        return self._cluster.snapshot().instances[0].stats

    def _look(self) -> Look:
        stats = [instance.stats for instance in self._cluster.snapshot().instances]
        stages = [*stats[1:], stats[0]]  # the leader has the last one
        return Look(
            time_s=time.perf_counter(),
            waiting=stats[0].num_waiting,
            busy_s=tuple(stage.total_stage_busy_s for stage in stages),
            idle_s=tuple(stage.total_stage_idle_s for stage in stages),
        )


@contextmanager
def _bench(plan: Plan, way: MicrobatchPolicy) -> Iterator[_Bench]:
    """A pipeline of all instances, warm."""
    with (
        elastic_cluster(
            plan.model,
            plan.num_instances,
            degrees=(),
            engine=plan.engine,
            drop=DropConfig(is_auto=False),
            max_stages=plan.num_instances,
            microbatches=way,
            memory_bytes=plan.memory_bytes,
        ) as cluster,
        settled_ingress(cluster) as url,
        Client(url, MODEL_NAME) as client,
    ):
        cluster.set_layout(f"pp{plan.num_instances}")
        bench = _Bench(plan, way, cluster, client)
        bench.warm_up()
        yield bench


def make_run(
    way: str, round_index: int, looks: Sequence[Look], answers: Sequence[Answer], start_s: float, num_microbatches: int
) -> Run:
    """Figures of a run from what was seen of it."""
    good = complete(answers)
    return Run(
        way=str(way),
        round_index=round_index,
        queued=bubble(while_queued(looks)),
        whole=bubble(looks),
        num_microbatches=num_microbatches,
        failed=len(answers) - len(good),
        first_error=next((answer.error for answer in answers if answer.error), ""),
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        output_tokens=sum(answer.output_tokens for answer in good),
        makespan_s=max((answer.event_times_s[-1] for answer in good), default=start_s) - start_s,
        ttft_p50_s=percentile(ttfts_s(good), 50),
        ttft_p99_s=percentile(ttfts_s(good), 99),
        tpot_p50_s=percentile(tpots_s(good), 50),
    )


def while_queued(looks: Sequence[Look]) -> Sequence[Look]:
    """From the first look at which prompts wait to the last one."""
    queued = [index for index, look in enumerate(looks) if look.waiting]
    return looks[queued[0] : queued[-1] + 1] if queued else ()


def bubble(looks: Sequence[Look]) -> Bubble:
    """Between the first look and the last one."""
    if len(looks) < 2:
        return Bubble(share=0.0, stages=(), seconds=0.0)
    first, last = looks[0], looks[-1]
    busy_s = [after - before for before, after in zip(first.busy_s, last.busy_s, strict=True)]
    idle_s = [after - before for before, after in zip(first.idle_s, last.idle_s, strict=True)]
    stages = tuple(idle / (idle + busy) if busy else 0.0 for idle, busy in zip(idle_s, busy_s, strict=True))
    return Bubble(
        share=sum(idle_s) / max(sum(idle_s) + sum(busy_s), 1e-9), stages=stages, seconds=last.time_s - first.time_s
    )
