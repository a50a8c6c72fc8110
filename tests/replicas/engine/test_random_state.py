"""Law: what a lane draws leaves the random state of `dp` as it was, on the CPU and on a GPU."""

import pytest
import torch

from pengserve.replicas.engine.random_state import RandomState


class Gpus:
    """Random states of devices, as torch keeps them."""

    def __init__(self) -> None:
        self.states = {0: torch.tensor([1]), 1: torch.tensor([2])}

    def get(self, device: torch.device) -> torch.Tensor:
        return self.states[device.index].clone()

    def set(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = state


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_it_is_put_back_where_it_was_taken(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus()
    monkeypatch.setattr(torch.cuda, "get_rng_state", gpus.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", gpus.set)
    before = torch.get_rng_state()
    kept = RandomState(torch.device(device))
    torch.manual_seed(7)
    torch.rand(3)
    gpus.states = {0: torch.tensor([8]), 1: torch.tensor([9])}
    kept.put_back()
    assert torch.equal(torch.get_rng_state(), before)
    assert {gpu: int(state) for gpu, state in gpus.states.items()} == {0: 8, 1: 2 if device == "cuda:1" else 9}


def test_a_seed_gives_what_torch_gives_for_it_and_leaves_nothing_for_later() -> None:
    kept = RandomState(torch.device("cpu"))
    torch.manual_seed(7)
    expected = torch.rand(3)
    num_later = len(torch.cuda._queued_calls)
    kept.seed(7)
    assert torch.equal(torch.rand(3), expected)
    assert len(torch.cuda._queued_calls) == num_later  # a process without a GPU would keep a stack for each switch
    kept.put_back()


def test_a_seed_is_also_of_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus, seeded = Gpus(), dict[int, int]()
    current = [0]

    class OnDevice:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index or 0

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "get_rng_state", gpus.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", gpus.set)
    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: seeded.update({current[-1]: seed}))
    kept = RandomState(torch.device("cuda:1"))
    kept.seed(5)
    assert seeded == {1: 5}
    kept.put_back()
