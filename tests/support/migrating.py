"""Requests that move between two groups of a real cluster, or two instances alone."""

from concurrent.futures import Future
from typing import Any

import pytest

from pengserve.planners.types.orders import Migrate
from tests.support.elastic import ElasticCluster
from tests.support.streams import make_prompts
from tests.support.traffic import TimedStream, Traffic
from tests.support.waiting import until

ENDS_WITHIN_S = 400.0
MAX_TOKENS = 160
GRAMMAR = {"structured_outputs": {"regex": "[a-z ]{400,}"}}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 7, "top_p": 0.95},
    {"frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"logprobs": 3},
    {"temperature": 0.9, "seed": 11, "min_p": 0.02, "repetition_penalty": 1.1},
    {"n": 2, "temperature": 0.7, "seed": 3},
    GRAMMAR,
)


class Pair:
    """Two groups, known by the instances that lead them, and streams between them."""

    def __init__(self, cluster: ElasticCluster, traffic: Traffic) -> None:
        self.cluster, self.traffic = cluster, traffic
        self._num_orders = 0

    def requests(self, kinds: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
        """One of each kind, with prompts of one and of several blocks."""
        prompts = make_prompts(len(kinds), seed=5, longest=300)
        return [{"prompt": p, "max_tokens": MAX_TOKENS, **kind} for p, kind in zip(prompts, kinds, strict=True)]

    def start(self, requests: list[dict[str, Any]]) -> tuple[list["Future[TimedStream]"], list[TimedStream]]:
        """Begins streams and waits until all decode."""
        live = [TimedStream() for _ in requests]
        futures = [self.traffic.start(**r, into=stream) for r, stream in zip(requests, live, strict=True)]
        until(lambda: all(len(stream.token_ids) > 3 for stream in live), timeout_s=240.0)
        return futures, live

    def undisturbed(self, requests: list[dict[str, Any]]) -> list[TimedStream]:
        """What they give when nothing moves."""
        return [future.result(ENDS_WITHIN_S) for future in self.start(requests)[0]]

    def order(self, source: int, target: int, **fields: Any) -> Migrate:
        """Orders `source` to send what runs there to `target`."""
        self._num_orders += 1
        order = Migrate(
            order_id=f"order-{self._num_orders}",
            source=self.cluster.key(source),
            target=self.cluster.key(target),
            **({"max_tokens": 1 << 20} | fields),
        )
        self.give(source, order)
        return order

    def give(self, instance_id: int, order: Migrate) -> None:
        """As `order`, of one that there is."""
        self.cluster.call(self.cluster.port.order(self.cluster.key(instance_id), [order]))

    def num_migrated(self) -> int:
        """Requests that have left an instance with their KV, since the instances began."""
        return sum(instance.stats.total_migrated for instance in self.cluster.snapshot().instances)

    def num_running(self, instance_id: int) -> int:
        """Requests that run there."""
        return self.cluster.snapshot().instances[instance_id].stats.num_running

    def require_equal(self, streams: list[TimedStream], expected: list[TimedStream]) -> None:
        """As `require_streams`, and memory is conserved on all instances."""
        self.require_streams(streams, expected)
        self.cluster.require_memory()

    def require_streams(self, streams: list[TimedStream], expected: list[TimedStream]) -> None:
        """Tokens, logprobs and ends are the same."""
        assert [stream.error for stream in streams] == [""] * len(streams)
        for i, (stream, other) in enumerate(zip(streams, expected, strict=True)):
            assert stream.by_choice == other.by_choice, f"stream {i}"
            assert stream.finish_reason == other.finish_reason
            assert stream.logprobs == pytest.approx(other.logprobs, abs=1e-4), f"stream {i}"
