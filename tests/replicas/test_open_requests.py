"""A request's contract is known where the request is, and goes along with it."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

from pengserve.planners.types.contract import NO_CONTRACT, Contract, Pacing, Slo, SloPolicy
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.replicas.engine.lanes.handoff import Handoff
from pengserve.replicas.engine.movers.reshard import Traveller
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.engine.wire import AddRequest, Codec
from pengserve.replicas.open_requests import OpenRequests
from pengserve.replicas.switching.messages import MergeWave, SwitchCodec, SwitchMessage
from tests.support.vllm_requests import sent_request

CONTRACT = Contract(
    service_class="chat",
    priority=-3,
    slo=Slo(ttft_s=1.5, tbt_s=0.05, policy=SloPolicy.REJECT, pacing=Pacing.STEADY),
    queue_limit_s=9.0,
    tenant="t",
    session="s",
)


class FakeServer:
    """The one ingress of two instances, which is client 0 of each."""

    def client_id(self, client_index: int) -> str:
        return "ingress" if client_index == 0 else ""

    def client_index(self, client_id: str) -> int | None:
        return 0 if client_id == "ingress" else None

    def send(self, *frame: Any) -> None:
        pass


def open_requests() -> OpenRequests:
    server: Any = FakeServer()
    return OpenRequests(server)


def asked(request_id: str) -> Any:
    return sent_request(request_id, [1, 2, 3], SamplingParams(max_tokens=7))


@pytest.mark.parametrize("contract", [None, Contract(priority=1), CONTRACT])
def test_it_comes_over_the_request_channel_as_it_was_sent(contract: Contract | None) -> None:
    codec = Codec()
    add = codec.decode_add(codec.encode_add(AddRequest(asked("r"), [4], False, 0, contract)))
    assert add.contract == contract


def test_it_goes_along_to_another_instance() -> None:
    here, there = open_requests(), open_requests()
    here.add(asked("r"), CONTRACT)
    here.add(asked("plain"))
    for request_id, expected in (("r", CONTRACT), ("plain", NO_CONTRACT)):
        handoff = here.handoff(Request.from_engine_core_request(asked(request_id), None))
        assert isinstance(handoff, Handoff)
        codec = SwitchCodec()
        wave = MergeWave(travellers=[Traveller(request_id, 1, [4], handoff)], lease=[], given_up=[], freed=[])
        word = codec.decode(codec.encode(SwitchMessage("1", wave))).word
        assert isinstance(word, MergeWave)
        assert there.welcome(word.travellers[0].handoff) == 0
        assert there.contract(request_id) == expected
    here.moved(["r"], InstanceKey(instance_id=InstanceId(1), incarnation=0), carried=True)
    assert here.contract("r") == NO_CONTRACT


def test_how_much_of_the_time_to_the_first_token_is_gone_counts_from_the_ingress() -> None:
    """It goes on where a request is sent again, as its ingress says how long it has waited."""
    server: Any = FakeServer()
    now_s = [100.0]
    requests = OpenRequests(server, clock=lambda: now_s[0])
    requests.add(asked("r"), replace(CONTRACT, waited_s=0.3))
    requests.add(asked("plain"), Contract(slo=Slo(tbt_s=0.1)))
    assert requests.num_hurried == 1 and requests.gone("r") == pytest.approx(0.3 / 1.5)
    now_s[0] += 1.5
    assert requests.gone("r") == pytest.approx(1.2) and requests.gone("plain") == requests.gone("unknown") == 0.0
    requests.remove(0, ["r"])
    assert requests.num_hurried == 0 and requests.gone("r") == 0.0


def test_it_is_forgotten_with_its_request() -> None:
    requests = open_requests()
    for end in (lambda: requests.remove(0, ["r"]), lambda: requests.remove_client(0)):
        requests.add(asked("r"), CONTRACT)
        end()
        assert requests.contract("r") == NO_CONTRACT and not requests._contracts


def test_a_new_order_holds_for_one_that_is_still_being_prepared_and_where_it_goes_on() -> None:
    requests = open_requests()
    requests.add(asked("r"))
    prepared = Request.from_engine_core_request(asked("r"), None)
    before = prepared.arrival_time
    requests.order(prepared)
    assert prepared.arrival_time == before, "nothing was told yet"
    requests.reorder(1, [("r", 9, 9.0)])
    requests.reorder(0, [("r", -2, 0.25), ("gone", 0, 0.0)])
    requests.order(prepared)
    assert (prepared.priority, prepared.arrival_time) == (-2, 0.25)
    handoff = requests.handoff(prepared)
    assert isinstance(handoff, Handoff)
    assert (handoff.request.priority, handoff.request.arrival_time) == (-2, 0.25)


def test_what_ingresses_are_to_send_again_is_counted() -> None:
    requests = open_requests()
    for request_id in ("goes", "also", "carried", "stays"):
        requests.add(asked(request_id))
    requests.moved(["goes", "also", "unknown"], None, carried=False)
    requests.moved(["carried"], InstanceKey(instance_id=InstanceId(1), incarnation=0), carried=True)
    assert requests.num_sent_back == 2
