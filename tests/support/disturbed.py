"""A cluster to which something happens, its traffic, and what each request gives when nothing does."""

import random
import time
from concurrent.futures import Future
from typing import Any

from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.strategy import SwitchStrategy
from tests.support.elastic import ElasticCluster
from tests.support.streams import make_prompts
from tests.support.traffic import TimedStream, Traffic

GUIDES = [  # longer than any request
    {"regex": "[a-z ]{400,}"},
    {"regex": "([a-f]{3}[0-9]{2}){100,}"},
    {"grammar": 'root ::= (("<" [a-z] ">") | [0-9]+ ";"){100,}'},
]
ENDS_WITHIN_S = 400.0


def requests(count: int, max_tokens: int, seed: int = 3) -> list[dict[str, Any]]:
    """Greedy and seeded requests in turn, penalties and grammars here and there; prompts of one and several chunks."""
    made: list[dict[str, Any]] = []
    for i, prompt in enumerate(make_prompts(count, seed=seed, longest=300)):
        params: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens + 7 * (i % 3)}
        if i % 2:
            params |= {"temperature": 0.8, "seed": 100 + i, "top_p": 0.95}
        if i % 3 == 0:
            params |= {"frequency_penalty": 0.3}
        if i % 4 == 2:  # a grammar's state cannot be carried: such a request is resumed from its tokens
            params |= {"structured_outputs": GUIDES[i // 4 % len(GUIDES)]}
        made.append(params)
    return made


class Disturbed:
    """A cluster, its traffic, and what each request gives when nothing happens."""

    def __init__(self, cluster: ElasticCluster, traffic: Traffic, count: int, max_tokens: int) -> None:
        self.cluster, self.traffic = cluster, traffic
        cluster.set_layout("dp")
        self.requests, self._num_orders = requests(count, max_tokens), 0
        undisturbed = [traffic.start(**request) for request in self.requests]
        self.expected = [future.result(ENDS_WITHIN_S) for future in undisturbed]
        assert all(not stream.error for stream in self.expected), self.expected

    def check_all(self, running: "list[tuple[int, Future[TimedStream]]]") -> None:
        """Waits for streams to end and compares them."""
        for index, future in running:
            stream = future.result(ENDS_WITHIN_S)
            assert not stream.error, stream.error
            found, wanted = stream.token_ids, self.expected[index].token_ids
            first = next((i for i, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other), None)
            assert found == wanted, f"request {index} from its token {first} on: {found} for {wanted}"
            assert stream.finish_reason == self.expected[index].finish_reason

    def there_and_back(self, shape: str, strategy: str, *, pause_s: float = 0.15, num_within: int = 3) -> None:
        """Streams begin in `dp` and in the shape, and run through both changes."""
        running = [(i, self.traffic.start(**request)) for i, request in enumerate(self.requests)]
        time.sleep(pause_s)
        self.cluster.set_layout(shape, strategy)
        self.check_memory()
        running += [(i, self.traffic.start(**self.requests[i])) for i in range(num_within)]
        time.sleep(pause_s)
        self.cluster.require_layout(shape)
        self.cluster.set_layout("dp", strategy)
        self.check_memory()
        self.check_all(running)

    def at_random(self, seed: int, *, num_rounds: int, pause_s: float) -> None:
        """Two instances change their layout at random while streams begin, and while requests migrate."""
        chance, running = random.Random(seed), []
        for _ in range(num_rounds):
            for i in chance.choices(range(len(self.requests)), k=3):
                running.append((i, self.traffic.start(**self.requests[i])))
            if chance.random() < 0.6:
                layout, strategy = chance.choice(["dp", "tp2", "pp2"]), chance.choice(list(SwitchStrategy))
                self.cluster.set_layout(layout, strategy.value)
            self.check_memory()
            self.migrate(*chance.sample(range(2), 2))
            time.sleep(chance.random() * pause_s)
        self.cluster.set_layout("dp")
        self.check_all(running)

    def to_and_fro(self) -> int:
        """All requests migrate between two instances until they end; how many times one did so with its KV."""
        before, running = self.num_migrated(), [(i, self.traffic.start(**r)) for i, r in enumerate(self.requests)]
        while not all(future.done() for _, future in running):
            for source, target in ((0, 1), (1, 0)):
                self.migrate(source, target)
                time.sleep(0.1)
        self.check_all(running)
        return self.num_migrated() - before

    def num_migrated(self) -> int:
        """Times that a request went on elsewhere with its KV, by an order, so far."""
        return sum(instance.stats.total_migrated for instance in self.cluster.snapshot().instances)

    def migrate(self, source: int, target: int) -> None:
        """What runs in one group, or instance alone, is told to go on in another; who leads none refuses."""
        self._num_orders += 1
        cluster = self.cluster
        order = Migrate(
            order_id=f"exact-{self._num_orders}",
            source=cluster.key(source),
            target=cluster.key(target),
            max_tokens=1 << 20,
        )
        cluster.call(cluster.port.order(order.source, [order]))

    def check_memory(self) -> None:
        """Conservation laws of every instance."""
        self.cluster.require_memory()
