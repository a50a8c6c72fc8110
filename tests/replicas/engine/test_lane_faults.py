"""Law: a lane that cannot be built again after its group broke is missed by its group alone."""

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import StepError
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.replicas.engine.groups.leases import Leases
from pengserve.replicas.engine.groups.tp_lane import TpLane
from pengserve.replicas.engine.instance_lanes import Lanes
from pengserve.replicas.engine.lane_registry import LaneRegistry
from pengserve.replicas.engine.stepper import Stepper
from pengserve.replicas.kv.channel import PeerChannel
from pengserve.replicas.kv.ledger import Cells
from pengserve.replicas.kv.rows import CellRows
from pengserve.replicas.kv.table import CellTable
from pengserve.replicas.kv.transfer import Segment, TransferPlan
from pengserve.replicas.kv.transfers import Transfers

pytestmark = pytest.mark.slow  # it imports vLLM

GROUP = Group(kind=GroupKind.TP, members=(InstanceId(0), InstanceId(1)))


@pytest.fixture
def lanes() -> Lanes:
    """Lanes without an engine: `dp`, and one of a pair that has leased two blocks and counted five steps."""
    made = Lanes.__new__(Lanes)
    taken: list[int] = []
    dp: Any = SimpleNamespace(
        capacity=SimpleNamespace(num_blocks=8),
        step_tokens=64,
        take_back=taken.extend,
        totals=lambda: {"step": 1},
        memory=None,
        tiers=None,
    )
    made.dp, made.taken, made._idle_totals = dp, taken, {}  # type: ignore[attr-defined]
    made.leases = Leases(dp)
    made.transfers = Transfers(made.leases.ledger)
    made.stepper = Stepper(dp, made.transfers, lambda error: None)
    made.registry = registry(dp)
    lane: Any = TpLane.__new__(TpLane)
    lane.rank, lane.shape, lane.capacity, lane.table = 0, "tp2", None, CellTable(9)
    lane.group = SimpleNamespace(unique_name=str(GROUP))
    lane.totals = lambda: {"step": 5}
    lane.model = SimpleNamespace(emptied=lambda: None)
    lane.table.lease([1, 2], [3, 4])
    made.leases.ledger.move([3, 4], "dp", lane.name)
    made.registry._lanes = {GROUP: lane}
    return made


def registry(dp: Any, max_stages: int = 1) -> LaneRegistry:
    """No lane yet. A registry notes vLLM's groups, which are there once an engine is."""
    made = LaneRegistry.__new__(LaneRegistry)
    made._config, made._dp = InstanceConfig(app="a", model="m", degrees=(2, 4), max_stages=max_stages), dp
    made._lanes, made._why_not, made._gone, made._step_costs = {}, {}, Counter(), {}
    return made


def test_what_an_instance_checks_counts_what_is_in_flight(lanes: Lanes) -> None:
    """`require_memory` of the tests of whole clusters asks for this."""
    lane: Any = lanes.registry.require(GROUP)
    lanes.dp.num_held = 6  # type: ignore[misc]
    lanes.stepper.running = lane
    assert lanes.check() == ()
    lanes.leases.ledger.begin_copy(Cells((0, 1), [3, 4]), writes=True)
    assert lanes.check() == ("transfers have 0 cells in flight, the ledger says 2",)
    with pytest.raises(ValueError, match="in flight"):
        lanes.leases.reclaim(lane, [1])


@pytest.mark.parametrize("is_running", [True, False])
def test_a_lane_that_is_left_or_discarded_takes_its_transfers_along(lanes: Lanes, is_running: bool) -> None:
    lane: Any = lanes.registry.require(GROUP)
    lane.leave = lambda: None
    tier: Any = SimpleNamespace(block_bytes=1, device=torch.device("cpu"))
    for name, block in ((lane.name, 3), ("pp2@(0,1)", 5)):
        plan = TransferPlan(
            lane=name, what="KV", rank=0, outgoing=[Segment(1, 0, CellRows(tier, 0, [block]))], incoming=[]
        )
        lanes.transfers.submit(plan, PeerChannel(lambda rank, parts: None))
    if is_running:
        lanes.stepper.running = lane
        lanes.stepper.leave()
    else:
        lanes.discard(lane)
    assert lanes.transfers.conflicts(Cells((0, 1), range(8))) == [5], "that of another lane goes on"
    assert lanes.transfers.check() == () and lanes.transfers.is_busy


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, KeyError])
def test_the_instance_goes_on_without_it(
    lanes: Lanes, error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(group: Group, rank: int, model: Any = None) -> Any:
        raise error("no memory")

    monkeypatch.setattr(lanes.registry, "_make", make)
    with caplog.at_level(logging.WARNING):
        lanes.discard(lanes.registry.require(GROUP))
        lanes.registry.build(GROUP, 0)
    assert [record.exc_info is not None for record in caplog.records] == [True], "one traceback, and no second try"
    assert sorted(lanes.taken) == [3, 4] and lanes.leases.ledger.check() == ()  # type: ignore[attr-defined]
    (dp, tp2) = lanes.registry.infos()
    assert (dp.shape, tp2.shape, tp2.capacity) == ("dp", "tp2", None)
    assert tp2.why_not.startswith(f"its lane cannot be built ({error.__name__}: ")
    with pytest.raises(StepError, match="its lane cannot be built"):
        lanes.registry.require(GROUP)
    lanes._count_idle()
    assert lanes._idle_totals == {"step": 5}, "counts only grow"


def test_all_shapes_are_refused_with_one_reason(lanes: Lanes) -> None:
    lanes.registry = registry(lanes.dp, max_stages=4)
    lanes.registry.refuse_all("it works alone")
    assert [(lane.shape, lane.why_not) for lane in lanes.registry.infos()[1:]] == [
        (shape, "it works alone") for shape in ("pp2", "pp4", "tp2", "tp4")
    ]
