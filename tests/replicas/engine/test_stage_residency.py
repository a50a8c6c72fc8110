"""Laws of a pipeline whose KV is more than its devices hold: layers and requests on the host, and none recomputed."""

import random
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from pengserve.replicas.engine.vllm_seam import Request
from tests.replicas.kv.tiered_world import BLOCK_SIZE
from tests.support.pipeline_world import (
    Pipeline,
    a_request,
    next_turn,
    some_requests,
)


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    pipeline = Pipeline()
    yield pipeline
    pipeline.close()


def add(pipeline: Pipeline, requests: list[Request]) -> None:
    for request in requests:
        pipeline.handle.add(request)


def test_requests_of_several_times_the_devices_all_end_without_recompute(pipeline: Pipeline) -> None:
    add(pipeline, requests := some_requests(12))
    pipeline.run()
    assert [request.num_output_tokens for request in requests] == [40] * 12
    assert {request.num_preemptions for request in requests} == {0} and not pipeline.parked.num_given_up
    for member in pipeline.members:
        counts = member.world.tiers.counts
        assert counts.evicted > 0 and counts.reused > 0, "a second time copies only what is new"


def test_a_prompt_of_more_than_a_device_holds_in_a_layer_is_served(pipeline: Pipeline) -> None:
    """The other layers of the stage lend their cells."""
    long = a_request("long", [random.Random(1).randrange(3, 500) for _ in range(36 * BLOCK_SIZE)], 3 * BLOCK_SIZE)
    assert long.num_tokens // BLOCK_SIZE > pipeline.sizes.smallest
    add(pipeline, [long, *(others := some_requests(4))])
    pipeline.run(20_000)
    assert long.num_output_tokens == 3 * BLOCK_SIZE and {r.num_preemptions for r in (long, *others)} == {0}
    assert all(member.world.tiers.counts.staged > 0 for member in pipeline.members)


def test_tokens_are_those_of_requests_that_run_alone(pipeline: Pipeline) -> None:
    together, alone = some_requests(12), some_requests(12)
    add(pipeline, together)
    pipeline.run()
    for request in alone:
        request.request_id += "-alone"
        pipeline.handle.add(request)
        pipeline.run(1 << 20)
    assert [list(r.all_token_ids) for r in together] == [list(r.all_token_ids) for r in alone]


def test_a_full_host_costs_requests_their_kv_and_nothing_else() -> None:
    pipeline, requests = Pipeline(host_blocks=25), some_requests(12)
    add(pipeline, requests)
    pipeline.run()
    pipeline.close()
    assert [request.num_output_tokens for request in requests] == [40] * 12
    assert sum(request.num_preemptions for request in requests) > 0


@pytest.mark.parametrize("layers", [[0, 2], [1], [0, 1, 2, 3], [3]])
def test_layers_of_a_request_are_on_the_hosts_of_the_members_that_have_them(
    pipeline: Pipeline, layers: list[int]
) -> None:
    """`Place` names layers of the model."""
    add(pipeline, [request := a_request("a", [5] * 30), other := a_request("b", [6] * 30)])
    while not request.num_output_tokens:
        pipeline.step()
    assert pipeline.parked.place("a", layers)
    while request.num_output_tokens < 30:
        pipeline.step()
    num_full = 30 // BLOCK_SIZE
    for member in pipeline.members:
        first, stop = member.layers
        blocks = member.table.physical(pipeline.leader.block_ids("a")[:num_full])
        away = [
            layer
            for layer in range(first, stop)
            if (member.world.tiers.placement.index[layer - first, blocks] == 0).all()
        ]
        assert away == [layer for layer in layers if first <= layer < stop]
    pipeline.run()
    assert request.num_output_tokens == other.num_output_tokens == 40 and request.num_preemptions == 0


def test_parked_by_an_order_means_until_an_order(pipeline: Pipeline) -> None:
    first, second = a_request("a", [5] * 30), a_request("b", [6] * 30)
    add(pipeline, [first, second])
    while not first.num_output_tokens:
        pipeline.step()
    assert pipeline.parked.park(["a", "unknown"]) == ["a"]
    pipeline.step()
    pipeline.step()  # it was in a microbatch
    made = first.num_output_tokens
    pipeline.run()
    assert second.num_output_tokens == 40 and first.num_output_tokens == made
    assert pipeline.parked.parked == [first]
    add(pipeline, some_requests(8, seed=2))
    pipeline.run()
    blocks = pipeline.leader.table.physical(pipeline.leader.block_ids("a"))
    assert pipeline.leader.world.tiers.num_away(blocks) > 0, "others needed its room"
    assert pipeline.parked.resume(["a", "b"]) == ["a"]
    pipeline.run()
    assert first.num_output_tokens == 40 and first.num_preemptions == 0
    (pause,) = [pause for pause in pipeline.parked.take_pauses() if pause.request is first]
    assert pause.swapped_bytes % (2 * pipeline.leader.world.pool.block_bytes) == 0 < pause.swapped_bytes
    assert pause.swapped_bytes <= 2 * 4 * len(blocks) * pipeline.leader.world.pool.block_bytes


def test_an_order_that_is_taken_back_while_a_microbatch_is_under_way_parks_nothing(pipeline: Pipeline) -> None:
    add(pipeline, [request := a_request("a", [5] * 30)])
    while not request.num_output_tokens:
        pipeline.step()
    assert pipeline.leader._begin() and pipeline.parked.park(["a"]) == ["a"]
    assert not pipeline.parked.parked and pipeline.parked.resume(["a"]) == ["a"]
    pipeline.run()
    assert request.num_output_tokens == 40 and not pipeline.parked.take_pauses()


def test_a_parked_request_that_ends_leaves_nothing(pipeline: Pipeline) -> None:
    add(pipeline, requests := some_requests(12))
    while not pipeline.parked.parked:
        pipeline.step()
    pipeline.abort((gone := pipeline.parked.parked[0]).request_id)
    assert gone not in pipeline.parked.parked
    pipeline.run()
    assert pipeline.parked.num_parked() == 0 and pipeline.handle.num_free() == pipeline.leader.capacity.num_blocks
    assert sum(request.num_output_tokens == 40 for request in requests) == 11


def test_the_least_urgent_waits() -> None:
    pipeline = Pipeline(by_priority=True)
    urgent, others = a_request("urgent", [7] * 60), some_requests(10)
    for request in others:
        request.priority = 500  # copies take real time, in which the clock of the steps makes parked ones more urgent
    add(pipeline, others)
    for _ in range(40):
        pipeline.step()
    pipeline.handle.add(urgent)
    while urgent.num_output_tokens < 40:
        pipeline.step()
        assert urgent not in pipeline.parked.parked
    pipeline.run()
    pipeline.close()


@pytest.mark.parametrize("links", [(0.0, 0.0), (2e6, 4e6)], ids=["fast", "slow"])
def test_second_turns_begin_with_what_the_host_has_of_the_first(links: tuple[float, float]) -> None:
    pipeline = Pipeline(300, links=links)
    add(pipeline, first := [a_request(str(i), [3 + i] * 40, 20) for i in range(12)])
    pipeline.run(20_000)
    add(pipeline, second := [next_turn(request) for request in first])
    pipeline.run(40_000)
    num_kept = 59 // BLOCK_SIZE * BLOCK_SIZE  # the newest token of a request has no KV yet
    found = {request.request_id: pipeline.leader.computed[request.request_id] for request in second}
    assert found == dict.fromkeys(found, 65 + 20 - 1 - num_kept), "all full blocks of the first turn are found"
    assert {request.num_preemptions for request in second} == {0}
    assert [request.num_output_tokens for request in second] == [20] * 12
    pipeline.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_at_any_step(seed: int, depth: int) -> None:
    """Each step reads its KV where it is. In between requests are parked, resumed, placed, aborted and added."""
    rng = random.Random(seed)
    links = rng.choice([(0.0, 0.0), (2e7, 4e7), (5e8, 4e7)])
    pipeline = Pipeline(
        host_blocks=rng.choice([25, 50, 200]), links=links, seed=seed, by_priority=seed % 2 == 1, depth=depth
    )
    left, ordered, ended = some_requests(12, seed), set[str](), 0
    turns = {request.request_id: request for request in left}
    while left or pipeline.handle.has_unfinished or pipeline.parked.num_parked() or pipeline.in_flight:
        if left and rng.random() < 0.2:
            request = left.pop()
            request.priority = rng.choice([0, 5])
            pipeline.handle.add(request)
        if rng.random() < 0.1 and pipeline.handle.running:
            ordered.update(pipeline.parked.park([rng.choice(pipeline.handle.running).request_id]))
        if ordered and (rng.random() < 0.1 or not pipeline.handle.has_unfinished):
            ordered.discard(chosen := rng.choice(sorted(ordered)))
            pipeline.parked.resume([chosen])
        if rng.random() < 0.1 and pipeline.handle.running:
            chosen = rng.choice(pipeline.handle.running).request_id
            pipeline.parked.place(chosen, rng.sample(range(2 * depth), rng.randrange(2 * depth)))
        here = {request.request_id for request in pipeline.handle.requests()}
        under_way = pipeline.leader.ids_in_flight()
        # Also of a microbatch under way: what then gets the blocks comes after it, on each member.
        able = here & under_way if ended % 2 else here - under_way
        if able and ended < 8 and rng.random() < 0.03:
            pipeline.abort(rng.choice(sorted(able)))
            ended += 1
        over = [name for name, request in turns.items() if request.is_finished()]
        for request in map(turns.pop, over):
            if "+" not in request.request_id:
                left.insert(0, next_turn(request, rng.choice([1, 5])))
        pipeline.step()
        assert pipeline.num_steps < 8000, "the requests do not come on"
    assert pipeline.handle.num_free() == pipeline.leader.capacity.num_blocks
    pipeline.close()
