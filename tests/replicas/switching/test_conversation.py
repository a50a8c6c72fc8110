"""Laws of a conversation about one plan: what is heard, what is passed over, and what ends it."""

import queue
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from pengserve.planners.types.errors import EngineError, LinkLostError, StepError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.replicas.switching.conversation import CalledOff, Conversation, foreseen
from pengserve.replicas.switching.messages import (
    Cancel,
    Commit,
    MergeDone,
    RestoreDone,
    SwitchCodec,
    SwitchMessage,
    Word,
)
from tests.replicas.switching.members import KEYS, plan

STRANGER = InstanceKey(instance_id=InstanceId(9), incarnation=1)
DONE = MergeDone(num_free=4)


class Ears:
    """A member's inbox and connections; `sent` is what it has said."""

    def __init__(self, own: InstanceKey = KEYS[0], timeout_s: float = 0.05) -> None:
        self.sent: list[tuple[InstanceKey, Word]] = []
        self.connected, self.gone = set(KEYS), set[InstanceKey]()
        network = SimpleNamespace(send=self._send, peers=lambda: tuple(self.connected))
        self.member: Any = SimpleNamespace(key=own, network=network, timeout_s=timeout_s, inbox=queue.SimpleQueue())
        self.talk = Conversation(self.member, plan(1))

    def _send(self, key: InstanceKey, kind: str, parts: Any) -> None:
        if key in self.gone:
            raise LinkLostError("gone")
        self.sent.append((key, SwitchCodec().decode([bytes(part) for part in parts]).word))

    def put(self, key: InstanceKey, word: Word | None, plan_id: str = "1") -> None:
        self.member.inbox.put((key, SwitchMessage(plan_id, word) if word is not None else None))


def test_words_about_other_plans_and_the_loss_of_strangers_are_passed_over() -> None:
    ears = Ears()
    ears.put(KEYS[1], Cancel(why="of another"), plan_id="0")
    ears.put(STRANGER, None)
    ears.put(KEYS[1], DONE)
    assert ears.talk.hear(Commit, MergeDone) == (KEYS[1], DONE)


@pytest.mark.parametrize(
    ("word", "error", "match"),
    [
        (Cancel(why="no room"), CalledOff, "no room"),
        (None, EngineError, "was lost"),
        (RestoreDone(), EngineError, "said RestoreDone where MergeDone was due"),
    ],
)
def test_what_ends_a_wait(word: Word | None, error: type[Exception], match: str) -> None:
    ears = Ears()
    ears.put(KEYS[1], word)
    with pytest.raises(error, match=match):
        ears.talk.hear(MergeDone)


def test_words_that_are_passed_over_make_no_wait_longer() -> None:
    ears = Ears(timeout_s=0.2)
    for _ in range(100):
        ears.put(KEYS[1], DONE, plan_id="0")
    started_s = time.monotonic()
    with pytest.raises(StepError, match=r"no MergeDone came within 0\.2 s"):
        ears.talk.hear(MergeDone)
    assert time.monotonic() - started_s >= 0.2


def test_the_leader_hears_one_word_of_every_follower() -> None:
    ears = Ears()
    ears.put(KEYS[1], DONE)
    ears.put(KEYS[1], RestoreDone())  # of the next round: not heard yet
    assert ears.talk.gather(MergeDone) == {KEYS[1]: DONE}
    assert ears.talk.gather(RestoreDone) == {KEYS[1]: RestoreDone()}


def test_a_plan_that_was_called_off_while_the_member_was_busy_does_not_begin() -> None:
    ears = Ears()
    ears.put(KEYS[1], DONE, plan_id="0")
    ears.talk.catch_up()
    assert ears.member.inbox.empty(), "words about other plans are forgotten"
    ears.put(KEYS[1], Cancel(why="late"))
    with pytest.raises(CalledOff, match="late"):
        ears.talk.catch_up()


def test_only_a_member_that_is_not_connected_is_missed() -> None:
    """One that was lost before this plan, and has come back, takes part."""
    ears = Ears()
    ears.put(KEYS[1], None)
    ears.talk.catch_up()
    ears.put(KEYS[1], None)
    ears.connected.discard(KEYS[1])
    with pytest.raises(EngineError, match="was lost"):
        ears.talk.catch_up()


def test_calling_a_plan_off_never_fails() -> None:
    ears = Ears()
    ears.talk.cancel("no room")
    assert ears.sent == [(KEYS[1], Cancel(why="no room"))]
    ears.gone.add(KEYS[1])
    ears.talk.cancel("no room")


def test_an_unforeseen_error_becomes_one_for_people_and_leaves_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    error = StepError("no room")
    assert foreseen(plan(1), error) is error and not caplog.records
    assert str(foreseen(plan(1), KeyError("x"))) == "KeyError: 'x'"
    assert [record.exc_info is not None for record in caplog.records] == [True]
