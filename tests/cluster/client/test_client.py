"""The SDK against a real HTTP server: the same laws for the blocking and the async client."""

import inspect
import socket

import pytest

from pengserve.client import (
    AsyncPengServe,
    PengServe,
    PengServeAPIError,
    PengServeConnectionError,
    PengServeError,
    PengServeTimeoutError,
)
from pengserve.planners.types.drains import DrainPhase
from pengserve.planners.types.snapshot import SwitchRecord
from tests.cluster.client.cluster_server import (
    ADMIN_KEY,
    ClusterState,
    cluster_server,
    instance,
    layout_view,
    snapshot,
    some_events,
)

ALONE = "dp@(0) dp@(1)"
FAILED = SwitchRecord(
    plan_id="m1", what="merge tp2@(0,1) (carry)", phase="aborted", why="asked for", started_s=999.0,
    failure="a member is busy",
)  # fmt: skip


class _Blocking:
    """`PengServe` behind the async client's face, so that one test drives both."""

    def __init__(self, *args, **options) -> None:
        self.inner = PengServe(*args, **options)

    def __getattr__(self, name):
        method = getattr(self.inner, name)

        async def call(*args, **options):
            return method(*args, **options)

        return call


@pytest.fixture(params=[_Blocking, AsyncPengServe], ids=["blocking", "async"])
def connect(request):
    """Makes a client of either kind."""
    return request.param


@pytest.fixture
def state():
    """A server with two instances and five events."""
    state = ClusterState(snapshots=[snapshot(instance(0, num_running=2), instance(1))], events=some_events(5))
    with cluster_server(state):
        yield state


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


async def test_values_arrive_as_the_values_they_are(connect, state):
    client = connect(state.url, admin_key=ADMIN_KEY)
    assert await client.status() == state.snapshots[0]
    assert await client.events() == tuple(state.events)
    assert await client.events(after=2, limit=2) == tuple(state.events[2:4])
    assert await client.routing() == state.routing
    assert await client.models() == ("demo",)
    await client.close()


async def test_drain_passes_its_time_and_its_outcome(connect, state):
    client = connect(state.url, admin_key=ADMIN_KEY)
    assert await client.drain(timeout_s=1.5) is True
    assert state.drained_with_s == [1.5]


async def test_an_instance_is_drained_and_comes_back(connect, state):
    client = connect(state.url, admin_key=ADMIN_KEY)
    first = await client.drain_instance(1, 2.5, wait=False)
    assert (first.id, first.phase, first.num_left) == ("drain-1.1", DrainPhase.MOVING, 2)
    state.drain_phases = [DrainPhase.MOVING, DrainPhase.ENDING, DrainPhase.DONE]
    assert (await client.drain_instance(1, 2.5)).safe_to_delete
    assert state.drained_with_s == [2.5, 2.5] and state.drain_phases == [DrainPhase.DONE]
    assert (await client.drain_operation(1)).phase is DrainPhase.DONE
    await client.undrain(1)
    assert state.undrained == [1]


async def test_the_layout_arrives_as_the_value_it_is(connect, state):
    state.layouts = [layout_view("tp2@(0,1)", "tp2@(0,1)", last=FAILED)]
    assert await connect(state.url, admin_key=ADMIN_KEY).layout() == state.layouts[0]


async def test_set_layout_returns_once_it_stands(connect, state):
    before, after = layout_view(ALONE, "tp2@(0,1)"), layout_view("tp2@(0,1)", "tp2@(0,1)", epoch=4)
    state.layouts = [before, before, after]
    client = connect(state.url, admin_key=ADMIN_KEY)
    assert await client.set_layout("tp2", strategy="hard", timeout_s=10) == after
    assert state.layouts_asked == [{"layout": "tp2", "strategy": "hard"}]
    assert state.layouts == [after]


async def test_set_layout_without_waiting_and_auto_layout_ask_once(connect, state):
    before = layout_view(ALONE, "tp2@(0,1)")
    state.layouts = [before]
    client = connect(state.url, admin_key=ADMIN_KEY)
    assert await client.set_layout("tp2", wait=False) == before
    state.layouts = [layout_view(ALONE)]
    assert (await client.auto_layout()).policy.is_auto
    assert state.layouts_asked == [{"layout": "tp2", "strategy": "carry"}, {"layout": "auto"}]


async def test_a_layout_that_does_not_come_says_why(connect, state):
    state.layouts = [layout_view(ALONE, "tp2@(0,1)", last=FAILED)]
    client = connect(state.url, admin_key=ADMIN_KEY)
    with pytest.raises(
        PengServeTimeoutError, match=r"not tp2 after 0\.1 s.*failed, and is tried again: a member is busy"
    ):
        await client.set_layout("tp2", timeout_s=0.1)


@pytest.mark.parametrize("since", [layout_view(ALONE), layout_view(ALONE, ALONE)], ids=["auto", "another"])
async def test_nobody_waits_for_a_layout_that_somebody_else_has_replaced(connect, state, since):
    state.layouts = [layout_view(ALONE, "tp2@(0,1)"), since]
    with pytest.raises(PengServeTimeoutError, match="another request has replaced the layout"):
        await connect(state.url, admin_key=ADMIN_KEY).set_layout("tp2", timeout_s=10)


async def test_an_impossible_layout_is_refused_with_the_servers_words(connect, state):
    state.layouts = [layout_view(ALONE)]
    with pytest.raises(PengServeAPIError, match="choose dp") as caught:
        await connect(state.url, admin_key=ADMIN_KEY).set_layout("tp9")
    assert caught.value.status_code == 400


async def test_not_ready_is_an_answer_and_wait_ready_outlasts_it(connect, state):
    state.ready_after = 3
    client = connect(state.url)
    assert await client.ready() is False
    assert (await client.readiness()).why == "no instance is ready"
    await client.wait_ready(timeout_s=10)
    assert await client.ready() is True


async def test_wait_ready_says_what_was_missing(connect, state):
    state.ready_after = 10**6
    with pytest.raises(PengServeTimeoutError, match="no instance is ready"):
        await connect(state.url).wait_ready(timeout_s=0.2)


async def test_wait_ready_counts_a_refused_connection_as_not_ready_yet(connect):
    with pytest.raises(PengServeTimeoutError, match="cannot connect"):
        await connect(unused_url()).wait_ready(timeout_s=0.2)


async def test_a_refusal_carries_status_message_and_request_id(connect, state):
    with pytest.raises(PengServeAPIError) as caught:
        await connect(state.url, admin_key="wrong").status()
    assert (caught.value.status_code, caught.value.request_id) == (401, "req-401")
    assert "wants an admin key" in str(caught.value)
    assert "wrong" not in repr(caught.value).replace("missing or wrong", "")


async def test_nobody_there_is_one_clear_sentence(connect):
    url = unused_url()
    with pytest.raises(PengServeConnectionError, match=f"cannot connect to {url}: is `pengserve up` running there"):
        await connect(url).status()
    assert await connect(url).live() is False


async def test_a_server_that_is_no_pengserve_is_recognised(connect, state):
    client = connect(state.url + "/v1/models/..%2F..", admin_key=ADMIN_KEY)
    with pytest.raises(PengServeAPIError, match="no PengServe cluster answers"):
        await client.status()


async def test_an_answer_of_another_form_names_the_field(connect, state):
    state.replies["/cluster/events"] = {"events": [{"seq": 1}]}
    with pytest.raises(PengServeAPIError, match=r"Event\.time_s is missing"):
        await connect(state.url, admin_key=ADMIN_KEY).events()


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
async def test_common_spellings_of_the_address_are_one(connect, state, ending):
    assert await connect(state.url + ending).live() is True


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(PengServeError, match="is not an address"):
        PengServe(url)


def test_openai_clients_point_at_this_server(state):
    openai = pytest.importorskip("openai")
    with PengServe(state.url, api_key="k") as client, client.openai(max_retries=0) as remote:
        assert isinstance(remote, openai.OpenAI)
        assert (remote.api_key, remote.max_retries) == ("k", 0)
        assert [model.id for model in remote.models.list()] == ["demo"]
    assert isinstance(AsyncPengServe(state.url).openai(), openai.AsyncOpenAI)


async def test_context_managers_close(state):
    with PengServe(state.url) as blocking:
        assert blocking.live()
    with pytest.raises(RuntimeError):
        blocking.status()
    async with AsyncPengServe(state.url) as client:
        assert await client.live()


def test_both_clients_have_the_same_calls_and_arguments():
    for name, method in inspect.getmembers(PengServe, inspect.isfunction):
        if not name.startswith("_") or name == "__init__":
            twin = getattr(AsyncPengServe, name)
            assert list(inspect.signature(method).parameters) == list(inspect.signature(twin).parameters), name


def test_no_key_shows_in_a_representation(state):
    client = PengServe(state.url, api_key="hidden-1", admin_key="hidden-2")
    assert "hidden" not in repr(vars(client))
