"""Orders to park, resume and place requests of one instance: each is carried out once, for the life that it is for."""

from collections.abc import Sequence
from typing import Protocol

from pengserve.planners.types.errors import FenceError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.orders import Park, Place, Resume
from pengserve.replicas.taken_orders import TakenOrders


class Parks(Protocol):
    """Who parks: the lanes of an instance (`replicas/engine/instance_lanes.py`)."""

    def park(self, request_ids: Sequence[str]) -> list[str]:
        """Parks running requests; those that were."""

    def resume(self, request_ids: Sequence[str]) -> list[str]:
        """Requests that were parked may go on; those that may."""

    def place(self, request_id: str, layers: Sequence[int]) -> bool:
        """KV of these layers is on the host alone; whether the request is here."""


class ParkOrders:
    """Belongs to the step thread, but for `require_own`."""

    def __init__(self, key: InstanceKey) -> None:
        self._key = key
        self._known = TakenOrders()

    def require_own(self, orders: Sequence[Park | Resume | Place]) -> None:
        """Raises FenceError where one is for another life."""
        for order in orders:
            if order.instance != self._key:
                raise FenceError(f"order {order.order_id} is for instance {order.instance}, this is {self._key}")

    def take(self, orders: Sequence[Park | Resume | Place], parks: Parks) -> None:
        """Carries out the orders that are new, one after the other."""
        for order in orders:
            if not self._known.take(order.order_id):
                continue
            if isinstance(order, Park):
                parks.park(order.request_ids)
            elif isinstance(order, Resume):
                parks.resume(order.request_ids)
            else:
                parks.place(order.request_id, order.layers)
