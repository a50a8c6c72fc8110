"""The systems that are compared. Each is started, serves the load of one run after the other, and is stopped.

All instances have the same memory, and each keeps to a core, but for stages of vLLM's pipelines. Where vLLM serves, it
gets as KV what PengServe has beside its weights.
"""

import re
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.client import Client, Request
from benchmarks.cores import engine_of, pin
from benchmarks.ingress import settled_ingress
from benchmarks.overhead.plan import SERVED_NAME
from benchmarks.overhead.plan import Plan as ServerPlan
from benchmarks.overhead.systems.vllm_server import VllmServers
from benchmarks.overload.load import Plan
from benchmarks.overload.timeline import LayoutChange, groups_of
from benchmarks.sse import Answer
from pengserve.planners.groups import pipelines_for
from pengserve.planners.types.config import ControllerConfig, DropConfig
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from tests.support.elastic import ElasticCluster
from tests.support.ingress import MODEL_NAME

WARM_TOKENS = 16
WARM_REQUESTS = 6  # per instance
SETTLE_S = 30.0  # at most, until the layout is dp again after the last answer
POLL_S = 0.1
STAGE_WORKER = "benchmarks.overload.vllm_stage.StageWorker"
_PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total\{.*\} (\S+)$", re.MULTILINE)
_BLOCKS = re.compile(r'^vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one run gave."""

    start_s: float  # of `time.perf_counter`, when the load began
    answers: list[Answer]
    preemptions: int
    layouts: tuple[LayoutChange, ...]  # the first as of the begin; times since then
    switch_errors: tuple[str, ...] = ()  # why each that failed did


class System(Protocol):
    """Servers of some of the compared systems."""

    def __enter__(self) -> "System":
        """Starts and warms up."""

    def __exit__(self, *_: object) -> None:
        """Stops all that was started."""

    def serve(self, name: str, requests: Sequence[Request]) -> Served:
        """One run of the system `name`."""

    def tokens_of(self, group: Group) -> int:
        """Tokens of KV that a group holds."""


class PengServe:
    """One cluster: `dp` and `pp` pinned, or left to the planners (`drop`)."""

    def __init__(self, plan: Plan, num_instances: int) -> None:
        self._plan, self._num_instances = plan, num_instances
        self.cluster: ElasticCluster
        self.client: Client

    def __enter__(self) -> "PengServe":
        plan = self._plan
        cluster = ElasticCluster(
            plan.model,
            self._num_instances,
            degrees=(),
            engine=plan.engine,
            drop=DropConfig(is_auto=True, restore_below=plan.restore_below, quiet_s=0.5),
            max_stages=plan.stages,
            memory_bytes=plan.memory_bytes,
            chunk_bytes=plan.chunk_bytes,
        )
        # The controller ticks as it does in a deployment.
        cluster.config = replace(cluster.config, tick_s=ControllerConfig(app="", num_instances=0).tick_s)
        self._stack = ExitStack()
        with ExitStack() as stack:
            stack.callback(cluster.stop)
            cluster.start()
            pin(cluster.port.pid(instance.key) for instance in cluster.snapshot().instances)
            url = stack.enter_context(settled_ingress(cluster))
            self.cluster, self.client = cluster, stack.enter_context(Client(url, MODEL_NAME))
            warm = self._plan.calibration(WARM_REQUESTS * self._num_instances, "warm")
            for layout in (f"pp{plan.stages}", "dp"):
                cluster.set_layout(layout)
                self.client.send(warm).result()  # whole answers: the judge learns from them how long answers are
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def serve(self, name: str, requests: Sequence[Request]) -> Served:
        """See `System`; "dp", "pp" or "drop"."""
        cluster, plan = self.cluster, self._plan
        layout = cluster.set_layout(f"pp{plan.stages}" if name == "pp" else "dp").layout
        if name == "drop":
            cluster.now(cluster.controller.auto_layout)
        known, before = len(cluster.events()), self._preemptions()
        start_s, wall_s = time.perf_counter(), time.time()
        answers = self.client.send(requests).result(plan.answer_timeout_s)
        if name == "drop":
            self._settle()
        time.sleep(2 * cluster.config.tick_s)  # the newest stats
        events = cluster.events()[known:]
        return Served(
            start_s=start_s,
            answers=answers,
            preemptions=self._preemptions() - before,
            layouts=(LayoutChange(time_s=0.0, groups=layout.groups), *layout_changes(events, wall_s)),
            switch_errors=tuple(event.why for event in events if event.kind is EventKind.TRANSITION_ERROR),
        )

    def tokens_of(self, group: Group) -> int:
        """See `System`."""
        lanes = self.cluster.snapshot().instances[group.leader].lanes
        return next((lane.capacity.num_tokens for lane in lanes if lane.shape == group.shape and lane.capacity), 0)

    def _settle(self) -> None:
        deadline_s = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline_s:
            if all(group.kind is GroupKind.DP for group in self.cluster.snapshot().layout.groups):
                return
            time.sleep(POLL_S)

    def _preemptions(self) -> int:
        return sum(instance.stats.total_preemptions for instance in self.cluster.snapshot().instances)


class Vllm:
    """vLLM's own servers: one for each instance (`vllm-dp`), or one for each pipeline (`vllm-pp`)."""

    def __init__(self, plan: Plan, num_instances: int, *, num_stages: int, weight_bytes: int, logs: Path) -> None:
        self._plan, self._num_instances = plan, num_instances
        # Each stage has its part of the weights, and KV in the rest.
        kv_bytes = plan.memory_bytes - weight_bytes // num_stages
        engine: dict[str, Any] = {**plan.engine, "kv_cache_memory_bytes": kv_bytes}
        if num_stages > 1:
            engine |= {"pipeline_parallel_size": num_stages, "distributed_executor_backend": "mp"}
            engine |= {"worker_cls": STAGE_WORKER}
        self._server_plan = ServerPlan(
            model=plan.model,
            num_instances=num_instances // num_stages,
            start_timeout_s=plan.start_timeout_s,
            engine=engine,
        )
        self._servers = VllmServers(logs, in_engine_process=num_stages == 1)
        ranks = [InstanceId(i) for i in range(num_instances)]
        pipelines = [group for group in pipelines_for(ranks, ranks, num_stages) if group.degree == num_stages]
        self._groups = tuple(pipelines or (Group(kind=GroupKind.DP, members=(rank,)) for rank in ranks))
        self._tokens = 0
        self._urls: list[str] = []
        self._client: Client

    def __enter__(self) -> "Vllm":
        with ExitStack() as stack:
            stack.callback(self._servers.stop)
            self._urls = self._servers.start(self._server_plan)
            if self._server_plan.num_instances == self._num_instances:
                # Stages of vLLM's spin while they wait: two of them on one core would starve each other.
                pin(map(engine_of, self._servers.pids))
            self._client = stack.enter_context(Client(self._urls, SERVED_NAME))
            warm = self._plan.calibration(WARM_REQUESTS * self._num_instances, "warm")
            self._client.send([replace(request, max_tokens=WARM_TOKENS) for request in warm]).result()
            blocks = [int(_BLOCKS.findall(self._metrics(url))[0]) for url in self._urls]
            self._tokens = min(blocks) * int(self._plan.engine["block_size"])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def serve(self, name: str, requests: Sequence[Request]) -> Served:
        """See `System`."""
        before, start_s = self._preemptions(), time.perf_counter()
        answers = self._client.send(requests).result(self._plan.answer_timeout_s)
        layouts = (LayoutChange(time_s=0.0, groups=self._groups),)
        return Served(start_s=start_s, answers=answers, preemptions=self._preemptions() - before, layouts=layouts)

    def tokens_of(self, group: Group) -> int:
        """See `System`."""
        return self._tokens

    def _preemptions(self) -> int:
        return sum(round(float(count)) for url in self._urls for count in _PREEMPTIONS.findall(self._metrics(url)))

    @staticmethod
    def _metrics(url: str) -> str:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            return str(answer.read().decode())


def layout_changes(events: Sequence[Event], since_s: float) -> list[LayoutChange]:
    """Every new layout; times since `since_s` of the events' clock."""
    return [
        LayoutChange(time_s=event.time_s - since_s, groups=groups_of(str(event.data["groups"])))
        for event in events
        if event.kind is EventKind.LAYOUT_CHANGED
    ]
