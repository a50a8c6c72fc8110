"""`/cluster/layout`: what is asked for reaches the controller as it was meant, or is refused with a sentence."""

from dataclasses import replace

import httpx
import pytest

from pengserve.planners.types.codec import from_data
from pengserve.planners.types.errors import EngineError, PlanError
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.layout import Layout, parse_groups
from pengserve.planners.types.plans import LayoutTarget
from pengserve.planners.types.snapshot import (
    ClusterSnapshot,
    DeviceInfo,
    InstanceSnapshot,
    InstanceState,
    KvCapacity,
    LaneInfo,
    LayoutPolicy,
    LayoutView,
)
from pengserve.planners.types.strategy import SwitchStrategy

pytestmark = pytest.mark.slow  # the error handlers import vLLM

CAPACITY = KvCapacity(num_blocks=8, block_size=32, bytes_per_block=1, max_model_len=64, max_num_seqs=4, weight_bytes=1)
IDS = tuple(InstanceId(i) for i in range(4))
TP2 = LaneInfo(shape="tp2", capacity=CAPACITY)
PP2 = LaneInfo(shape="pp2", capacity=CAPACITY)
TP4 = LaneInfo(shape="tp4", capacity=None, why_not="3 heads do not split over 4 ranks")


class Controller:
    """Keeps what it is asked; refuses and fails where a test says so."""

    def __init__(self) -> None:
        instances = tuple(
            InstanceSnapshot(
                key=InstanceKey(instance_id=i, incarnation=0),
                state=InstanceState.READY,
                device=DeviceInfo(node_id="n", pid=100 + i),
                lanes=(LaneInfo(shape="dp", capacity=CAPACITY), TP2, TP4, PP2),
            )
            for i in IDS
        )
        self.now = ClusterSnapshot(
            app="tests",
            time_s=5.0,
            layout=Layout.all_dp(IDS, Epoch(3)),
            instances=instances,
            ranks=IDS,
            groups=parse_groups("tp2@(0,1)"),
        )
        self.error: Exception | None = None
        self.asked: list[LayoutTarget | None] = []

    async def snapshot(self) -> ClusterSnapshot:
        return self.now

    async def set_layout(self, target: LayoutTarget) -> None:
        if self.error:
            raise self.error
        self.asked.append(target)
        self.now = replace(self.now, policy=LayoutPolicy(is_auto=False, target=target.groups))

    async def auto_layout(self) -> None:
        self.asked.append(None)


@pytest.fixture
def controller():
    return Controller()


@pytest.fixture
async def http(controller):
    from fastapi import FastAPI

    from pengserve.cluster.ingress import errors
    from pengserve.cluster.ingress.steering.layout_api import layout_router

    app = FastAPI()
    errors.install(app)
    app.include_router(layout_router(controller))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        yield client


async def test_the_layout_is_shown_as_the_view_of_the_snapshot(http, controller):
    answer = await http.get("/cluster/layout")
    view = from_data(LayoutView, answer.json())
    assert view == LayoutView.of(controller.now)
    assert (view.formable, view.cannot) == (parse_groups("tp2@(0,1)"), (TP4,))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("dp", "dp@(0) dp@(1) dp@(2) dp@(3)"),
        ("tp2", "tp2@(0,1) tp2@(2,3)"),  # the second pair cannot run yet: the controller waits for it
        ("TP", "tp2@(0,1) tp2@(2,3)"),  # the widest that every instance can build
        (" tp2@(2,3) ", "dp@(0) dp@(1) tp2@(2,3)"),
        ("PP2", "pp2@(0,1) pp2@(2,3)"),
        ("pp", "pp2@(0,1) pp2@(2,3)"),
        ("pp2@(2,3) tp2@(0,1)", "tp2@(0,1) pp2@(2,3)"),
    ],
)
async def test_a_layout_reaches_the_controller_whole(http, controller, text, groups):
    answer = await http.put("/cluster/layout", json={"layout": text, "strategy": "hard"})
    assert answer.status_code == 200, answer.text
    assert controller.asked == [LayoutTarget(groups=parse_groups(groups), strategy=SwitchStrategy.HARD)]
    assert from_data(LayoutView, answer.json()).policy.target == parse_groups(groups)


async def test_requests_are_carried_unless_asked_otherwise_and_auto_hands_over_to_the_planner(http, controller):
    await http.put("/cluster/layout", json={"layout": "dp"})
    await http.put("/cluster/layout", json={"layout": "auto"})
    assert controller.asked[0].strategy is SwitchStrategy.CARRY
    assert controller.asked[1] is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"layout": "tp3"}, ["tp3", "choose dp, tp2"]),
        ({"layout": "tp2@(0,1) dp@(1)"}, ["twice"]),
        ({"layout": "tp2@(0..9999999999)"}, ["at most"]),
        ({"layout": "tp4@(0,1)"}, ["2 member(s)"]),
        ({"layout": ""}, ["a text is expected"]),
        ({"layout": 4}, ["a text is expected"]),
        ({"layout": "dp " * 10_000}, ["a text is expected"]),
        ({}, ["a text is expected"]),
        ({"layout": "dp", "strategy": "quick"}, ["strategy", "sequential, soft, hard, carry"]),
        ({"layout": "dp", "strategy": ["carry"]}, ["strategy"]),
        ({"layout": "dp", "wait": True}, ["wait is not accepted"]),
    ],
)
async def test_what_cannot_be_meant_is_a_400_that_says_what_can(http, controller, body, words):
    answer = await http.put("/cluster/layout", json=body)
    assert answer.status_code == 400, answer.text
    assert all(word in answer.json()["error"]["message"] for word in words), answer.text
    assert controller.asked == []


async def test_what_the_controller_refuses_is_a_400_in_its_words(http, controller):
    controller.error = PlanError("instance 0.0 cannot run tp4: 3 heads do not split over 4 ranks")
    answer = await http.put("/cluster/layout", json={"layout": "tp4@(0..3)"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, str(controller.error))


async def test_a_controller_that_is_away_is_a_503(http, controller):
    controller.error = EngineError("gone")
    assert (await http.put("/cluster/layout", json={"layout": "dp"})).status_code == 503
