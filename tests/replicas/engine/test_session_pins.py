"""Laws of pins, over vLLM's own scheduler and a clock that the test moves: no model runs."""

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

from pengserve.planners.types.contract import NO_CONTRACT, Contract
from pengserve.replicas.engine.tiers.session_pins import MAX_SHARE, SessionPins
from pengserve.replicas.engine.vllm_seam import ModelRunnerOutput, Request
from tests.support.vllm_schedulers import capacity_of, scheduler_handle

pytestmark = pytest.mark.slow

BLOCK, NUM_BLOCKS, PIN_S = 16, 40, 60.0


class Engine:
    """A scheduler whose requests end with their first token."""

    def __init__(self) -> None:
        capacity = capacity_of(NUM_BLOCKS, BLOCK, max_num_seqs=8, max_model_len=600)
        self.handle = scheduler_handle(capacity, max_num_batched_tokens=600, prefix_caching=True)
        self.contracts: dict[str, Contract] = {}
        self.now_s = 0.0
        self.pins = SessionPins(self.handle, self, PIN_S, lambda: self.now_s)

    def contract(self, request_id: str) -> Contract:
        return self.contracts.get(request_id, NO_CONTRACT)

    def request(self, name: str, num_tokens: int, text: str) -> Request:
        """`text`: requests of one share their prefix."""

        def hashes(request: Request) -> list[bytes]:
            return [f"{text}{i}".encode() for i in range(len(request.block_hashes), request.num_tokens // BLOCK)]

        return Request(name, [1] * num_tokens, SamplingParams(max_tokens=1), None, block_hasher=hashes)

    def answer(self, name: str, num_tokens: int, *, text: str = "", session: str = "") -> None:
        if session:
            self.contracts[name] = Contract(session=session)
        request = self.request(name, num_tokens, text or name)
        self.handle.add(request)
        self.pins.began(request)
        self.pins.make_room(-(-num_tokens // BLOCK) + 1)
        output = self.handle.schedule()
        ids = list(output.num_scheduled_tokens)
        assert ids == [name]
        outputs = self.handle.update(output, ModelRunnerOutput(ids, {name: 0}, [[7]]))
        self.pins.ended(outputs.values())

    def num_cached(self, text: str, num_tokens: int) -> int:
        return self.handle.cached_tokens(self.request("look", num_tokens, text))


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_session_s_prefix_outlives_what_comes_after_it(engine: Engine) -> None:
    for session in ("", "talk"):
        engine.answer(f"first {session}", 160, session=session)
        for index in range(4):
            engine.answer(f"other {session} {index}", 400)
    assert engine.num_cached("first ", 161) == 0
    assert engine.num_cached("first talk", 161) == 160
    assert engine.pins.num_blocks() == 10


def test_a_pin_ends_with_its_time_or_with_the_next_turn(engine: Engine) -> None:
    engine.answer("first", 160, text="t", session="talk")
    engine.now_s = PIN_S / 2
    engine.answer("second", 320, text="t", session="talk")
    assert (engine.pins.num_sessions, engine.pins.num_blocks()) == (1, 20)
    engine.now_s = PIN_S + 1
    engine.pins.make_room(0)
    assert engine.pins.num_sessions == 1, "its time began with the newest answer"
    engine.now_s = 2 * PIN_S
    engine.pins.make_room(0)
    assert engine.pins.num_sessions == 0 and engine.handle.num_free() == NUM_BLOCKS
    assert engine.num_cached("t", 321) == 320, "it stays cached as any other prefix"


def test_pins_give_way_to_requests_and_have_a_share_at_most(engine: Engine) -> None:
    for index in range(6):
        engine.answer(str(index), 80, session=f"s{index}")
        assert engine.pins.num_blocks() <= MAX_SHARE * (NUM_BLOCKS + 1)
    assert engine.pins.num_sessions == 4, "the oldest ones have ended"
    engine.answer("long", 590)
    assert engine.handle.num_free() >= NUM_BLOCKS - 20
    engine.pins.end_all()
    assert engine.handle.num_free() == NUM_BLOCKS
