"""Laws of the gate for new prompts, over vLLM's own scheduler and a clock that steps move: no model runs."""

import pytest

pytest.importorskip("vllm")
from pengserve.planners.types.contract import NO_CONTRACT, Contract, Slo
from pengserve.replicas.engine.placement.slo_gate import MAX_HELD_S, SloGate
from tests.support.vllm_requests import scheduled_request
from tests.support.vllm_schedulers import capacity_of, give_tokens, scheduler_handle

pytestmark = pytest.mark.slow

TPOT_S, TOKEN_S = 0.02, 0.001  # what a step takes, and a token of a prompt more
PROMPT = 400  # tokens: 0.4 s


class Known:
    """The contracts of requests."""

    def __init__(self) -> None:
        self.by_id: dict[str, Contract] = {}
        self.num_paced = 0

    def contract(self, request_id: str) -> Contract:
        return self.by_id.get(request_id, NO_CONTRACT)


class Engine:
    """Steps of a scheduler; each takes as long as what it computes."""

    def __init__(self, *, is_gated: bool = True) -> None:
        capacity = capacity_of(4000, 16, max_num_seqs=64, max_model_len=8000)
        self.handle = scheduler_handle(capacity, max_num_batched_tokens=512)
        self.known, self.now_s = Known(), 100.0
        self.gate = SloGate(self.handle, self.known, lambda: self.now_s)
        self._is_gated = is_gated
        self.times: dict[str, list[float]] = {}  # of each token, by request
        self.came: dict[str, float] = {}

    def add(self, name: str, num_tokens: int, *, slo_s: float | None = None, low: int = 0, length: int = 60) -> None:
        if slo_s is not None:
            self.known.by_id[name] = Contract(slo=Slo(tbt_s=slo_s), low_tokens=low)
            self.known.num_paced += 1
        self.came[name] = self.now_s
        self.handle.add(scheduled_request(name, num_tokens, max_tokens=length))

    def step(self) -> None:
        if self._is_gated and self.gate.is_on:
            with self.gate.step():
                self._step()
        else:
            self._step()

    def _step(self) -> None:
        output = self.handle.schedule()
        prompts = sum(count for count in output.num_scheduled_tokens.values() if count > 1)
        self.now_s += TPOT_S + TOKEN_S * prompts
        for name, has_token in give_tokens(self.handle, output).items():
            self.times.setdefault(name, []).extend([self.now_s] * has_token)

    def run(self, num_steps: int = 100_000) -> None:
        while self.handle.has_unfinished and num_steps:
            self.step()
            num_steps -= 1
        assert num_steps

    def tpot_s(self, name: str) -> float:
        times = self.times[name]
        return (times[-1] - times[0]) / (len(times) - 1)

    def ttft_s(self, name: str) -> float:
        return self.times[name][0] - self.came[name]


def burst(*, is_gated: bool, slo_s: float | None = 0.06) -> Engine:
    """One request that decodes, and twelve prompts of 0.4 s that come when it has five tokens."""
    engine = Engine(is_gated=is_gated)
    engine.add("warm", PROMPT, slo_s=1.0, length=3)  # so that the gate knows what steps and prompts take
    engine.run()
    engine.known.num_paced -= 1
    engine.add("d", 32, slo_s=slo_s, low=60)
    for _ in range(5):
        engine.step()
    for number in range(12):
        engine.add(f"p{number}", PROMPT, length=2)
    engine.run()
    return engine


def test_prompts_wait_where_they_would_break_an_slo() -> None:
    """0.06 s allowed for each of 60 tokens are 3.6 s; they take 1.2 s, so that six prompts of 0.4 s fit, not twelve."""
    without, gated = burst(is_gated=False), burst(is_gated=True)
    assert without.tpot_s("d") > 0.06 >= gated.tpot_s("d")
    early = [name for name in gated.times if name.startswith("p") and gated.times[name][0] < gated.times["d"][-1]]
    assert 3 <= len(early) <= 6, "what fits begins at once"
    assert gated.gate.num_held_steps > 0


def test_tokens_are_the_same_and_prompts_keep_their_order() -> None:
    without, gated = burst(is_gated=False), burst(is_gated=True)
    assert {n: len(t) for n, t in gated.times.items()} == {n: len(t) for n, t in without.times.items()}
    firsts = [gated.times[f"p{number}"][0] for number in range(12)]
    assert firsts == sorted(firsts)


def test_without_an_slo_nothing_changes() -> None:
    without, gated = burst(is_gated=False, slo_s=None), burst(is_gated=True, slo_s=None)
    assert gated.times == without.times and gated.gate.num_held_steps == 0


def test_no_prompt_starves() -> None:
    """A request whose tokens are due just as fast as they can be made allows no prompt at all."""
    engine = Engine()
    engine.add("warm", PROMPT, slo_s=1.0, length=3)
    engine.run()
    engine.add("d", 32, slo_s=TPOT_S * 1.01, length=4000)
    for _ in range(5):
        engine.step()
    engine.add("p0", PROMPT, length=2)
    engine.add("p1", PROMPT, length=2)
    while "p1" not in engine.times:
        engine.step()
    assert MAX_HELD_S <= engine.ttft_s("p0") <= MAX_HELD_S + 1.0
    assert engine.ttft_s("p1") <= 2 * MAX_HELD_S + 2.0


def test_what_is_late_in_any_case_holds_nothing_back() -> None:
    engine = Engine()
    engine.add("warm", PROMPT, slo_s=1.0, length=3)
    engine.run()
    engine.add("d", 32, slo_s=TPOT_S / 2, length=400)
    for _ in range(5):
        engine.step()
    engine.add("p0", PROMPT, length=2)
    while "p0" not in engine.times:
        engine.step()
    assert engine.ttft_s("p0") < 1.0
