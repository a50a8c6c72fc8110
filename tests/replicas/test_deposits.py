"""The instance knows the deposit of a paced stream from its own steps."""

import pytest

pytest.importorskip("vllm")
from pengserve.planners.types.contract import NO_CONTRACT, Contract, Pacing, Slo
from pengserve.replicas.deposits import FEW, Deposits
from pengserve.replicas.engine.vllm_seam import EngineCoreOutput, FinishReason

CONTRACTS = {
    "paced": Contract(slo=Slo(tbt_s=0.1, pacing=Pacing.STEADY)),
    "plain": Contract(slo=Slo(tbt_s=0.1)),
}


def step(*names: str, finish: FinishReason | None = None) -> list[EngineCoreOutput]:
    return [EngineCoreOutput(request_id=name, new_token_ids=[1], finish_reason=finish) for name in names]


def test_its_depth_follows_from_the_steps() -> None:
    deposits = Deposits(lambda name: CONTRACTS.get(name, NO_CONTRACT))
    for number in range(10):
        deposits.note(step("paced", "plain", "none"), 0.01 * number)
    assert deposits.num_tokens("paced", 0.09) == 9
    assert deposits.num_tokens("paced", 0.45) == 5 and deposits.num_tokens("paced", 5.0) == 0
    assert deposits.num_tokens("plain", 0.09) == deposits.num_tokens("none", 0.09) == 0
    assert len(deposits) == 1, "nothing is kept of others"


def test_it_goes_with_its_request() -> None:
    deposits = Deposits(lambda name: CONTRACTS["paced"])
    deposits.note(step("a", "b"), 0.0)
    deposits.note(step("a", finish=FinishReason.STOP), 0.1)
    deposits.forget(["b", "c"])
    assert len(deposits) == 0


def test_those_that_moved_away_are_forgotten() -> None:
    here: dict[str, Contract] = {}
    deposits = Deposits(lambda name: here.get(name, NO_CONTRACT))
    for number in range(20 * FEW):
        here = {f"r{number}": CONTRACTS["paced"]}
        deposits.note(step(f"r{number}"), 0.0)
    assert len(deposits) <= FEW
