"""Laws of groups that vLLM's code is given: a compiled model can call them, and they are found by their names."""

import gc

import pytest
import torch

pytest.importorskip("vllm")
from pengserve.planners.types.errors import EngineError
from pengserve.replicas.engine.lane_groups import LaneGroup
from pengserve.replicas.engine.vllm_seam import parallel_state

pytestmark = pytest.mark.slow


class Alike:
    """Collectives of two members that always have the same."""

    is_whole = True

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(2)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([tensor, tensor], dim)

    def require_whole(self) -> None:
        if not self.is_whole:
            raise EngineError("a member is gone")


def group(name: str = "tests", *, is_compiled: bool = True) -> LaneGroup:
    made = LaneGroup("tp", name, 0, 2, is_compiled=is_compiled)
    made.collectives = Alike()
    return made


def test_a_model_with_collectives_is_compiled_whole_and_computes_the_same() -> None:
    compiled, eager = group(), group(is_compiled=False)

    def layer(members: LaneGroup, x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        return members.all_gather(members.all_reduce(y) + y, dim=-1)  # y as it was before, beside the sum

    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 8)
    with torch.inference_mode():
        expected = torch.cat([x * 9] * 2, dim=-1)
        torch.testing.assert_close(whole(compiled, x), expected)
        assert torch.equal(eager.all_reduce(x.clone()), x * 2)


def test_a_lane_that_is_built_anew_takes_its_predecessors_name() -> None:
    first = group("again")
    second = group("again")
    del first
    gc.collect()
    assert parallel_state._groups["again"]() is second
    assert torch.equal(second.all_reduce(torch.ones(2)), torch.full((2,), 2.0))


def test_what_was_computed_without_a_member_is_not_used() -> None:
    made = group()
    made.require_whole()
    made.collectives.is_whole = False  # type: ignore[union-attr]
    with pytest.raises(EngineError, match="gone"):
        made.require_whole()
    made.collectives = None
    with pytest.raises(EngineError, match="no communicator"):
        made.all_reduce(torch.ones(2))
