"""`/cluster/instances/{id}/drain`: what is asked for reaches the controller as it was meant, or is refused."""

import httpx
import pytest

from pengserve.planners.types.drains import DrainOperation, DrainPhase
from pengserve.planners.types.errors import PlanError
from pengserve.planners.types.ids import InstanceId, InstanceKey

pytestmark = pytest.mark.slow  # the error handlers import vLLM


class Controller:
    """Keeps what it is asked, and refuses instance 9."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, float | None]] = []

    async def drain_instance(self, instance_id: int, timeout_s: float) -> DrainOperation:
        return self._operation("drain", instance_id, timeout_s)

    async def drain_operation(self, instance_id: int) -> DrainOperation:
        return self._operation("look", instance_id, None)

    async def undrain(self, instance_id: int) -> None:
        self._operation("undrain", instance_id, None)

    def _operation(self, what: str, instance_id: int, timeout_s: float | None) -> DrainOperation:
        if instance_id == 9:
            raise PlanError("there is no instance 9: choose among 0 to 3")
        self.asked.append((what, instance_id, timeout_s))
        key = InstanceKey(instance_id=InstanceId(instance_id), incarnation=2)
        return DrainOperation(id=f"drain-{key}", key=key, phase=DrainPhase.MOVING, num_left=3, safe_to_delete=False)


@pytest.fixture
def controller():
    return Controller()


@pytest.fixture
async def http(controller):
    from fastapi import FastAPI

    from pengserve.cluster.ingress import errors
    from pengserve.cluster.ingress.steering.drain_api import drain_router

    app = FastAPI()
    errors.install(app)
    app.include_router(drain_router(controller, lambda: None))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        yield client


async def test_a_drain_is_asked_for_and_looked_at(http, controller):
    first = await http.post("/cluster/instances/1/drain", json={"timeout_s": 5})
    assert first.status_code == 200 and first.json()["id"] == "drain-1.2"
    assert first.json()["phase"] == "moving" and first.json()["safe_to_delete"] is False
    assert (await http.post("/cluster/instances/1/drain")).json() == first.json()
    assert (await http.get("/cluster/instances/1/drain")).json() == first.json()
    assert (await http.post("/cluster/instances/1/undrain")).json() == {"undrained": True}
    assert controller.asked == [("drain", 1, 5.0), ("drain", 1, 60.0), ("look", 1, None), ("undrain", 1, None)]


@pytest.mark.parametrize("method", ("POST", "GET"))
async def test_the_controller_s_reason_is_the_answer(http, method):
    answer = await http.request(method, "/cluster/instances/9/drain")
    assert answer.status_code == 400 and "choose among 0 to 3" in answer.text


@pytest.mark.parametrize("name", ("one", "-1", "1.5", "9" * 30, "%D9%A1"))
async def test_an_instance_is_a_number(http, controller, name):
    for action in ("drain", "undrain"):
        answer = await http.post(f"/cluster/instances/{name}/{action}")
        assert answer.status_code == 400 and "the number of an instance is expected" in answer.text
    assert controller.asked == []


@pytest.mark.parametrize("timeout_s", (-1, 3601, "5", True, None))
async def test_a_time_out_is_a_number_of_seconds(http, controller, timeout_s):
    answer = await http.post("/cluster/instances/1/drain", json={"timeout_s": timeout_s})
    assert answer.status_code == 400 and "from 0 to 3600" in answer.text
    assert controller.asked == []
