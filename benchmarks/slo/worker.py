"""One engine in a process of its own: `python -m benchmarks.slo.worker MODEL JSON` prints one JSON line.

Both scenarios run on it, one after the other. The prefix cache is emptied between them.
"""

import json
import random
import statistics
import sys
import time
from itertools import chain, pairwise
from typing import Any

from vllm import SamplingParams

from pengserve.planners.deposit import Deposit
from pengserve.planners.types.contract import NO_CONTRACT, Contract, Pacing, Slo
from pengserve.replicas.deposits import Deposits
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from tests.support.tiered_engine import opened
from tests.support.vllm_requests import sent_request

VOCABULARY = 500  # token ids of prompts, which all models here have


class Contracts:
    """Requests with an SLO for their tokens, and the deposits of their streams."""

    def __init__(self) -> None:
        self._contracts: dict[str, Contract] = {}
        self.deposits = Deposits(self.contract)

    def add(self, name: str, tbt_s: float, num_tokens: int) -> None:
        """A request begins that makes so many tokens; its length is known, as LayerKV's predictor would guess it."""
        slo = Slo(tbt_s=tbt_s, pacing=Pacing.STEADY)
        self._contracts[name] = Contract(slo=slo, low_tokens=num_tokens, median_tokens=num_tokens)

    def end(self, name: str) -> None:
        """A request has ended."""
        self._contracts.pop(name, None)

    def contract(self, request_id: str) -> Contract:
        """As an instance knows it."""
        return self._contracts.get(request_id, NO_CONTRACT)

    @property
    def num_paced(self) -> int:
        """Requests with an SLO."""
        return len(self._contracts)

    def deposit_tokens(self, request_id: str) -> int:
        """Tokens that the client has not been sent yet."""
        return self.deposits.num_tokens(request_id, time.monotonic())


class Scenario:
    """Requests of one scenario, and when each of their tokens was made."""

    def __init__(self, lane: DpLane, contracts: Contracts | None, *, is_static: bool, tbt_s: float, seed: int) -> None:
        self._lane, self._contracts, self._is_static, self._tbt_s = lane, contracts, is_static, tbt_s
        self._random = random.Random(seed)
        self.came_s: dict[str, float] = {}
        self.made_s: dict[str, list[float]] = {}
        self.tokens: dict[str, list[int]] = {}
        self._steps_s: list[float] = []

    def add(self, name: str, num_prompt: int, num_output: int) -> None:
        """A random prompt comes."""
        prompt = [self._random.randrange(3, VOCABULARY) for _ in range(num_prompt)]
        if self._contracts is not None:
            self._contracts.add(name, self._tbt_s, num_output)
        self.came_s[name], self.made_s[name], self.tokens[name] = time.monotonic(), [], []
        params = SamplingParams(max_tokens=num_output, temperature=0, ignore_eos=True)
        self._lane.prepare(sent_request(name, prompt, params), [], self._lane.add)

    def step(self) -> None:
        """One step of the engine."""
        lane = self._lane
        if self._is_static and lane.residency is not None:
            every_second = range(1, lane.tiers.pool.num_layers, 2)
            for request in lane.scheduler.running:
                if request.num_output_tokens == 1:
                    lane.residency.place(request.request_id, every_second)
        started_s = time.perf_counter()
        outputs = list(chain.from_iterable(batch.outputs for batch in lane.step().values()))
        self._steps_s.append(time.perf_counter() - started_s)
        now_s = time.monotonic()
        if self._contracts is not None:
            self._contracts.deposits.note(outputs, now_s)
        for output in outputs:
            self.made_s[output.request_id] += [now_s] * len(output.new_token_ids)
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None and self._contracts is not None:
                self._contracts.end(output.request_id)

    def run(self) -> None:
        """Steps until all requests have ended."""
        while self._lane.num_requests():
            self.step()

    def found(self, late: str = "") -> dict[str, Any]:
        """What was kept; `late`: how names of requests begin whose first tokens count."""
        ttfts = [self.made_s[n][0] - came_s for n, came_s in self.came_s.items() if n.startswith(late)]
        tpots = [(times[-1] - times[0]) / (len(times) - 1) for times in self.made_s.values()]
        gaps = [later - before for times in self.made_s.values() for before, later in pairwise(times)]
        sent = [later - before for times in self.made_s.values() for before, later in pairwise(self._sent(times))]
        seconds = max(times[-1] for times in self.made_s.values()) - min(self.came_s.values())
        return {
            "ttft_mean_s": statistics.mean(ttfts),
            "tpot_kept": statistics.mean(tpot <= self._tbt_s for tpot in tpots),
            "tbt_kept": statistics.mean(gap <= self._tbt_s for gap in gaps),
            "sent_tbt_kept": statistics.mean(gap <= self._tbt_s * 1.01 for gap in sent),
            "tbt_p95_s": sorted(gaps)[int(0.95 * (len(gaps) - 1))],
            "tokens_per_s": sum(map(len, self.tokens.values())) / seconds,
            "step_s": statistics.median(self._steps_s),
            "quick_step_s": sorted(self._steps_s)[len(self._steps_s) // 10],
            "answers": hash(str(sorted(self.tokens.items()))),  # to be compared within one run, with one hash seed
        }

    def _sent(self, made_s: list[float]) -> list[float]:
        """When tokens of a paced stream go to the client."""
        deposit = Deposit(self._tbt_s)
        return [due_s for time_s in made_s for due_s in deposit.add(1, time_s)]


def measure(lane: DpLane, given: dict[str, Any]) -> dict[str, Any]:
    """Both scenarios, or the step time of a batch that fits."""
    contracts = Contracts() if given["system"] in ("PengServe", "host tier alone") else None
    if contracts is not None:
        lane.use_contracts(contracts)
    is_static = given["system"] == "static"

    def scenario(seed: int, tbt_s: float = 1.0) -> Scenario:
        lane.reset_prefix_cache()
        return Scenario(lane, contracts, is_static=is_static, tbt_s=tbt_s, seed=seed)

    calm = scenario(given["seed"])
    for index in range(given["fitting"]):
        calm.add(f"calm-{index}", 64, 64)
    calm.run()
    found: dict[str, Any] = {"calm": calm.found()}
    for name in given["scenarios"]:
        size, seed = given["scenarios"][name], given["seed"] + 1
        busy = scenario(seed, given["tbt_s"][name])
        for index in range(size["streams"]):
            busy.add(f"stream-{index}", size["stream_prompt"], size["stream_output"])
        while size["prompts"] and min(map(len, busy.tokens.values())) < 20:
            busy.step()
        for index in range(size["prompts"]):
            busy.add(f"prompt-{index}", size["prompt"], size["output"])
        before = lane.stats()
        busy.run()
        after = lane.stats()
        found[name] = busy.found("prompt" if size["prompts"] else "")
        for total in ("preemptions", "parked", "staged_bytes", "copy_wait_s"):
            found[name][total] = getattr(after, f"total_{total}") - getattr(before, f"total_{total}")
    if contracts is not None:
        found["changes"] = lane.placement_notes.newest[-1].number if lane.placement_notes.newest else 0
        found["whys"] = [f"{note.reason}: {note.why}" for note in lane.placement_notes.newest[-5:]]
    return found


def main(model: str, given: dict[str, Any]) -> None:
    """Builds the engine, measures, prints."""
    with opened(model, given) as lanes:
        print("RESULT" + json.dumps(measure(lanes.dp, given)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
