"""Laws of dispatch in simulations: which prefixes are found, and that each way serves all."""

import pytest

from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.result import Result
from pengserve.simulator.run import simulate
from pengserve.simulator.traces.config import build, parse

pytest.importorskip("vllm")

TRACE = {
    "generator": "multi_turn", "conversations_per_s": 2, "duration_s": 10, "mean_turns": 5, "mean_pause_s": 1,
    "lengths": {"prompt": [256, 1024], "output": [16, 64]},
}  # fmt: skip


def served(dispatch: str, ingresses: int = 1) -> Result:
    """Conversations on four instances that cache prefixes."""
    cluster = {"gpu": "a800", "model": "qwen2.5-14b", "instances": 4, "prefix_caching": True, "ingresses": ingresses}
    config = SimulationConfig.parse(
        {"cluster": cluster, "scheduler": "vllm", "policy": {"name": "vllm_dp", "options": {"dispatch": dispatch}}}
    )
    return simulate(config, build(parse(TRACE), 1, config.folder))


def found(result: Result) -> float:
    """The share of prompt tokens that were in a prefix cache."""
    assert all(outcome.end_s is not None for outcome in result.outcomes)
    return sum(o.cached_tokens for o in result.outcomes) / sum(o.prompt_tokens for o in result.outcomes)


def test_dispatch_by_predicted_ttft_finds_most_of_what_others_compute_again() -> None:
    in_turn, by_load, by_ttft = (found(served(dispatch)) for dispatch in ("round_robin", "load", "ttft"))
    assert by_ttft > 1.8 * max(in_turn, by_load)


def test_several_ingresses_find_more_than_round_robin_though_each_knows_its_own_requests_alone() -> None:
    assert found(served("ttft", ingresses=4)) > 1.5 * found(served("round_robin"))
