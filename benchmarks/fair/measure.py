"""Plain vLLM by arrival and by priority, and PengServe by shares, under one flood: each alone, one after the other.

Each system has one instance on one core and a batch of few places, so that requests wait. The load comes from a process
of its own.
"""

import json
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
from benchmarks.fair.scoring import Limits, Score, score
from benchmarks.fair.workload import Plan as Work
from benchmarks.fair.workload import tenant_name
from benchmarks.harness import MIB, engine_flags
from benchmarks.overhead.plan import SERVED_NAME
from benchmarks.overhead.plan import Plan as ServerPlan
from benchmarks.overhead.systems.vllm_server import VllmServers
from pengserve.cluster.ingress.config import IngressConfig
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.tenants import FairnessConfig

ROOT = Path(__file__).parents[2]
SYSTEMS = ("vllm-fcfs", "vllm-priority", "pengserve", "pengserve-park")
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
SETTLED_S = 6.0  # after a flood begins: until requests wait, and shares have told who takes more than its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One benchmark run."""

    model: Path
    works: tuple[tuple[str, Work], ...] = (
        ("calm", replace(FLOOD, flood=1.0)),
        ("flood", FLOOD),
        (
            "churn",
            Work(
                duration_s=14.0,
                sessions_per_s=1.6,
                flood=1.0,
                turns=2.0,
                output_tokens=80.0,
                max_tokens=900,
                pattern="random",
                update_s=0.5,
            ),
        ),
    )
    systems: tuple[str, ...] = SYSTEMS
    limits: Limits = field(default_factory=Limits)
    host_bytes: int = 256 * MIB
    engine: Mapping[str, Any] = field(default_factory=partial(engine_flags, max_num_seqs=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one system made of a workload."""

    work: str
    system: str
    busy: Score  # of guests' requests once the flood has settled; under churn, of the two most urgent levels
    everyone: Score
    guest_tokens: int = 0  # of guests' answers in that time


def measure(plan: Plan, on_run: Callable[[Run], None]) -> None:
    """Each system once."""
    with tempfile.TemporaryDirectory(prefix="pengserve-fair-") as folder:
        directory = Path(folder)
        for name, work in plan.works:
            files.write(directory / name, work)
        for system in plan.systems:
            with _serving(plan, system, directory) as url:
                for name, _ in plan.works:
                    on_run(_run(plan, system, name, url, directory))


def _run(plan: Plan, system: str, name: str, url: str, directory: Path) -> Run:
    path = directory / f"{system}-{name}.jsonl"
    is_ours = system.startswith("pengserve")
    command = [sys.executable, "-m", "benchmarks.fair", "play", str(directory / name), "--url", url]
    command += ["--model", SERVED_NAME, "--vocabulary", str(VOCABULARY), "--outcomes", str(path)]
    command += [] if is_ours else ["--no-tenants", "--no-updates"]
    command += ["--no-priorities"] if system == "vllm-fcfs" else []
    subprocess.run(command, check=True, timeout=600, cwd=ROOT)
    prompts = [row["input_length"] for row in files.rows(directory / name / files.REQUESTS)]
    return judged(plan, system, name, files.rows(path), prompts)


def judged(plan: Plan, system: str, name: str, outcomes: list[dict[str, Any]], prompts: list[int]) -> Run:
    """The scores of a run."""
    work, pairs = dict(plan.works)[name], list(zip(outcomes, prompts, strict=True))
    from_s, until_s = work.flood_from * work.duration_s + SETTLED_S, work.flood_until * work.duration_s
    guests = [pair for pair in pairs if pair[0]["tenant"] != tenant_name(0)]
    busy = [pair for pair in guests if from_s <= pair[0]["sent_s"] < until_s]
    tokens = sum(from_s <= at_s < until_s for outcome, _ in guests for at_s in outcome["token_s"])
    if work.pattern != "none":
        busy = [pair for pair in pairs if pair[0]["priority"] < work.levels // 2]

    def of(chosen: list[tuple[dict[str, Any], int]]) -> Score:
        return score([outcome for outcome, _ in chosen], [tokens for _, tokens in chosen], plan.limits)

    return Run(work=name, system=system, busy=of(busy), everyone=of(pairs), guest_tokens=tokens)


@contextmanager
def _serving(plan: Plan, system: str, directory: Path) -> Iterator[str]:
    if system.startswith("vllm"):
        policy = system.removeprefix("vllm-")
        servers = VllmServers(directory, in_engine_process=True)
        engine = {**plan.engine, "scheduling_policy": policy}
        try:
            [url] = servers.start(ServerPlan(model=plan.model, num_instances=1, engine=engine))
            yield url
        finally:
            servers.stop()
        return
    with _pengserve(plan, host_bytes=plan.host_bytes if system == "pengserve-park" else 0) as url:
        yield url


@contextmanager
def _pengserve(plan: Plan, *, host_bytes: int) -> Iterator[str]:
    # Imported late: a vLLM that is imported here reads its environment.
    from tests.support.ingress import FixedRoutes, serving, wait_ready
    from tests.support.processes import CHANNEL_TOKEN, InstanceProcess

    engine = {**plan.engine, "scheduling_policy": "priority"}
    instance = InstanceConfig(
        app="bench", model=str(plan.model), engine=engine, channel_token=CHANNEL_TOKEN, host_bytes=host_bytes
    )
    process = InstanceProcess(config=instance, instance_id=0)
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


def record(plan: Plan, runs: list[Run]) -> dict[str, Any]:
    """For a result's JSON file."""
    data = asdict(plan) | {"model": plan.model.name, "engine": dict(plan.engine)}
    return {"plan": json.loads(json.dumps(data, default=str)), "runs": [asdict(run) for run in runs]}
