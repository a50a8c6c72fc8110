"""Which lanes there are besides `dp`, and why others are not."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from pengserve.planners.cost_model import CostModel, Sample
from pengserve.planners.groups import likely_groups
from pengserve.planners.stages import microbatches_in_flight
from pengserve.planners.step_fit import step_costs
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import StepError, UnsupportedShapeError, one_line
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import KvCapacity, LaneInfo
from pengserve.planners.types.step_cost import StepCost
from pengserve.replicas.engine.groups.group_lane import GroupLane
from pengserve.replicas.engine.groups.pp_lane import PpLane
from pengserve.replicas.engine.groups.stage_clock import StageClock
from pengserve.replicas.engine.groups.tp_lane import TpLane
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.engine.lanes.lane_build import LaneModel
from pengserve.replicas.engine.lanes.lane_groups import ActiveGroup
from pengserve.replicas.engine.lanes.warm_up import is_compiled
from pengserve.replicas.engine.scheduling.microbatches import FIRST_MODEL
from pengserve.replicas.memory.weight_views import Shard
from pengserve.replicas.processors import num_cores, processors_each

logger = logging.getLogger(__name__)


class LaneRegistry:
    """Builds lanes and finds them, by group. Belongs to the step thread, but for `find`."""

    def __init__(self, config: InstanceConfig, dp: DpLane, on_lease: Callable[[TpLane, Sequence[int]], None]) -> None:
        """`on_lease` backs new blocks of a tensor-parallel lane."""
        self._config, self._dp, self._on_lease = config, dp, on_lease
        self._cores, self._processors = num_cores(), 1.0  # of this machine; of each instance on it
        self._active = ActiveGroup()
        self._cost_model = FIRST_MODEL
        self._step_costs: Mapping[str, StepCost] = {}  # by shape; none until `dp` was profiled
        self._lanes: dict[Group, GroupLane] = {}
        self._why_not: dict[str, str] = {}  # by shape
        self._gone: Counter[str] = Counter()  # totals of lanes that are gone and could not be built anew
        self.on_slow: Callable[[], None] = lambda: None  # called before what may take minutes
        self.clock = StageClock()  # of all pipelines, one after the other

    def __iter__(self) -> Iterator[GroupLane]:
        return iter(self._lanes.values())

    # Building ---------------------------------------------------------------------------------------------------------

    def build(self, group: Group, rank: int) -> None:
        """Makes sure that there is a lane for `group`, or that `infos` say why there is none: `dp` needs no other."""
        if group not in self._lanes and group.shape not in self._why_not:
            self._try_to_make(group, rank)

    def build_ahead(self, instance_id: InstanceId, domains: Sequence[str] = ()) -> None:
        """Before the instance serves: builds the lanes that it will probably need, where they have to be compiled.

        That takes up to minutes, for which lanes that are built later hold up `dp`: where groups come out otherwise.
        `domains` are those of the node's devices, in their order; empty: not known.
        """
        if self._dp.pristine_config is None or not is_compiled(self._dp.pristine_config):
            return
        for group in likely_groups(instance_id, self._config.degrees, self._config.max_stages, domains):
            self.build(group, group.members.index(instance_id))

    def rebuild(self, lane: GroupLane) -> None:
        """Builds a new lane in place of this one: its scheduler may hold requests. Without effect on one replaced."""
        group = next((group for group, other in self._lanes.items() if other is lane), None)
        if group is None:
            return
        del self._lanes[group]
        self._try_to_make(group, lane.rank, lane)
        if group in self._lanes:
            self._lanes[group].count_on_from(lane.kept_totals())
        else:
            self._gone.update(lane.totals())

    def rebuild_all(self) -> None:
        """Builds all lanes anew, of which none runs: what `dp` has for them has changed."""
        for lane in list(self):
            self.rebuild(lane)

    def _try_to_make(self, group: Group, rank: int, replaced: GroupLane | None = None) -> None:
        """Nothing that goes wrong is raised. An unforeseen fault leaves its traceback in the log, once."""
        try:
            self._lanes[group] = self._make(group, rank, replaced.model.emptied() if replaced is not None else None)
        except Exception as error:
            is_foreseen = isinstance(error, UnsupportedShapeError)
            why = str(error) if is_foreseen else f"its lane cannot be built ({one_line(error)})"
            logger.warning("no lane for %s: %s", group, why, exc_info=not is_foreseen)
            self._why_not[group.shape] = why

    def _make(self, group: Group, rank: int, model: LaneModel | None = None) -> GroupLane:
        dp = self._dp
        if dp.pristine_config is None:
            raise UnsupportedShapeError("vLLM's configuration could not be copied for it; the instance's log says why")
        if model is None and is_compiled(dp.pristine_config):
            self.on_slow()
        if group.kind is GroupKind.TP:
            return TpLane(dp, self._active, str(group), Shard(rank, group.degree), self._on_lease, model)
        if dp.memory is None:
            raise UnsupportedShapeError(dp.memory_failure or "parameters can be dropped where memory_bytes is set")
        lane = PpLane(
            dp,
            self._active,
            str(group),
            rank,
            group.degree,
            dp.memory.layers,
            cost_model=self._cost_model,
            policy=self._config.microbatches,
            clock=self.clock,
            model=model,
        )
        lane.max_in_flight = self._max_in_flight(lane)
        return lane

    def refuse(self, shape: str, why: str) -> None:
        """No group of this shape can run here from now on; `infos` say why."""
        self._why_not.setdefault(shape, why)

    def refuse_all(self, why: str) -> None:
        """Only `dp` can run here."""
        stages = (1 << power for power in range(1, self._config.max_stages.bit_length()))
        for shape in (*(f"tp{degree}" for degree in self._config.degrees), *(f"pp{count}" for count in stages)):
            self.refuse(shape, why)

    # What pipelines go by ---------------------------------------------------------------------------------------------

    def assume(self, cost_model: CostModel) -> None:
        """What steps cost, until microbatches say otherwise."""
        self._cost_model = cost_model
        for lane in self._pipelines():
            lane.assume(cost_model)

    def tell_costs(self, samples: Sequence[Sample]) -> None:
        """From now on `infos` say what steps of `dp` and of pipelines cost, by steps of `dp` that were timed."""
        self._step_costs = step_costs(samples, self._config.max_stages)

    def share_machine(self, num_instances: int) -> None:
        """So many instances run on this machine from now on, this one among them."""
        self._processors = processors_each(self._config, self._cores, num_instances)
        for lane in self._pipelines():
            lane.max_in_flight = self._max_in_flight(lane)

    def _pipelines(self) -> Iterator[PpLane]:
        return (lane for lane in self if isinstance(lane, PpLane))

    def _max_in_flight(self, lane: PpLane) -> int:
        fixed = self._config.max_in_flight
        return min(fixed, lane.num_stages) if fixed else microbatches_in_flight(lane.num_stages, self._processors)

    # Finding ----------------------------------------------------------------------------------------------------------

    def infos(self) -> tuple[LaneInfo, ...]:
        """The shapes that can run here, and those that cannot, with the reason."""
        step_tokens = self._dp.step_tokens

        def info(shape: str, capacity: KvCapacity) -> LaneInfo:
            cost = self._step_costs.get(shape)
            return LaneInfo(shape=shape, capacity=capacity, step_cost=cost, step_tokens=step_tokens)

        shapes = {lane.shape: info(lane.shape, lane.capacity) for lane in self}
        for shape, why_not in self._why_not.items():
            shapes[shape] = LaneInfo(shape=shape, capacity=None, why_not=why_not)
        return (info("dp", self._dp.capacity), *(shapes[shape] for shape in sorted(shapes)))

    def find(self, group: Group | None) -> GroupLane | None:
        """The lane of `group`, where there is one. From any thread."""
        return self._lanes.get(group) if group is not None else None

    def require(self, group: Group) -> GroupLane:
        """The lane of `group`.

        Raises:
            StepError: there is none here, and why.
        """
        if group not in self._lanes:
            raise StepError(self._why_not.get(group.shape, f"this instance has no lane for {group} yet"))
        return self._lanes[group]

    def tp(self, group: Group) -> TpLane:
        """The tensor-parallel lane of `group`. Raises as `require`."""
        lane = self.require(group)
        assert isinstance(lane, TpLane)
        return lane

    def pp(self, group: Group) -> PpLane:
        """The pipeline lane of `group`. Raises as `require`."""
        lane = self.require(group)
        assert isinstance(lane, PpLane)
        return lane

    def totals_but(self, current: object) -> Counter[str]:
        """Totals of all these lanes but one, those that are gone included."""
        return sum((Counter(lane.totals()) for lane in self if lane is not current), Counter(self._gone))
