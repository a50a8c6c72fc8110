"""Which instance gets the next request: what the instances hold now, handed to the production planner."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal
from zlib import crc32

from pengserve.planners.dispatch import Candidate, DispatchOptions, expected_hits
from pengserve.planners.prefix_index import PrefixIndex, homes
from pengserve.planners.route_index import RouteIndex
from pengserve.planners.types.ids import InstanceKey
from pengserve.simulator.engine.cluster import SimCluster
from pengserve.simulator.engine.instance import SimInstance
from pengserve.simulator.requests import LiveRequest

Dispatch = Literal["ttft", "load", "round_robin"]
"""ttft: production's. load: the least virtual KV load alone. round_robin: each in turn."""

MOST_EXACT = 64  # routes whose loads are those of this moment; of more they are as of their last event


class SimDispatcher:
    """The routes in order. Code that changes an instance's load calls `touch`."""

    def __init__(
        self, cluster: SimCluster, dispatch: Dispatch = "load", *, num_ingresses: int = 1, finds_prefixes: bool = False
    ) -> None:
        """
        Args:
            num_ingresses: that share the requests evenly; each knows of prefixes what it sent itself.
            finds_prefixes: whether the instances' schedulers cache prefixes.
        """
        self._cluster, self._dispatch = cluster, dispatch
        is_used = finds_prefixes and dispatch == "ttft"
        self._prefixes = [PrefixIndex() for _ in range(num_ingresses)] if is_used else []
        self._turn = 0
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

    def choose(self, request: LiveRequest, options: DispatchOptions, avoid: InstanceKey | None) -> InstanceKey | None:
        """The instance that the planner chooses for a request, never `avoid`; None where none can hold the request."""
        self._refresh()
        if avoid is not None:
            self._index.forget(avoid)
            self._dirty.add(avoid)
        if self._dispatch == "round_robin":
            return self._next(request, options)
        return self._index.choose(request.num_tokens, options, self.hits(request))

    def _next(self, request: LiveRequest, options: DispatchOptions) -> InstanceKey | None:
        """The next route that can hold the request."""
        keys = sorted(key for key in self._routes if key in self._index)
        for _ in keys:
            self._turn += 1
            key = keys[self._turn % len(keys)]
            if self._index.holds(key, max(request.num_tokens, options.total_tokens), options.degree):
                return key
        return None

    def hits(self, request: LiveRequest) -> Mapping[InstanceKey, int]:
        """Tokens of its prompt that its ingress takes to be at each instance."""
        arrival = request.arrival
        if not self._prefixes or not arrival.prefix_ids:
            return {}
        found = self._index_of(request).hits(arrival.prefix_ids)
        hits = {key: count * arrival.prefix_block for key, count in found.items()}
        if len(self._prefixes) == 1:
            return hits
        at_home = homes(arrival.prefix_ids, [key for key in self._routes if key in self._index])
        home_tokens = {key: count * arrival.prefix_block for key, count in at_home.items()}
        return expected_hits(hits, None, request.num_tokens, home_tokens)

    def sent(self, request: LiveRequest, key: InstanceKey) -> None:
        """A request went to `key`."""
        ids = request.arrival.prefix_ids
        if self._prefixes and ids:
            room = self._cluster.instances[key].capacity.num_tokens // request.arrival.prefix_block
            self._index_of(request).note(key, ids, room)

    def _index_of(self, request: LiveRequest) -> PrefixIndex:
        """That of the ingress that has the request."""
        return self._prefixes[crc32(request.request_id.encode()) % len(self._prefixes)]

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
                self._forget_prefixes(key)
            else:
                candidate = self._candidate(key, instance)
                if self._index.shape(key) not in (None, candidate.shape):
                    self._forget_prefixes(key)
                self._index.update(candidate)
        self._dirty.clear()

    def _candidate(self, key: InstanceKey, instance: SimInstance) -> Candidate:
        # Nothing is unseen: the newest stats are the present ones.
        found = Candidate.of(key, instance.load(), instance.capacity, num_priority=self._num_urgent[key])
        return found if self._dispatch == "ttft" else dataclasses.replace(found, prefilling_tokens=0, weight=1.0)

    def _forget_prefixes(self, key: InstanceKey) -> None:
        for prefixes in self._prefixes:
            prefixes.forget(key)
