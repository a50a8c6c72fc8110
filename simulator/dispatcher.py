"""Which instance gets the next request: what the instances hold now, handed to the production planner."""

from collections import Counter
from collections.abc import Iterable, Iterator

from pengserve.planners.dispatch import Candidate, DispatchOptions
from pengserve.planners.route_index import RouteIndex
from pengserve.planners.types.ids import InstanceKey
from pengserve.simulator.engine.cluster import SimCluster
from pengserve.simulator.engine.instance import SimInstance

MOST_EXACT = 64  # routes whose loads are those of this moment; of more they are as of their last event


class SimDispatcher:
    """The routes in order. Code that changes an instance's load calls `touch`."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._routes: frozenset[InstanceKey] = frozenset()
        self._index = RouteIndex()
        self._dirty: set[InstanceKey] = set()
        self._num_urgent: Counter[InstanceKey] = Counter()

    def __len__(self) -> int:
        return len(self._routes)

    def route(self, keys: Iterable[InstanceKey]) -> None:
        """These are the routes now."""
        routes = frozenset(keys)
        self._dirty |= routes ^ self._routes
        self._routes = routes

    def ready(self) -> Iterator[SimInstance]:
        """Instances that requests are sent to."""
        found = (self._cluster.instances.get(key) for key in self._routes)
        return (instance for instance in found if instance is not None and instance.is_alive)

    def touch(self, key: InstanceKey) -> None:
        """Its load, shape or state has changed."""
        self._dirty.add(key)

    def count_urgent(self, key: InstanceKey, change: int) -> None:
        """So many more urgent requests are there."""
        self._num_urgent[key] += change
        self._dirty.add(key)

    def choose(self, num_tokens: int, options: DispatchOptions, avoid: InstanceKey | None) -> InstanceKey | None:
        """The instance that the planner chooses for a request, never `avoid`; None where none can hold the request."""
        self._refresh()
        if avoid is not None:
            self._index.forget(avoid)
            self._dirty.add(avoid)
        return self._index.choose(num_tokens, options)

    def _refresh(self) -> None:
        """Takes in what has changed since the last choice."""
        if len(self._routes) <= MOST_EXACT:
            for ready in self.ready():
                ready.current.catch_up()
        for key in sorted(self._dirty):
            instance = self._cluster.instances.get(key)
            is_open = instance is not None and instance.is_alive and instance.max_tokens > 0
            if instance is None or not is_open or key not in self._routes:
                self._index.forget(key)
            else:
                num_urgent = self._num_urgent[key]
                # Nothing is unseen: the newest stats are the present ones.
                self._index.update(Candidate.of(key, instance.load(), instance.capacity, num_priority=num_urgent))
        self._dirty.clear()
