"""Laws of orders to park and resume: once each, in order, for one life."""

from collections.abc import Sequence

import pytest

from pengserve.planners.types.errors import FenceError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.orders import Park, Place, Resume
from pengserve.replicas.parking import ParkOrders

KEY = InstanceKey(instance_id=InstanceId(1), incarnation=2)


class Noted:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []

    def park(self, request_ids: Sequence[str]) -> list[str]:
        self.told.append(("park", *request_ids))
        return []

    def resume(self, request_ids: Sequence[str]) -> list[str]:
        self.told.append(("resume", *request_ids))
        return []

    def place(self, request_id: str, layers: Sequence[int]) -> bool:
        self.told.append(("place", request_id, *map(str, layers)))
        return True


def test_an_order_that_comes_twice_is_carried_out_once() -> None:
    orders, noted = ParkOrders(KEY), Noted()
    park = Park(order_id="1", instance=KEY, request_ids=("a", "b"))
    resume = Resume(order_id="2", instance=KEY, request_ids=("a",))
    orders.take([park, resume, park], noted)
    orders.take([resume, Place(order_id="3", instance=KEY, request_id="b", layers=(1, 3))], noted)
    assert noted.told == [("park", "a", "b"), ("resume", "a"), ("place", "b", "1", "3")]


def test_an_order_for_another_life_is_refused() -> None:
    other = Park(order_id="1", instance=InstanceKey(instance_id=InstanceId(1), incarnation=3), request_ids=("a",))
    with pytest.raises(FenceError, match="this is"):
        ParkOrders(KEY).require_own([other])
