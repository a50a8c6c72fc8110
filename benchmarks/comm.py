"""What groups and peer messages cost, over loopback: `python -m benchmarks.comm`; writes `results/comm.md`.

For 2, 4 and 8 processes: set-up time and resident memory of a group. For groups of 2 and 4: the time of an all-reduce.
For two processes: one way of a peer message. Each for our own TCP ("direct") and gloo, in the same run.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, today
from benchmarks.result_files import cpu_model, table
from pengserve.planners.groups import groups_for
from pengserve.planners.types.directory import GroupSpec, PeerAddress
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.replicas.comm.communicator import Communicator, Move
from pengserve.replicas.comm.peers import PeerNetwork
from pengserve.replicas.comm.pool import CommunicatorPool

BACKENDS = ("direct", "gloo")
SIZES_KIB = (1, 4, 16, 64, 256, 1024)
MESSAGE_BYTES = (64, 4096, 65536)
GROUP_HEADING = ("processes", "backend", "groups per member", "set-up of one (ms)", "resident memory of one (KiB)")
REDUCE_HEADING = ("group", "backend", "way", *(f"{kib} KiB" for kib in SIZES_KIB))
NUM_ROUNDS = 10  # copies of each group, for a figure per group above the noise of a page
TIMEOUT_S = 20.0


def main() -> None:
    """Runs all, prints and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "comm.md")
    parser.add_argument("--member", nargs=2, metavar=("SLOT", "BACKEND"), help="run as one process of the benchmark")
    arguments = parser.parse_args()
    if arguments.member:
        run_member(int(arguments.member[0]), arguments.member[1])
        return
    load = os.getloadavg()[0]
    results = {(n, backend): run_cluster(n, backend) for n in (2, 4, 8) for backend in BACKENDS}
    text = report(results, load)
    arguments.output.write_text(text)
    sys.stdout.write(text)


def run_cluster(num_members: int, backend: str) -> list[dict[str, Any]]:
    """Starts the processes, tells them of each other; each one's figures."""
    command = [sys.executable, "-m", "benchmarks.comm", "--member"]
    processes = [
        subprocess.Popen(
            [*command, str(slot), backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for slot in range(num_members)
    ]
    try:
        endpoints = [_line(process) for process in processes]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(endpoints) + "\n")
            process.stdin.flush()
        results = [_line(process) for process in processes]
        for process in processes:
            process.communicate(timeout=TIMEOUT_S)
        return results
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a process of the benchmark died; its error is above")
    return json.loads(line)


def run_member(slot: int, backend: str) -> None:
    """One process: connects, builds, measures; prints one JSON line."""
    torch.set_num_threads(1)
    pong = threading.Event()

    def on_message(key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        if kind == "ping":
            network.send(key, "pong", parts)
        else:
            pong.set()

    network = PeerNetwork(_key(slot), "127.0.0.1", "benchmark", on_message, lambda key: None, TIMEOUT_S)
    pool = CommunicatorPool(network, "cpu", TIMEOUT_S, backend)
    _say(network.endpoint)
    endpoints = json.loads(sys.stdin.readline())
    network.connect([PeerAddress(key=_key(i), endpoint=e) for i, e in enumerate(endpoints)], TIMEOUT_S)
    size = len(endpoints)
    everybody = _spec(tuple(range(size)), 1000)
    pool.build([everybody])  # the first group of a process loads what all share
    pool.get(everybody.name).barrier()
    result: dict[str, Any] = {"build": _measure_build(pool, everybody, slot, size), "reduce": {}, "message": {}}
    if size <= 4:
        result["reduce"] = _measure_reduce(pool.get(everybody.name))
    pool.get(everybody.name).barrier()
    if size == 2 and slot == 1:
        result["message"] = {num: _measure_message(network, pong, num) for num in MESSAGE_BYTES}
    pool.get(everybody.name).barrier()
    _say(result)
    sys.stdin.read()
    network.close()


def _measure_build(pool: CommunicatorPool, everybody: GroupSpec, slot: int, size: int) -> dict[str, float]:
    ranks = tuple(map(InstanceId, range(size)))
    groups = groups_for(ranks, dict.fromkeys(ranks, "node"), (2, 4, 8))
    specs = [_spec(group.members, round_) for group in groups for round_ in range(NUM_ROUNDS)]
    before_bytes, num_threads = _resident_bytes(), threading.active_count()
    start_s = time.perf_counter()
    pool.build([everybody, *specs])
    took_s = time.perf_counter() - start_s
    num_built = len(pool.ready()) - 1
    if pool.failed():
        raise SystemExit(f"groups failed: {pool.failed()}")
    after_bytes = _resident_bytes()
    pool.get(everybody.name).barrier()
    return {
        "setup_ms": 1e3 * took_s / num_built,
        "resident_kib": (after_bytes - before_bytes) / 1024 / num_built,
        "groups": num_built / NUM_ROUNDS,
        "python_threads": threading.active_count() - num_threads,
    }


def _measure_reduce(communicator: Communicator) -> dict[str, dict[int, tuple[float, float]]]:
    """Way -> KiB -> median and 90th percentile in microseconds."""
    figures: dict[str, dict[int, tuple[float, float]]] = {}
    for kib in SIZES_KIB:
        tensor = torch.zeros(kib * 256)
        room = torch.zeros(communicator.size, kib * 256)
        for way, reduce in WAYS.items():
            call = partial(reduce, communicator, tensor, room)
            figures.setdefault(way, {})[kib] = _times_us(call, communicator.barrier)
    return figures


def _gather_and_sum(communicator: Communicator, tensor: torch.Tensor, room: torch.Tensor) -> None:
    torch.sum(communicator.all_gather(tensor).view(room.shape), 0, out=tensor)


def _exchange_and_sum(communicator: Communicator, tensor: torch.Tensor, room: torch.Tensor) -> None:
    me, everybody = communicator.rank, range(communicator.size)
    moves = [Move(a, b, tensor if a == me else room[a]) for a in everybody for b in everybody if a != b]
    communicator.exchange(moves)
    room[me] = tensor
    torch.sum(room, 0, out=tensor)


WAYS = {
    "all_reduce": lambda communicator, tensor, room: communicator.all_reduce(tensor),
    "all_gather + sum": _gather_and_sum,
    "exchange with all + sum": _exchange_and_sum,
}


def _measure_message(network: PeerNetwork, pong: threading.Event, num_bytes: int) -> tuple[float, float]:
    body = bytes(num_bytes)

    def round_trip() -> None:
        pong.clear()
        network.send(_key(0), "ping", [body])
        pong.wait(TIMEOUT_S)

    median_us, p90_us = _times_us(round_trip, lambda: None)
    return median_us / 2, p90_us / 2


def _times_us(call: Callable[[], Any], meet: Callable[[], Any], num_calls: int = 300) -> tuple[float, float]:
    """Median and 90th percentile."""
    meet()
    times = []
    for i in range(num_calls + 30):
        start_s = time.perf_counter()
        call()
        if i >= 30:
            times.append(1e6 * (time.perf_counter() - start_s))
    return statistics.median(times), statistics.quantiles(times, n=10)[-1]


def report(results: dict[tuple[int, str], list[dict[str, Any]]], load: float) -> str:
    """The tables, as Markdown. `load` is the machine's load average before the run."""
    reduces = [
        [f"tp{n}", backend, way, *_pairs(figures, SIZES_KIB)]
        for (n, backend), members in results.items()
        for way, figures in members[0]["reduce"].items()
    ]
    message = results[2, "direct"][1]["message"]
    lines = [
        "# What groups and peer messages cost",
        "",
        f"`make bench-comm` on {today()}: {cpu_model()}, {os.cpu_count()} cores shared by all processes,",
        f"loopback, Python {platform.python_version()}, torch {torch.__version__}, one thread a process. Both backends",
        "are of the same run; with more processes than cores the figures hold the scheduler's delays too.",
        f"Load average of the machine before the run, from other work: {load:.1f}.",
        "",
        "## A group, per member",
        "",
        *_table(GROUP_HEADING, [_group_row(n, backend, members) for (n, backend), members in results.items()]),
        "",
        "## All-reduce of float32 (µs, median / 90th percentile)",
        "",
        *_table(REDUCE_HEADING, reduces),
        "",
        "## A peer message, one way (µs, half a round trip; median / 90th percentile)",
        "",
        *_table([f"{num} B" for num in MESSAGE_BYTES], [_pairs(message, MESSAGE_BYTES)]),
    ]
    return "\n".join(lines) + "\n"


def _group_row(num_members: int, backend: str, members: list[dict[str, Any]]) -> list[str]:
    build = {k: statistics.mean(m["build"][k] for m in members) for k in members[0]["build"]}
    figures = [f"{build['groups']:.0f}", f"{build['setup_ms']:.1f}", f"{build['resident_kib']:.0f}"]
    return [str(num_members), backend, *figures]


def _pairs(figures: Mapping[str, tuple[float, float]], sizes: Iterable[int]) -> list[str]:
    """Median and 90th percentile for each size; JSON has made its keys texts."""
    return [f"{figures[str(size)][0]:.0f} / {figures[str(size)][1]:.0f}" for size in sizes]


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return table(heading, rows, len(heading))


def _key(slot: int) -> InstanceKey:
    return InstanceKey(instance_id=InstanceId(slot), incarnation=0)


def _spec(members: tuple[int, ...], round_: int) -> GroupSpec:
    group = Group(kind=GroupKind.TP, members=tuple(map(InstanceId, members)))
    return GroupSpec(group=group, members=tuple(map(_key, members)), round=round_)


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
