"""What a request may wish, and where a wish leads it."""

from typing import Any

import pytest

from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.cluster.ingress.in_flight.records import SUPERSEDED_WAIT_S
from pengserve.cluster.ingress.request.request_options import PARALLELISM_HEADER, RequestOptions, read_options
from pengserve.cluster.ingress.vllm_openai_seam import RetryableRequestError
from pengserve.planners.types.contract import Contract
from pengserve.planners.types.snapshot import Demand, InstanceStats
from tests.support.moving import PROMPT, Cluster, FakeLink

TP2 = RequestOptions(degree=2)


def stats(shape: str = "dp", *, max_model_len: int = 0, **more: Any) -> InstanceStats:
    """Stats of an instance that runs `shape`."""
    return InstanceStats(shape=shape, block_size=32, kv_blocks_total=1 << 12, max_model_len=max_model_len, **more)


def wish(header: str | None) -> dict[str, str]:
    """Headers of a request that wishes for a shape."""
    return {} if header is None else {PARALLELISM_HEADER: header}


@pytest.mark.parametrize(
    ("header", "degree"),
    [(None, None), ("auto", None), ("dp", 1), (" TP2 ", 2), ("tp4", 4), ("tp", 4)],
)
def test_a_header_names_a_degree(header: str | None, degree: int | None) -> None:
    assert read_options(wish(header), {}, (2, 4)).degree == degree


@pytest.mark.parametrize(
    ("header", "degrees"), [("tp8", (2, 4)), ("tp", ()), ("", (2,)), ("tp-2", (2,)), ("x" * 9999, (2,))]
)
def test_what_cannot_be_formed_is_refused_by_name(header: str, degrees: tuple[int, ...]) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_options(wish(header), {}, degrees)
    assert (caught.value.status, caught.value.param) == (400, PARALLELISM_HEADER)
    assert "dp" in caught.value.message and len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("body", "has_length"),
    [({}, False), ({"max_tokens": None}, False), ({"max_tokens": 5}, True), ({"max_completion_tokens": 5}, True),
     ({"max_output_tokens": 5}, True)],
)  # fmt: skip
def test_a_length_is_one_that_the_client_gave(body: dict[str, Any], has_length: bool) -> None:
    assert read_options(wish("dp"), body, ()).has_length is has_length


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({}, {}, ""),
        ({}, {"session_id": "a"}, "a"),
        ({"x-session-id": " b "}, {}, "b"),
        ({"x-pengserve-session": "b"}, {}, "b"),
        ({"x-dynamo-session-id": "c", "x-correlation-id": "d"}, {}, "c"),
        ({"x-correlation-id": "d"}, {}, "d"),
        ({"x-session-id": "a", "x-correlation-id": "d"}, {"session_id": "a"}, "a"),
        ({"x-correlation-id": "d" * 999}, {}, "d" * 128),
    ],
)
def test_a_session_is_the_bodys_or_a_headers(headers: dict[str, str], body: dict[str, Any], session: str) -> None:
    assert read_options(headers, body, ()).contract.session == session


@pytest.mark.parametrize(
    ("headers", "body", "names"),
    [
        ({"x-session-id": "b"}, {"session_id": "a"}, ("session_id", "x-session-id")),
        ({"x-session-id": "b", "x-dynamo-session-id": "c"}, {}, ("x-session-id", "x-dynamo-session-id")),
        ({"x-session-id": "b" * 129}, {}, ("x-session-id",)),
        ({}, {"session_id": 7}, ("session_id",)),
    ],
)
def test_two_sessions_or_a_bad_one_are_refused_by_name(
    headers: dict[str, str], body: dict[str, Any], names: tuple[str, ...]
) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_options(headers, body, ())
    assert caught.value.status == 400
    assert all(name in caught.value.message for name in names)


def two_shapes() -> tuple[Cluster, FakeLink, FakeLink]:
    """A dp instance, and the leader of a tp2 group."""
    cluster = Cluster(2)
    return cluster, cluster.connect(cluster.instances[0], stats()), cluster.connect(cluster.instances[1], stats("tp2"))


def test_a_wished_shape_is_kept() -> None:
    cluster, dp, tp2 = two_shapes()
    for number in range(4):
        cluster.request(number, 5, RequestOptions(degree=1 + number % 2))
    assert (len(dp.to_instance), len(tp2.to_instance)) == (2, 2)


def test_a_wish_waits_for_its_group_and_is_then_served_anywhere() -> None:
    cluster = Cluster(1)
    dp = cluster.connect(cluster.instances[0], stats())
    cluster.request(1, 5, TP2)
    cluster.passed_s += 1.9
    cluster.book.tend()
    assert cluster.book.num_waiting == 1
    assert cluster.book.demand() == Demand(num_waiting=1, wanted_degrees=((2, 1),))
    cluster.passed_s += 0.2
    cluster.book.tend()
    assert len(dp.to_instance) == 1
    assert cluster.book.demand() == Demand(num_running=1, wanted_degrees=((2, 1),))


def test_a_wish_is_served_as_soon_as_its_group_is_there() -> None:
    cluster = Cluster(1)
    link = cluster.connect(cluster.instances[0], stats())
    cluster.request(1, 5, TP2)
    link.stats = stats("tp2")
    cluster.book.tend()
    assert len(link.to_instance) == 1


def test_a_wish_does_not_wait_again_after_a_loss() -> None:
    cluster, dp, tp2 = two_shapes()
    cluster.request(1, 5, TP2)
    cluster.passed_s += 3.0
    cluster.instances[1].cut(0, refuses=True)
    cluster.deliver(tp2)
    assert len(dp.to_instance) == 1


def test_followers_take_nothing() -> None:
    cluster = Cluster(2)
    follower = cluster.connect(cluster.instances[0], stats("tp2", is_follower=True))
    cluster.request(1, 5)
    assert cluster.book.num_waiting == 1
    leader = cluster.connect(cluster.instances[1], stats("tp2"))
    assert (len(follower.to_instance), len(leader.to_instance)) == (0, 1)


def test_urgent_requests_go_to_the_widest_and_are_counted() -> None:
    cluster, dp, tp2 = two_shapes()
    cluster.request(1, 5, priority=-1)
    cluster.request(2, 5, priority=1)
    assert (len(tp2.to_instance), len(dp.to_instance)) == (1, 1), "the group of an urgent request is left to it"
    assert cluster.book.demand().num_priority == 1
    cluster.settle(10)
    assert cluster.book.demand() == Demand()


def test_the_urgent_leave_the_queue_first() -> None:
    cluster = Cluster(1)
    for number, priority in ((0, 0), (1, 1), (2, -1), (3, 0)):
        cluster.request(number, 5, priority=priority)
    cluster.connect(cluster.instances[0], stats())
    cluster.settle(1)
    assert list(cluster.instances[0].copies) == ["r2", "r0", "r3", "r1"]


def test_a_long_request_waits_for_a_wide_group_and_the_controller_hears_how_long() -> None:
    cluster = Cluster(2)
    cluster.max_model_len = 2048
    dp = cluster.connect(cluster.instances[0], stats(max_model_len=1024))
    cluster.request(2, 5, max_tokens=1500)
    cluster.request(4, 5, max_tokens=1000)
    assert len(dp.to_instance) == 1
    assert cluster.book.demand() == Demand(num_running=1, num_waiting=1, longest_waiting_tokens=1500 + len(PROMPT))
    wide = cluster.connect(cluster.instances[1], stats("tp2", max_model_len=2048))
    assert len(wide.to_instance) == 1
    assert cluster.book.demand().longest_waiting_tokens == 0


def test_kv_is_counted_in_the_blocks_of_the_shape() -> None:
    cluster = Cluster(1)
    cluster.max_model_len = 1 << 20
    small = InstanceStats(shape="tp2", block_size=64, kv_blocks_total=10, max_model_len=1 << 20)
    link = cluster.connect(cluster.instances[0], small)
    cluster.request(2, 5, max_tokens=640 - len(PROMPT) + 1)
    cluster.request(4, 5, max_tokens=640 - len(PROMPT))
    assert [len(link.to_instance), cluster.book.num_waiting] == [1, 1]


def test_a_request_without_a_length_needs_room_for_its_prompt_alone() -> None:
    cluster = Cluster(1)
    cluster.max_model_len = 2048
    dp = cluster.connect(cluster.instances[0], stats(max_model_len=1024))
    cluster.request(2, 5, RequestOptions(has_length=False), max_tokens=2048 - len(PROMPT))
    assert len(dp.to_instance) == 1


def test_no_request_asks_for_more_than_the_cluster_can_promise() -> None:
    cluster = Cluster(1)
    cluster.max_model_len = 1024
    dp = cluster.connect(cluster.instances[0], stats(max_model_len=1024))
    cluster.request(2, 5, max_tokens=5000)
    assert len(dp.to_instance) == 1


@pytest.mark.parametrize("has_length", [True, False])
def test_what_a_narrow_lane_cuts_short_goes_on_in_a_wide_one(has_length: bool) -> None:
    """A request is carried into a lane that is too small for all of it, which ends it at its own limit."""
    length, narrow_limit = 12, 8
    cluster = Cluster(2)
    cluster.max_model_len = 64
    narrow = cluster.connect(cluster.instances[0], stats(max_model_len=narrow_limit))
    wide = cluster.connect(cluster.instances[1], stats("tp2", max_model_len=64))
    cluster.pool.routes.discard(narrow.key)
    cluster.request(2, length, RequestOptions(has_length=has_length))
    wide.read()
    cluster.instances[1].carry(cluster.instances[0], ["r2"])
    cluster.deliver(wide)
    num_held = narrow_limit - len(PROMPT)
    cluster.lengths[2] = num_held  # this lane's answer ends here, with "length"
    for _ in range(num_held):
        cluster.instances[0].step()
    outputs = [narrow.to_ingress.popleft()[0] for _ in range(num_held)]
    cluster.lengths[2] = length
    book: Any = cluster.book
    accepted = [output for each in outputs for output in book.accept(narrow, [each])]
    assert len(accepted) == num_held and accepted[-1].new_token_ids
    if has_length:
        assert accepted[-1].finish_reason is None
        cluster.seen[2] = [token for output in accepted for token in output.new_token_ids]
        cluster.settle(20)
        assert len(cluster.seen[2]) == length
    else:
        assert accepted[-1].finish_reason is not None and len(book) == 0


def test_a_wait_for_a_wide_group_ends() -> None:
    cluster = Cluster(1, limits=LimitConfig(no_instance_timeout_s=5.0))
    cluster.connect(cluster.instances[0], stats(max_model_len=1024))
    cluster.request(2, 5, max_tokens=1500)
    cluster.passed_s += 6.0
    cluster.book.tend()
    assert list(cluster.failed) == ["r2"]


def test_a_request_whose_configuration_has_gone_ends_soon_and_one_with_an_instance_goes_on() -> None:
    cluster = Cluster(1)
    cluster.connect(cluster.instances[0])
    cluster.request(1, 5)
    cluster.is_superseded = True
    cluster.passed_s += 100.0
    cluster.book.tend()
    assert not cluster.failed, "it finishes on its old instance"
    cluster.instances[0].cut(0, refuses=True)
    cluster.settle(1)
    assert not cluster.failed, "the link may come back"
    cluster.passed_s += SUPERSEDED_WAIT_S + 1.0
    cluster.book.tend()
    assert isinstance(cluster.failed["r1"], RetryableRequestError), "503 with Retry-After, not a wait of minutes"
    assert "another configuration" in str(cluster.failed["r1"])


def test_each_copy_of_a_request_takes_its_contract_along() -> None:
    contract = Contract(priority=2, tenant="t")
    cluster = Cluster(2)
    first = cluster.connect(cluster.instances[0], stats())
    cluster.request(1, 5, RequestOptions(contract=contract))
    second = cluster.connect(cluster.instances[1], stats())
    cluster.instances[0].cut(0, refuses=True)
    cluster.deliver(first)
    assert first.contracts == second.contracts == [contract]
