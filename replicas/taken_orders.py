"""Which orders an instance has taken already: one that comes twice changes nothing."""

MAX_REMEMBERED_ORDERS = 1024


class TakenOrders:
    """Ids of the newest orders. Belongs to the step thread."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}  # the newest last

    def __len__(self) -> int:
        return len(self._ids)

    def take(self, order_id: str) -> bool:
        """Whether this order is new; from now on it is not."""
        if order_id in self._ids:
            return False
        self._ids[order_id] = None
        while len(self._ids) > MAX_REMEMBERED_ORDERS:
            del self._ids[next(iter(self._ids))]
        return True
