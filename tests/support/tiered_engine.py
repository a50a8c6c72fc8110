"""An engine with or without a host tier: `python -m tests.support.tiered_engine MODEL JSON` prints one JSON line.

The work is the same for each engine: prompts that come at random step boundaries, then a second turn of each. With a
host tier, requests are also parked and resumed at random boundaries, and their priorities change.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from vllm import SamplingParams

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.contract import Contract, Slo
from pengserve.planners.types.errors import EngineError
from pengserve.replicas.engine.instance_lanes import Lanes
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.kv.tiered import TieredKv
from tests.support.vllm_requests import sent_request

VOCABULARY = 500
MAX_STEPS = 20_000


def sampling(index: int, max_tokens: int) -> SamplingParams:
    """Greedy, but for every fourth request: seeded, and with penalties."""
    if index % 4 == 3:
        return SamplingParams(max_tokens=max_tokens, temperature=0.9, seed=index, presence_penalty=0.5, ignore_eos=True)
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


class AllAlike:
    """Contracts of requests that all have one SLO for their tokens, and no deposit."""

    num_paced, num_hurried = 1, 0

    def __init__(self, slo_s: float) -> None:
        self._contract = Contract(slo=Slo(tbt_s=slo_s))

    def contract(self, request_id: str) -> Contract:
        return self._contract

    def deposit_tokens(self, request_id: str) -> int:
        return 0


class Driver:
    """Steps a lane until all requests have ended."""

    def __init__(self, lane: DpLane, seed: int, orders: float, *, checks: bool = True) -> None:
        self.checks = checks  # the laws at each step boundary
        self.lane, self.rng, self.orders = lane, random.Random(seed), orders
        self.tokens: dict[str, list[int]] = {}
        self.first_s: dict[str, float] = {}
        self.first_cpu_s: dict[str, float] = {}  # of the process, which other work on the machine does not stretch
        self.steps_s: list[float] = []
        self.num_orders = 0
        self.churn = 0.0  # probability that a request has another priority from a step on
        self.broken: list[str] = []
        self.step = lane.step
        self.gone: list[str] = []  # requests that the lane has let go, or does not take

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.tokens[name] = []
        request = sent_request(name, prompt, params)
        try:
            self.lane.prepare(request, [], self.lane.add)
        except EngineError:
            self.gone.append(name)

    def run(self, work: list[tuple[str, list[int], SamplingParams]], share: float) -> None:
        """Adds the work, some at each step boundary, and steps until all of it is done."""
        left, parked = list(work), set[str]()
        while left or self.lane.num_requests():
            while left and (self.rng.random() < share or not self.lane.num_requests()):
                self.add(*left.pop(0))
            self._order(parked)
            if self.churn and self.rng.random() < self.churn:
                name = self.rng.choice(sorted(self.tokens))
                self.lane.reorder({name: (self.rng.randrange(-2, 3), self.rng.random())})
            started_s = time.perf_counter()
            for outputs in self.step().values():
                for output in outputs.outputs:
                    self.tokens[output.request_id] += output.new_token_ids
                    if output.new_token_ids:
                        self.first_s.setdefault(output.request_id, time.perf_counter())
                        self.first_cpu_s.setdefault(output.request_id, time.process_time())
            self.steps_s.append(time.perf_counter() - started_s)
            if self.checks and self.lane.tiers is not None:
                self.broken += self.lane.tiers.check()
            assert not self.broken, self.broken
            assert len(self.steps_s) < MAX_STEPS, "the requests do not come on"

    def _order(self, parked: set[str]) -> None:
        residency = self.lane.residency
        if residency is None or not self.orders:
            return
        if self.rng.random() < self.orders and self.lane.scheduler.running:
            parked.update(residency.park([self.rng.choice(self.lane.scheduler.running).request_id]))
            self.num_orders += 1
        if self.rng.random() < self.orders and self.lane.scheduler.running:
            layers = range(self.lane.tiers.pool.num_layers)
            every = self.rng.choice([1, 2, 3])
            residency.place(
                self.rng.choice(self.lane.scheduler.running).request_id, [x for x in layers if x % every == 0]
            )
        if parked and (self.rng.random() < self.orders or not self.lane.has_work()):
            chosen = self.rng.choice(sorted(parked))
            parked.discard(chosen)
            residency.resume([chosen])


class Breaking:
    """Steps of which one finds that a copy has failed."""

    def __init__(self, lanes: Lanes, step: int) -> None:
        self._lanes, self._left = lanes, step

    def __call__(self) -> Any:
        self._left -= 1
        if not self._left and (tiers := self._lanes.dp.tiers) is not None:
            tiers.engine._move_piece = self._fail  # type: ignore[method-assign]
        return self._lanes.step()

    @staticmethod
    def _fail(copy: Any) -> None:
        raise MemoryError("no memory for a copy\nwith a second line")


def run(lanes: Lanes, given: dict[str, Any]) -> dict[str, Any]:
    """Two turns of the work; what came of it."""
    lane = lanes.dp
    rng = random.Random(given.get("work_seed", 1))
    lengths = given["lengths"]
    if given.get("slo_s"):
        lane.use_contracts(AllAlike(given["slo_s"]))
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]
    driver = Driver(lane, given.get("seed", 0), given.get("orders", 0.0))
    driver.churn = given.get("churn", 0.0)
    driver.step = Breaking(lanes, given.get("breaks_at", 0))
    lanes.on_stranded = lambda request_ids, leader: driver.gone.extend(request_ids)
    started_s = time.perf_counter()
    work = [(f"0-{i}", p, sampling(i, given["max_tokens"])) for i, p in enumerate(prompts)]
    driver.run(work, given.get("share", 0.5))
    if given.get("turns", 1) > 1:
        again = [p + driver.tokens[f"0-{i}"] + [5, 6, 7] for i, p in enumerate(prompts)]
        driver.run([(f"1-{i}", p, sampling(i, given["max_tokens"])) for i, p in enumerate(again)], 0.5)
    tiers, totals = lane.tiers, lane.totals()
    return {
        "tokens": driver.tokens,
        "seconds": time.perf_counter() - started_s,
        "step_s": statistics.median(driver.steps_s),
        "num_steps": len(driver.steps_s),
        "preemptions": totals["total_preemptions"],
        "hits": totals["total_prefix_hits"],
        "num_blocks": lane.capacity.num_blocks,
        "orders": driver.num_orders,
        "counts": asdict(tiers.counts) if tiers is not None else {},
        "to_host": _cells_to_host(tiers) if tiers is not None else 0,
        "parks": tiers.counts.parks if tiers is not None else 0,
        "given_up": lane.residency.num_given_up if lane.residency is not None else 0,
        "places_taken": tiers.counts.displaced if tiers is not None else 0,
        "placements": [asdict(note) for note in lane.placement_notes.newest],
        "gone": driver.gone,
        "tier_failure": lane.worker.tier_failure,
        "device_blocks": tiers.pool.num_blocks if tiers is not None else 0,
    }


def _cells_to_host(tiers: TieredKv) -> int:
    moved = sum(num_bytes for (to_host, _), num_bytes in tiers.engine.moved_bytes.items() if to_host)
    return moved // tiers.pool.block_bytes


@contextmanager
def opened(model: str, given: dict[str, Any]) -> Iterator[Lanes]:
    """The engine that `given` describes; closed at the end. Ends the process where its host tier cannot be opened."""
    config = InstanceConfig(
        app="tests",
        model=model,
        engine=given["engine"],
        host_bytes=given.get("host_bytes", 0),
        link_bytes_per_s=given.get("link_bytes_per_s", 0.0),
        places_by_slo=given.get("places_by_slo", True),  # where a request has an SLO
    )
    lanes = Lanes(config)
    try:
        if lanes.dp.residency is None and config.host_bytes:
            raise SystemExit(lanes.dp.worker.tier_failure)
        yield lanes
    finally:
        lanes.close()


def main(model: str, given: dict[str, Any]) -> None:
    with opened(model, given) as lanes:
        print("RESULT" + json.dumps(run(lanes, given)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
