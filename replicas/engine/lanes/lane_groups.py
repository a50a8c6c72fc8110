"""Which process groups vLLM's code sees. A lane is active while vLLM's `_TP` or `_PP` points to its group."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pengserve.planners.types.errors import EngineError, UnsupportedShapeError
from pengserve.replicas.engine.vllm_seam import parallel_state


class Collectives(Protocol):
    """What a lane asks of `replicas.comm`. All raise EngineError; members call them in the same order."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all members, in place."""

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Members' tensors side by side along `dim`, in rank order."""

    def require_whole(self) -> None:
        """Raises where a member is gone, so that what the device has computed since is not the group's answer."""


SUM_IN_PLACE = "pengserve::sum_in_place"
"""An operator's name. CUDA graphs end before it and begin after it."""

_library = torch.library.Library("pengserve", "FRAGMENT")
_library.define("sum_in_place(Tensor(a!) tensor, str group_name) -> ()")


def _sum_in_place(tensor: torch.Tensor, group_name: str) -> None:
    group: Any = parallel_state._groups[group_name]()
    summed = group._connected().all_reduce(tensor)
    if summed is not tensor:
        tensor.copy_(summed)


_library.impl("sum_in_place", _sum_in_place, "CompositeExplicitAutograd")
torch.library.register_fake(SUM_IN_PLACE, lambda tensor, group_name: None, lib=_library)


class LaneGroup:
    """Stands where vLLM expects a `GroupCoordinator`, for one group ("tp" or "pp") whose communicator comes later.

    vLLM builds its groups within one world of processes, which the death of one process breaks. This group has a
    communicator of its own, which can be replaced.

    A compiled model calls the operator `pengserve::sum_in_place`: a compiler cannot look into a communicator. It finds
    the group by a name. The name is the same for all groups of a kind, and means the one that is active: so members of
    any group can run what one of them has compiled.

    CUDA graphs hold what a lane computes between two sums, never a sum itself (`lane_build`): a graph would keep using
    the communicator with which it was captured. The sum is in place since a graph reads its input where it was when the
    graph was captured.
    """

    def __init__(self, kind: str, name: str, rank: int, size: int, *, is_compiled: bool = False) -> None:
        """`rank` is vLLM's: of a pipeline, the stage."""
        self.kind, self.unique_name = kind, name
        self.rank = self.rank_in_group = self.local_rank = rank
        self.world_size = size
        self.ranks = list(range(size))
        self.device_communicator = None
        self.use_custom_op_call = is_compiled
        self.name_in_code = f"pengserve_{kind}"
        self.collectives: Collectives | None = None

    @property
    def first_rank(self) -> int:
        """Rank of the group's first member, by the name that vLLM calls it."""
        return 0

    @property
    def last_rank(self) -> int:
        """Rank of the group's last member, by the name that vLLM calls it."""
        return self.world_size - 1

    @property
    def is_first_rank(self) -> bool:
        """Whether this member is the first: of a pipeline, whether it has the first stage."""
        return self.rank == 0

    @property
    def is_last_rank(self) -> bool:
        """Whether this member is the last: of a pipeline, whether it has the last stage."""
        return self.rank == self.last_rank

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place: only the vLLM layer that passes `input_` reads it."""
        if self.use_custom_op_call:
            torch.ops.pengserve.sum_in_place(input_, self.name_in_code)
            return input_
        return self._connected().all_reduce(input_)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The members' tensors, concatenated along `dim` in the order of ranks."""
        if torch.compiler.is_compiling():
            raise UnsupportedShapeError("this model gathers within its layers, which has no operator yet")
        return self._connected().all_gather(input_, dim)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor:
        """As all_gather: every member samples, so every member needs the whole."""
        return self.all_gather(input_, dim)

    @contextmanager
    def graph_capture(self, context: Any = None) -> Iterator[Any]:
        """Around a capture, where vLLM's groups prepare their communicators: graphs hold nothing of this one."""
        yield context

    def require_whole(self) -> None:
        """To be called when the device has ended a step: calls on a GPU are not waited for, and raise nothing."""
        self._connected().require_whole()

    def _connected(self) -> Collectives:
        if self.collectives is None:
            raise EngineError(f"the group {self.unique_name} has no communicator yet")
        return self.collectives


@contextmanager
def one_group_for_all() -> Iterator[None]:
    """While open, vLLM gets its world of one process wherever it makes a group of that one process.

    vLLM makes a dozen such groups. On CPUs gloo would give each of them a thread that wakes a hundred times a second
    until the process ends, also during steps. `give_up_shared_group` undoes it.
    """
    make = dist.new_group

    def find_or_make(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        is_alone = dist.get_world_size() == 1 and list(ranks or ()) == [0]
        return dist.group.WORLD if is_alone else make(ranks, *args, **options)

    dist.new_group = find_or_make
    try:
        yield
    finally:
        dist.new_group = make


def give_up_shared_group() -> None:
    """Leaves the world to be destroyed once: vLLM destroys the groups of each coordinator, then the world."""
    for reference in parallel_state._groups.values():
        coordinator: Any = reference()
        if coordinator is not None and getattr(coordinator, "cpu_group", None) is dist.group.WORLD:
            del coordinator.cpu_group, coordinator.device_group


class ActiveGroup:
    """vLLM's `_TP` and `_PP`: the instance's own groups of one, or a lane's in place of one of them."""

    def __init__(self) -> None:
        self._own = {"tp": parallel_state._TP, "pp": parallel_state._PP}
        self._active: LaneGroup | None = None

    def activate(self, group: LaneGroup | None) -> LaneGroup | None:
        """Points vLLM at `group`, or at the instance's own where it is None; returns what was active before."""
        before, self._active = self._active, group
        groups = self._own if group is None else {**self._own, group.kind: group}
        parallel_state._TP, parallel_state._PP = groups["tp"], groups["pp"]
        if group is not None and group.use_custom_op_call:
            parallel_state._groups[group.name_in_code] = weakref.ref(group)
        return before
