"""Laws of what stages hand on: in order, for one group, whole."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.engine.groups.hidden import HiddenCodec, HiddenInbox, order_of, require_order

pytestmark = pytest.mark.slow  # imports vLLM


class Stage:
    """As much of a vLLM model as the codec asks for."""

    def parameters(self) -> Any:
        return iter([torch.zeros(1, dtype=torch.bfloat16)])

    def make_empty_intermediate_tensors(self, batch_size: int, dtype: torch.dtype, device: str) -> Any:
        shape = (batch_size, 8)
        return SimpleNamespace(tensors={n: torch.zeros(shape, dtype=dtype) for n in ("residual", "hidden_states")})


@pytest.mark.parametrize("num_tokens", [5, 3], ids=["whole", "padded to a graph's rows"])
def test_what_is_encoded_comes_back(num_tokens: int) -> None:
    codec = HiddenCodec(Stage(), torch.device("cpu"))  # type: ignore[arg-type]
    sent = {name: torch.randn(5, 8).to(torch.bfloat16) for name in ("hidden_states", "residual")}
    parts = [bytes(part) for part in codec.encode(SimpleNamespace(tensors=sent), num_tokens)]  # type: ignore[arg-type]
    found = codec.decode([bytearray(part) for part in parts], num_tokens).tensors
    assert all(torch.equal(found[name], sent[name]) for name in sent)
    with pytest.raises(EngineError, match="came for 4 tokens"):
        codec.decode([bytearray(part) for part in parts], 4)
    with pytest.raises(EngineError, match="of 32 elements came for 5 rows"):
        codec.decode([bytearray(part) for part in (parts[0], parts[1][:-16], parts[2])], num_tokens)


def test_an_inbox_keeps_the_order_and_leaves_other_groups_out() -> None:
    inbox = HiddenInbox()
    for stamp, part in ((b"old", b"0"), (b"new", b"1"), (b"old", b"2"), (b"new", b"3")):
        inbox.put(stamp, [part])
    assert [inbox.get(b"new", 1.0) for _ in range(2)] == [[b"1"], [b"3"]]
    with pytest.raises(EngineError, match=r"nothing for 0\.01 s"):
        inbox.get(b"new", 0.01)


def test_who_waits_is_freed_when_a_member_is_gone() -> None:
    inbox = HiddenInbox()
    threading.Timer(0.05, inbox.interrupt).start()
    with pytest.raises(EngineError, match="is gone"):
        inbox.get(b"new", 30.0)


def test_a_stage_refuses_a_microbatch_whose_requests_stand_in_another_order() -> None:
    def runner(*ids: str) -> Any:
        return SimpleNamespace(input_batch=SimpleNamespace(req_ids=list(ids)))

    sign = order_of(runner("a", "b"))
    require_order(memoryview(sign), order_of(runner("a", "b")))
    for other in (("b", "a"), ("a",), ("ab",), ()):
        with pytest.raises(EngineError, match="in another order"):
            require_order(memoryview(sign), order_of(runner(*other)))
