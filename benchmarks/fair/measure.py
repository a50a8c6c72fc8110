"""Plain vLLM by arrival and by priority, and PengServe by shares, under one flood: each alone, one after the other.

Each system has one instance on one core and a batch of few places, so that requests wait. The load comes from a process
of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.fair import files
from benchmarks.fair.hosts.times import PATH
from benchmarks.fair.hosts.times import make as make_times
from benchmarks.fair.moved import Moved, Server, moved
from benchmarks.fair.scoring import Limits, Score, score
from benchmarks.fair.urgency import Waits, waits
from benchmarks.fair.workload import Plan as Work
from benchmarks.fair.workload import Workload, tenant_name
from benchmarks.harness import MIB, Stolen, engine_flags
from benchmarks.overhead.plan import SERVED_NAME
from benchmarks.overhead.plan import Plan as ServerPlan
from benchmarks.overhead.systems.vllm_server import VllmServers
from pengserve.cluster.ingress.config import IngressConfig
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.tenants import FairnessConfig

ROOT = Path(__file__).parents[2]
VLLM, OURS = ("vllm-fcfs", "vllm-priority"), ("pengserve", "pengserve-park")
SYSTEMS = (*VLLM, *OURS)
SWITCHING = ("pengserve-swap", "pengserve-overlap", "pengserve-runs")  # parking without some of its parts (`hosts/`)
VOCABULARY = 1000  # token ids below this are plain in the demo model


# Guests' requests are the same in both works, "calm" and "flood", and below their shares of what two places can serve.
FLOOD = Work(
    duration_s=40.0,
    sessions_per_s=0.15,
    flood=20.0,
    flood_from=0.1,
    flood_until=1.0,
    turns=2.0,
    output_tokens=80.0,
    max_tokens=900,
)
CHURN = Work(
    duration_s=14.0,
    sessions_per_s=1.6,
    flood=1.0,
    turns=2.0,
    output_tokens=80.0,
    max_tokens=900,
    pattern="random",
    update_s=0.5,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload, and who serves it."""

    name: str
    work: Work
    systems: tuple[str, ...] = SYSTEMS
    engine: Mapping[str, Any] = field(default_factory=dict)  # what differs from the plan's
    link_bytes_per_s: float = 0.0  # between device and host, emulated
    settled_s: float = 6.0  # after a flood begins: until requests wait, and shares tell who takes more than its own

    def slowed(self, times: float) -> "Case":
        """The same load for a machine whose steps take so many times as long.

        Raises:
            ValueError: `times` is not above 0.
        """
        if not times > 0:
            raise ValueError(f"--slower must be above 0, got {times:g}")
        work = replace(
            self.work,
            duration_s=self.work.duration_s * times,
            sessions_per_s=self.work.sessions_per_s / times,
            think_s=self.work.think_s * times,
            update_s=self.work.update_s * times,
        )
        return replace(
            self, work=work, link_bytes_per_s=self.link_bytes_per_s / times, settled_s=self.settled_s * times
        )


CASES = (
    Case(name="calm", work=replace(FLOOD, flood=1.0)),
    Case(name="flood", work=FLOOD),
    Case(name="ranks", work=replace(CHURN, pattern="fixed"), systems=("vllm-priority", *OURS)),
    Case(name="churn", work=CHURN),
    Case(
        name="swaps",  # the device holds the KV of about six requests
        work=replace(CHURN, sessions_per_s=2.5),
        systems=("vllm-priority", *SWITCHING, "pengserve-park"),
        engine={"max_num_seqs": 16, "kv_cache_memory_bytes": 8 * MIB},
        link_bytes_per_s=2.5e9,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One benchmark run."""

    model: Path
    cases: tuple[Case, ...] = CASES
    systems: tuple[str, ...] = (*SYSTEMS, *SWITCHING)
    num_rounds: int = 1
    limits: Limits = field(default_factory=Limits)
    host_bytes: int = 256 * MIB
    engine: Mapping[str, Any] = field(default_factory=partial(engine_flags, max_num_seqs=2))

    def case(self, name: str) -> Case:
        """By its name."""
        return next(case for case in self.cases if case.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one system made of a workload."""

    work: str
    system: str
    busy: Score  # of guests' requests once the flood has settled; with fixed ranks, of the two most urgent levels
    everyone: Score
    urgent: Waits  # under churn: what requests waited while they were of the two most urgent levels
    guest_tokens: int = 0  # of guests' answers in the time of the flood
    moved: Moved | None = None  # with a host tier
    load: float = 0.0  # processes that wanted a core, on average over the last minute
    stolen: float = 0.0  # share of the cores' time that went to other machines


def measure(plan: Plan, on_run: Callable[[Run], None]) -> None:
    """Each system once in each round, so that what changes on the machine meets all of them."""
    with tempfile.TemporaryDirectory(prefix="pengserve-fair-") as folder:
        directory = Path(folder)
        for case in plan.cases:
            files.write(directory / case.name, case.work)
        for _ in range(plan.num_rounds):
            for system, cases in _servers(plan):
                with _serving(plan, system, cases[0], directory) as server:
                    for case in cases:
                        on_run(_run(plan, system, case.name, server, directory))


def _servers(plan: Plan) -> Iterator[tuple[str, list[Case]]]:
    """Who is started, and for which cases: all that need the same engine."""
    kinds: list[list[Case]] = []
    for case in plan.cases:
        alike = next((kind for kind in kinds if kind[0].engine == case.engine), None)
        if alike is None:
            kinds.append([case])
        else:
            alike.append(case)
    for kind in kinds:
        for system in plan.systems:
            if cases := [case for case in kind if system in case.systems]:
                yield system, cases


def _run(plan: Plan, system: str, name: str, server: Server, directory: Path) -> Run:
    path = directory / f"{system}-{name}.jsonl"
    is_ours = system.startswith("pengserve")
    command = [sys.executable, "-m", "benchmarks.fair", "play", str(directory / name), "--url", server.url]
    command += ["--model", SERVED_NAME, "--vocabulary", str(VOCABULARY), "--outcomes", str(path)]
    command += [] if is_ours else ["--no-tenants", "--no-updates"]
    command += ["--no-priorities"] if system == "vllm-fcfs" else []
    stolen, before = Stolen(), moved(server)
    subprocess.run(command, check=True, timeout=600, cwd=ROOT)
    _, found = files.read(directory / name)
    run = judged(plan, system, name, files.rows(path), found)
    after = moved(server)
    figures = after.since(before) if before is not None and after is not None else None
    return replace(run, moved=figures, load=os.getloadavg()[0], stolen=stolen.share())


def judged(plan: Plan, system: str, name: str, outcomes: list[dict[str, Any]], found: Workload) -> Run:
    """The scores of a run."""
    case = plan.case(name)
    work, prompts = case.work, [turn.input_length for turn in found.turns]
    pairs = list(zip(outcomes, prompts, strict=True))
    from_s, until_s = work.flood_from * work.duration_s + case.settled_s, work.flood_until * work.duration_s
    guests = [pair for pair in pairs if pair[0]["tenant"] != tenant_name(0)]
    busy = [pair for pair in guests if from_s <= pair[0]["sent_s"] < until_s]
    tokens = sum(from_s <= at_s < until_s for outcome, _ in guests for at_s in outcome["token_s"])
    if work.pattern == "fixed":
        busy = [pair for pair in pairs if pair[0]["priority"] < work.levels // 2]

    def of(chosen: list[tuple[dict[str, Any], int]]) -> Score:
        return score([outcome for outcome, _ in chosen], [tokens for _, tokens in chosen], plan.limits)

    urgent = waits(found, outcomes, work.levels // 2)
    return Run(work=name, system=system, busy=of(busy), everyone=of(pairs), urgent=urgent, guest_tokens=tokens)


@contextmanager
def _serving(plan: Plan, system: str, case: Case, directory: Path) -> Iterator[Server]:
    engine = {**plan.engine, **case.engine}
    if system in VLLM:
        servers = VllmServers(directory, in_engine_process=True)
        engine["scheduling_policy"] = system.removeprefix("vllm-")
        try:
            [url] = servers.start(ServerPlan(model=plan.model, num_instances=1, engine=engine))
            yield Server(url)
        finally:
            servers.stop()
        return
    times = directory / f"{system}-times" if system != "pengserve" else None
    with _pengserve(plan, system, case, engine | {"scheduling_policy": "priority"}, times) as url:
        yield Server(url, times)


@contextmanager
def _pengserve(plan: Plan, system: str, case: Case, engine: Mapping[str, Any], times: Path | None) -> Iterator[str]:
    # Imported late: a vLLM that is imported here reads its environment.
    from tests.support.ingress import FixedRoutes, serving, wait_ready
    from tests.support.processes import CHANNEL_TOKEN, InstanceProcess

    instance = InstanceConfig(
        app="bench",
        model=str(plan.model),
        engine=engine,
        channel_token=CHANNEL_TOKEN,
        host_bytes=0 if system == "pengserve" else plan.host_bytes,
        link_bytes_per_s=case.link_bytes_per_s,
    )
    module = "pengserve.replicas.host"
    if times is not None:
        make_times(times)
        module = "benchmarks.fair.hosts." + system.removeprefix("pengserve-")
    with _environment(PATH, str(times or "")):
        process = InstanceProcess(config=instance, instance_id=0, module=module)
    try:
        process.wait_ready()
        config = IngressConfig(
            instance=instance,
            num_instances=1,
            served_model_names=(SERVED_NAME,),
            metrics_backend="prometheus",
            is_tenant_trusted=True,
            fairness=FairnessConfig(is_on=True),
        )
        with serving(config, FixedRoutes([process])) as url:
            wait_ready(url)
            yield url
    finally:
        process.stop()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Of processes that begin within it."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def record(plan: Plan, runs: list[Run]) -> dict[str, Any]:
    """For a result's JSON file."""
    data = asdict(plan) | {"model": plan.model.name, "engine": dict(plan.engine)}
    return {"plan": json.loads(json.dumps(data, default=str)), "runs": [asdict(run) for run in runs]}
