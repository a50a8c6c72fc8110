"""Runs the loads on one cluster whose layout is pinned to dp, pinned to the widest tp, or left to the planner."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from benchmarks.client import Client, Request, tokens_of
from benchmarks.figures import complete, mean, percentile, tpots_s, ttfts_s
from benchmarks.fly.load import Phase, Plan
from benchmarks.harness import degrees
from benchmarks.ingress import settled_ingress
from benchmarks.sse import Answer
from pengserve.planners.types.config import ControllerConfig, MergeConfig
from pengserve.planners.types.events import EventKind
from tests.support.elastic import ElasticCluster
from tests.support.ingress import MODEL_NAME

SYSTEMS = ("dp", "tp", "auto")
"""Static dp, static tp, and PengServe's own choice."""

POLL_S = 0.1
WARM_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Latencies of one class of requests, in seconds."""

    completed: int
    ttft_mean_s: float  # from sending a request to its first text
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_mean_s: float  # (last event - first) / (output tokens - 1), per request
    tpot_p50_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load, in one round, on one system."""

    system: str
    round_index: int
    load: str  # "bursty" or "mix"
    classes: dict[str, Latency]  # bursty: "low", "burst", "after"; mix: "urgent", "rest", "all"
    peak_tokens_per_s: float
    num_switches: int  # while the load ran
    failed_switches: int
    failed: int  # requests
    first_error: str = ""


def latency(answers: Sequence[Answer]) -> Latency:
    """Of the answers that are complete."""
    ttft_s, tpot_s = ttfts_s(answers), tpots_s(answers)
    return Latency(
        completed=len(complete(answers)),
        ttft_mean_s=mean(ttft_s),
        ttft_p50_s=percentile(ttft_s, 50),
        ttft_p90_s=percentile(ttft_s, 90),
        tpot_mean_s=mean(tpot_s),
        tpot_p50_s=percentile(tpot_s, 50),
    )


def peak_tokens_per_s(answers: Sequence[Answer], window_s: float) -> float:
    """Most output tokens that arrived within any window of this length, per second."""
    events = sorted(event for answer in complete(answers) for event in tokens_of(answer))
    most = inside = 0.0
    first = 0
    for time_s, count in events:
        inside += count
        while events[first][0] <= time_s - window_s:
            inside -= events[first][1]
            first += 1
        most = max(most, inside)
    return most / window_s


def classes_of(phases: Sequence[Phase], requests: Sequence[Request], answers: Sequence[Answer]) -> dict[str, Latency]:
    """Latencies by class."""
    found: dict[str, list[Answer]] = {}
    for phase, request, answer in zip(phases, requests, answers, strict=True):
        if phase is Phase.MIX:
            found.setdefault("urgent" if request.priority < 0 else "rest", []).append(answer)
            found.setdefault("all", []).append(answer)
        else:
            found.setdefault(phase.value, []).append(answer)
    return {name: latency(group) for name, group in found.items()}


class Bench:
    """One cluster and one client."""

    def __init__(self, plan: Plan, cluster: ElasticCluster, client: Client, num_instances: int) -> None:
        self._plan, self._cluster, self._client, self._num_instances = plan, cluster, client, num_instances

    def calibrate(self) -> float:
        """Requests per second that static dp completes when it is saturated. Warms every shape up first."""
        for layout in ("tp", "dp"):
            self._cluster.set_layout(layout)
            warm = [replace(r, max_tokens=WARM_TOKENS) for r in self._plan.calibration(8 * self._num_instances)]
            self._client.send(warm).result()
        slots = self._num_instances * int(self._plan.engine["max_num_seqs"])
        small = self._complete_per_s(2 * slots, slots)
        # As many as fill the wanted time at the rate just seen: the ramps at both ends then count little.
        return self._complete_per_s(max(2 * slots, int(small * self._plan.calibrate_s)), slots)

    def _complete_per_s(self, num_requests: int, clients: int) -> float:
        answers = self._client.send(self._plan.calibration(num_requests), clients=clients).result()
        good = complete(answers)
        if not good:
            raise RuntimeError(f"no request of the calibration was answered: {answers[0].error}")
        took_s = max(a.event_times_s[-1] for a in good) - min(a.sent_s for a in good)
        return len(good) / took_s

    def run(self, load: str, requests_per_s: float, system: str, round_index: int) -> Run:
        """One load on one system, in the layout that suits it when nothing happens."""
        self._settle(system)
        make = self._plan.bursty if load == "bursty" else self._plan.mix
        pairs = make(requests_per_s, system, round_index)
        phases, requests = [phase for phase, _ in pairs], [request for _, request in pairs]
        known = len(self._cluster.events())
        answers = self._client.send(requests).result()
        events = self._cluster.events()[known:]
        bad = [answer for answer in answers if answer.error]
        return Run(
            system=system,
            round_index=round_index,
            load=load,
            classes=classes_of(phases, requests, answers),
            peak_tokens_per_s=peak_tokens_per_s(answers, self._plan.window_s),
            num_switches=sum(event.kind is EventKind.TRANSITION_END for event in events),
            failed_switches=sum(event.kind is EventKind.TRANSITION_ERROR for event in events),
            failed=len(bad),
            first_error=bad[0].error if bad else "",
        )

    def _settle(self, system: str) -> None:
        if system != "auto":
            self._cluster.set_layout(system)
            return
        self._cluster.now(lambda: self._cluster.controller.auto_layout())
        deadline_s = time.monotonic() + self._plan.settle_s
        while time.monotonic() < deadline_s:
            if len(self._cluster.snapshot().layout.groups) == 1:
                return  # idle for long enough: the widest group
            time.sleep(POLL_S)


@contextmanager
def bench(plan: Plan, num_instances: int) -> Iterator[Bench]:
    """A started cluster with an ingress and a client; the controller ticks as it does in a deployment."""
    merge = MergeConfig(is_auto=True)
    cluster = ElasticCluster(plan.model, num_instances, degrees=degrees(num_instances), engine=plan.engine, merge=merge)
    cluster.config = replace(cluster.config, tick_s=ControllerConfig(app="", num_instances=0).tick_s)
    try:
        cluster.start()
        with settled_ingress(cluster) as url, Client(url, MODEL_NAME) as client:
            yield Bench(plan, cluster, client, num_instances)
    finally:
        cluster.stop()


def measure(
    plan: Plan, systems: Sequence[str], loads: Sequence[str], on_run: Callable[[Run], None]
) -> dict[str, float]:
    """Runs all loads; requests per second of saturated static dp, by load."""
    capacity: dict[str, float] = {}
    for load in loads:
        with bench(plan, plan.num_instances if load == "bursty" else plan.num_mix_instances) as here:
            capacity[load] = here.calibrate()
            for round_index in range(plan.rounds):
                # Another one begins each round, so that drifts of the machine meet all of them.
                for index in range(len(systems)):
                    on_run(here.run(load, capacity[load], systems[(index + round_index) % len(systems)], round_index))
    return capacity
