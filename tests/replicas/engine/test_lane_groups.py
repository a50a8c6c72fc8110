"""Laws of groups that vLLM's code is given: a compiled model can call them, and they are found by their names."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("vllm")
from pengserve.planners.types.errors import EngineError
from pengserve.replicas.engine.lanes.lane_groups import ActiveGroup, LaneGroup

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


def group(name: str = "tests", size: int = 2, *, is_compiled: bool = True) -> LaneGroup:
    made = LaneGroup("tp", name, 0, size, is_compiled=is_compiled)
    made.collectives = Alike()
    return made


@pytest.fixture
def active() -> Iterator[ActiveGroup]:
    made = ActiveGroup()
    yield made
    made.activate(None)


def test_a_model_with_collectives_is_compiled_whole_and_computes_the_same(active: ActiveGroup) -> None:
    compiled, eager = group(), group(is_compiled=False)
    active.activate(compiled)

    def layer(members: LaneGroup, x: torch.Tensor) -> torch.Tensor:
        return members.all_reduce(x * 3) * 2 + x

    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 8)
    with torch.inference_mode():
        torch.testing.assert_close(whole(compiled, x), x * 13)
        assert torch.equal(eager.all_reduce(x.clone()), x * 2)


def test_what_one_group_has_compiled_calls_the_group_that_is_active(active: ActiveGroup) -> None:
    """Another group of the same kind may have compiled it: in an earlier life, or in another process of this cache."""
    first, second = group("tp2@(0,1)"), group("tp2@(2,3)")
    second.collectives.all_reduce = lambda tensor: tensor.mul_(5)  # type: ignore[method-assign, union-attr]

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch.ops.pengserve.sum_in_place(y, first.name_in_code)
        return y

    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for members, factor in ((first, 2), (second, 5), (first, 2)):
        before = active.activate(members)
        assert torch.equal(whole(torch.zeros(2)), torch.full((2,), float(factor)))
        active.activate(before)


def test_a_model_that_gathers_within_its_layers_is_refused(active: ActiveGroup) -> None:
    """What it gathered would be somewhere else each time, and a captured graph reads where it was."""
    members = group()
    active.activate(members)
    assert members.all_gather(torch.ones(1)).tolist() == [1, 1]
    with pytest.raises(Exception, match="gathers within its layers"):
        torch.compile(members.all_gather, fullgraph=True, backend="eager")(torch.ones(1))


def test_what_was_computed_without_a_member_is_not_used(active: ActiveGroup) -> None:
    made = group()
    active.activate(made)
    made.require_whole()
    made.collectives.is_whole = False  # type: ignore[union-attr]
    with pytest.raises(EngineError, match="gone"):
        made.require_whole()
    made.collectives = None
    with pytest.raises(EngineError, match="no communicator"):
        made.all_reduce(torch.ones(2))
