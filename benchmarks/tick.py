"""What one tick of the controller costs: `python -m benchmarks.tick`; writes `results/tick.md`.

The production controller over a port that answers at once: what instances take to answer is on top, and so is a task
for each of those that do not answer at once (all of them, over Ray). All instances are READY and can form groups (tp2,
tp4, tp8, pp2, pp4). Each tick finds other loads, in answers that share no object with those before, as they would come
off a wire. Switches end between two ticks, so that each tick plans.
"""

import argparse
import asyncio
import os
import pickle
import platform
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.figures import percentile
from benchmarks.harness import RESULTS, today
from benchmarks.result_files import cpu_model
from benchmarks.timed_calls import Target, timed_calls
from pengserve.controller import loop, steering
from pengserve.controller.collector import spare_the_loop
from pengserve.controller.events import EventLog
from pengserve.controller.loop import Controller
from pengserve.controller.ports import Discovery
from pengserve.planners.drop import plan_drop
from pengserve.planners.overload import DemandHistory, predict_demand
from pengserve.planners.types.ages import AGES
from pengserve.planners.types.config import ControllerConfig, DropConfig
from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import (
    Demand,
    DeviceInfo,
    InstanceSnapshot,
    InstanceState,
    InstanceStats,
    KvCapacity,
    LaneInfo,
)
from pengserve.planners.types.step_cost import StepCost
from pengserve.replicas.revisions import Revisions

SIZES = (8, 64, 256, 1000)
NUM_TICKS = 200
DEGREES, MAX_STAGES = (2, 4, 8), 4
PER_NODE = 8
LIMIT_MS, DROP_LIMIT_MS = 20.0, 1.0  # at 1,000 instances: a tick's 99th percentile, and a drop plan
PARTS = ("status calls", "observe", "snapshot", "select", "rest")
SWITCH_END = "a switch's end"  # between ticks, on the same event loop

CAPACITY = KvCapacity(
    num_blocks=1024, block_size=16, bytes_per_block=1 << 20, max_model_len=8192, max_num_seqs=64, weight_bytes=512 << 20
)

# About a 14B model on one A800; the judge scales other shapes from it.
STEP_COST = StepCost(load_s=0.02, token_s=5e-5, extra_s=6e-5, seq_s=5e-5, context_s=1.3e-7, pair_s=2.7e-9)

# What instances hold and queue in each tick, as shares of a dp lane: (least, most) of a share of the instances.
LOADS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "busy": ((1.0, 0.5, 0.9),),
    "idle": ((1.0, 0.0, 0.1),),
    "a tenth overloaded": ((0.1, 1.2, 2.0), (0.9, 0.3, 0.6)),
    "all overloaded": ((1.0, 2.5, 4.0),),
    "idle, some urgent": ((1.0, 0.0, 0.1),),
    "busy, some urgent": ((1.0, 0.5, 0.9),),
}
URGENT = "urgent"  # in the names of loads in which some requests are, by what an ingress says


class Clock:
    """Seconds that pass when the benchmark says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class TickPort:
    """`ReplicaPort` over answers that were made before; whatever is asked of an instance, it has done."""

    def __init__(self) -> None:
        self.answers: dict[InstanceKey, InstanceSnapshot] = {}  # as they come off a wire
        self._instances: dict[InstanceKey, InstanceSnapshot] = {}  # what each knows of itself
        self._revisions: defaultdict[InstanceKey, Revisions] = defaultdict(Revisions)

    def _answer(self, answer: InstanceSnapshot) -> None:
        """Lets an instance answer so from now on."""
        self._instances[answer.key] = answer
        self.answers[answer.key] = pickle.loads(pickle.dumps(self._revisions[answer.key].numbered(answer)))

    async def create(self, key: InstanceKey) -> None:
        self._answer(_newborn(key))

    async def status(self, key: InstanceKey) -> InstanceSnapshot:
        return self.answers[key]

    def statuses(self, keys: Sequence[InstanceKey]) -> list[InstanceSnapshot]:
        return [self.answers[key] for key in keys]

    async def drain(self, key: InstanceKey, timeout_s: float) -> bool:
        return True

    async def retire(self, key: InstanceKey, timeout_s: float) -> bool:
        return True

    async def connect(self, key: InstanceKey, directory: PeerDirectory) -> None:
        names = tuple(spec.name for spec in directory.groups if key in spec.members)
        self._answer(replace(self._instances[key], groups_ready=names))

    async def prepare(self, key: InstanceKey, plan: SwitchPlan) -> None:
        pass

    async def commit(self, key: InstanceKey, plan: SwitchPlan) -> SwitchReport:
        epoch = Epoch(plan.epoch + 1)
        for member in plan.members:
            lane = str(plan.group) if plan.is_merge else "dp"
            self._answer(replace(self._instances[member], lane=lane, epoch=epoch))
        return SwitchReport(plan_id=plan.plan_id, epoch=epoch)

    async def order(self, key: InstanceKey, orders: Sequence[Migrate]) -> None:
        """Nothing runs."""

    async def abort(self, key: InstanceKey, plan_id: str) -> None:
        pass

    async def kill(self, key: InstanceKey) -> None:
        self._instances.pop(key, None)
        self.answers.pop(key, None)

    async def discover(self) -> Discovery:
        return Discovery()

    def load(self, name: str, source: random.Random) -> None:
        """Gives each instance another load, and an answer of new objects."""
        for answer in list(self._instances.values()):
            self._answer(replace(answer, stats=_stats(answer, name, source)))


def _newborn(key: InstanceKey) -> InstanceSnapshot:
    weight_blocks = CAPACITY.weight_bytes // CAPACITY.bytes_per_block
    lanes = [LaneInfo(shape="dp", capacity=CAPACITY, step_cost=STEP_COST)]
    for degree in DEGREES:
        wide = replace(CAPACITY, block_size=16 * degree, max_model_len=8192 * degree)
        lanes.append(LaneInfo(shape=f"tp{degree}", capacity=wide))
    for stages in (s for s in (2, 4, 8) if s <= MAX_STAGES):
        num_blocks = stages * CAPACITY.num_blocks + (stages - 1) * weight_blocks
        lanes.append(LaneInfo(shape=f"pp{stages}", capacity=replace(CAPACITY, num_blocks=num_blocks)))
    node, device = divmod(key.instance_id, PER_NODE)
    address = f"10.0.{node // 250}.{node % 250}"
    return InstanceSnapshot(
        key=key,
        state=InstanceState.READY,
        endpoint=f"{address}:{20000 + device}",
        device=DeviceInfo(node_id=f"node-{node:03}", node_ip=address, device=f"cuda:{device}", pid=1000 + device),
        capacity=CAPACITY,
        lanes=tuple(lanes),
        peer_endpoint=f"{address}:{30000 + device}",
        rss_bytes=4 << 30,
    )


def _stats(answer: InstanceSnapshot, name: str, source: random.Random) -> InstanceStats:
    shape, _, members = answer.lane.partition("@")
    degree = members.count(",") + 1
    lane = next(lane.capacity for lane in answer.lanes if lane.shape == shape)
    assert lane is not None
    is_follower = degree > 1 and not members.startswith(f"({answer.instance_id},")
    shares = [share for share, _, _ in LOADS[name]]
    ((_, least, most),) = source.choices(LOADS[name], shares)
    wanted = int(source.uniform(least, most) * CAPACITY.num_blocks * degree) if not is_follower else 0
    wanted //= degree if shape.startswith("tp") else 1  # a tp block holds as many times the tokens
    used = min(wanted, lane.num_blocks)
    return replace(
        answer.stats,
        step=answer.stats.step + 20,
        num_running=min(lane.max_num_seqs, used // 16),
        num_waiting=(wanted - used) // 16,
        kv_blocks_used=used,
        queued_tokens=(wanted - used) * lane.block_size,
        total_generated_tokens=answer.stats.total_generated_tokens + source.randrange(1000),
        **_counted(answer.stats, used // 16, used, source),
        last_step_s=source.uniform(0.01, 0.03),
        shape=shape,
        is_follower=is_follower,
        block_size=lane.block_size,
        kv_blocks_total=lane.num_blocks,
        max_model_len=lane.max_model_len,
        longest_tokens=min(used * lane.block_size, 2000),
    )


def _counted(before: InstanceStats, running: int, used: int, source: random.Random) -> dict[str, int]:
    """Requests and steps that the judge measures: about 20 steps a tick, and a request now and then."""
    came, steps, context = source.randrange(3), 20, used * 16
    step_s = STEP_COST.step_s(running, running, context)
    return {
        "total_requests": before.total_requests + came,
        "total_request_tokens": before.total_request_tokens + 500 * came,
        "total_finished": before.total_finished + came,
        "total_finished_tokens": before.total_finished_tokens + 100 * came,
        "total_costed_steps": before.total_costed_steps + steps,
        "total_step_us": before.total_step_us + int(1e6 * steps * step_s),
        "total_step_tokens": before.total_step_tokens + steps * running + 500 * came,
        "total_step_seqs": before.total_step_seqs + steps * running,
        "total_step_context": before.total_step_context + steps * context,
        **{name: source.randrange(100) for name in AGES},
    }


# Measuring ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Figures:
    """Seconds of each tick of one run."""

    tick_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of this thread
    parts_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    switch_end_s: list[float] = field(default_factory=list)  # of those between two ticks that had some
    num_switches: int = 0


def parts_of(controller: Controller) -> list[Target]:
    """The parts of a tick. What is left of it is the rest."""
    return [
        (controller._supervision, "ask", "status calls"),
        (controller._supervision, "collect", "status calls"),
        (loop.transitions, "observe", "observe"),
        (controller, "snapshot", "snapshot"),
        (steering, "select", "select"),
        (loop.transitions, "end_switch", SWITCH_END),
    ]


async def started(num_instances: int, port: TickPort, clock: Clock) -> Controller:
    """A controller whose instances are READY and know each other."""
    config = ControllerConfig(
        app="tick", num_instances=num_instances, degrees=DEGREES, drop=DropConfig(max_stages=MAX_STAGES)
    )
    controller = Controller(config, port, EventLog(), clock=clock, wall_clock=clock)
    await controller.recover()
    for _ in range(6):
        await controller.tick()
        await rest(controller)
        clock.now_s += 0.1
    groups = controller.snapshot().groups
    if not groups or len(port.answers) != num_instances:
        raise SystemExit(f"only {len(port.answers)} of {num_instances} instances and {len(groups)} groups came up")
    return controller


async def rest(controller: Controller) -> None:
    """What comes between two ticks: calls and the switches under way end."""
    for _ in range(8):
        await asyncio.sleep(0)
    await asyncio.gather(*controller._coordinator._tasks)


async def measure(num_instances: int, load: str, num_ticks: int) -> Figures:
    """Ticks `num_ticks` times, after a few that do not count."""
    port, clock, source = TickPort(), Clock(), random.Random(num_instances)
    controller, figures = await started(num_instances, port, clock), Figures()
    first_epoch = controller.snapshot().epoch
    with timed_calls(parts_of(controller)) as spent:
        for tick in range(-5, num_ticks):
            port.load(load, source)
            clock.now_s += controller.config.tick_s
            if URGENT in load:
                controller.report_demand(
                    "ingress", Demand(num_running=num_instances, num_priority=max(1, num_instances // 10))
                )
            spent.clear()
            start_s, start_cpu_s = time.perf_counter(), time.thread_time()
            await controller.tick()
            tick_s, cpu_s = time.perf_counter() - start_s, time.thread_time() - start_cpu_s
            if tick >= 0:
                figures.tick_s.append(tick_s)
                figures.cpu_s.append(cpu_s)
                for part in PARTS[:-1]:
                    figures.parts_s[part].append(spent[part])
                figures.parts_s["rest"].append(tick_s - sum(spent.values()))
            await rest(controller)
            if tick >= 0 and SWITCH_END in spent:
                figures.switch_end_s.append(spent[SWITCH_END])
    figures.num_switches = controller.snapshot().epoch - first_epoch
    await controller.stop()
    return figures


async def drop_plans(num_instances: int, num_rounds: int) -> dict[str, list[float]]:
    """Seconds of a drop plan, by load."""
    found = {}
    for load in ("a tenth overloaded", "all overloaded"):
        port, clock = TickPort(), Clock()
        controller = await started(num_instances, port, clock)
        durations_s = []
        for round_ in range(num_rounds):
            port.load(load, random.Random(round_))
            seen = replace(controller.snapshot(), instances=tuple(port.answers.values()))
            demand, _ = predict_demand(seen, controller.config.drop, DemandHistory())
            start_s = time.perf_counter()
            verdict = plan_drop(seen, demand, controller.config.drop)
            durations_s.append(time.perf_counter() - start_s)
            if verdict.plan is None:
                raise SystemExit(f"no drop was planned with {load}")
        await controller.stop()
        found[load] = durations_s
    return found


def uneven(num_rounds: int) -> float:
    """How uneven this machine is by itself: the 99th percentile over the median of a loop that always does the same. It
    takes about as long as a tick.
    """
    durations_s = []
    for _ in range(num_rounds):
        start_s = time.perf_counter()
        sum(number * number for number in range(200_000))
        durations_s.append(time.perf_counter() - start_s)
    return percentile(durations_s, 99) / statistics.median(durations_s)


# Reporting ------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Runs all, prints and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "tick.md")
    parser.add_argument("--ticks", type=int, default=NUM_TICKS)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    spare_the_loop()
    results = {
        (size, name): asyncio.run(measure(size, name, arguments.ticks)) for name in LOADS for size in arguments.sizes
    }
    spread = uneven(arguments.ticks)
    drops = asyncio.run(drop_plans(max(arguments.sizes), arguments.ticks // 2 or 1))
    text = report(results, drops, load, spread)
    arguments.output.write_text(text)
    sys.stdout.write(text)


def report(results: dict[tuple[int, str], Figures], drops: dict[str, list[float]], load: float, spread: float) -> str:
    """The tables, as Markdown. `load` is the machine's load average before the run; `spread` is `uneven`."""
    most = max(size for size, _ in results)
    ticks_ms = 1e3 * max(percentile(figures.tick_s, 99) for (size, _), figures in results.items() if size == most)
    cpu_ms = 1e3 * max(percentile(figures.cpu_s, 99) for (size, _), figures in results.items() if size == most)
    drop_ms = 1e3 * max(statistics.median(durations_s) for durations_s in drops.values())
    lines = [
        "# What a tick of the controller costs",
        "",
        f"`make bench-tick` on {today()}: {cpu_model()}, {os.cpu_count()} cores, Linux {platform.release()},",
        f"Python {platform.python_version()}, one thread. Load average before the run, from other work: {load:.1f}.",
        f"Degrees {DEGREES}, at most {MAX_STAGES} stages, {PER_NODE} instances a node. Milliseconds, median / 99th",
        "percentile; wall time but for the CPU time. Other work on the cores makes both more. All loads change",
        "with each tick, and answers come pickled, as off a wire.",
        f"The machine's own unevenness: of a loop that always does the same, the 99th percentile is {spread:.2f} times",
        "the median.",
        "",
        f"A tick at {most} instances: 99th percentile {ticks_ms:.1f} ms in the worst case,"
        f" {_verdict(ticks_ms, LIMIT_MS)} {LIMIT_MS:.0f} ms; {cpu_ms:.1f} ms of CPU time.",
        f"A drop plan at {most} instances: median {drop_ms:.2f} ms in the worst case,"
        f" {_verdict(drop_ms, DROP_LIMIT_MS)} {DROP_LIMIT_MS:.0f} ms.",
        "",
        "## Ticks",
        "",
        '"Status calls" asks all instances and takes the answers; "observe" makes the next state of them; "select" is',
        "all planners. Switches: how many were begun. The next state after one comes between ticks, on the same loop.",
        "",
        _line("instances", "load", "tick", "its CPU time", *PARTS, "switches", SWITCH_END),
        "|---" * (6 + len(PARTS)) + "|",
    ]
    for (size, name), figures in results.items():
        parts = [_ms(figures.parts_s[part]) for part in PARTS]
        switches = str(figures.num_switches), _ms(figures.switch_end_s) if figures.switch_end_s else "-"
        lines.append(_line(str(size), name, _ms(figures.tick_s), _ms(figures.cpu_s), *parts, *switches))
    lines += ["", f"## `plan_drop` alone, {most} instances", "", "| load | ms |", "|---|---|"]
    lines += [_line(name, _ms(durations_s)) for name, durations_s in drops.items()]
    return "\n".join(lines) + "\n"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _verdict(value: float, limit: float) -> str:
    return "within" if value <= limit else "NOT within"


def _ms(values: list[float]) -> str:
    return f"{1e3 * statistics.median(values):.2f} / {1e3 * percentile(values, 99):.2f}"


if __name__ == "__main__":
    main()
