"""What members say to each other about one plan, from one member's side."""

import logging
import queue
import time
from typing import cast

from pengserve.planners.types.errors import EngineError, LinkLostError, PengServeError, StepError, one_line
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.switching.member import SWITCH, Member
from pengserve.replicas.switching.messages import Cancel, SomeWord, SwitchCodec, SwitchMessage, Word

logger = logging.getLogger(__name__)


class CalledOff(StepError):
    """Another member has called the switch off, and says why."""


def foreseen(plan: SwitchPlan, error: Exception) -> PengServeError:
    """`error` as one that PengServe raises on purpose. Any other leaves its traceback in the log."""
    if isinstance(error, PengServeError):
        return error
    logger.error("the %s %s failed", plan.verb, plan.plan_id, exc_info=error)
    return EngineError(one_line(error))


class Conversation:
    """While it waits for a word, for the member's time-out at most, the step thread does nothing else."""

    def __init__(self, member: Member, plan: SwitchPlan) -> None:
        self._member, self._plan = member, plan
        self._codec = SwitchCodec()

    def say(self, to: InstanceKey, word: Word) -> None:
        """Sends one word.

        Raises:
            LinkLostError: that member is gone.
        """
        message = SwitchMessage(self._plan.plan_id, word)
        self._member.network.send(to, SWITCH, self._codec.encode(message))

    def tell_all(self, word: Word) -> None:
        """Leader: sends one word to every follower.

        Raises:
            LinkLostError: one of them is gone; others may have been told.
        """
        for key in self._plan.members[1:]:
            self.say(key, word)

    def cancel(self, why: str) -> None:
        """Tells all other members that the plan is called off, and why. Never raises."""
        for key in self._plan.members:
            if key != self._member.key:
                try:
                    self.say(key, Cancel(why=why))
                except LinkLostError:
                    logger.debug("instance %s is gone and is not told that the plan is called off", key)

    def catch_up(self) -> None:
        """Forgets words about other plans, and takes note where this one cannot go on.

        Raises:
            CalledOff: a member has said so.
            EngineError: a member is gone.
        """
        connected = self._member.network.peers()
        for _ in range(self._member.inbox.qsize()):
            key, message = self._member.inbox.get_nowait()
            if message is not None or key not in connected:  # one that is connected was lost before this plan
                self._require(key, message)

    def hear(self, *words: type[SomeWord]) -> tuple[InstanceKey, SomeWord]:
        """The next word about this plan, and who said it.

        Raises:
            CalledOff: it is a Cancel.
            StepError: none came in time.
            EngineError: a member is gone, or says what does not belong here.
        """
        due = " or ".join(word.__name__ for word in words)
        deadline_s = time.monotonic() + self._member.timeout_s
        while True:
            try:
                key, message = self._member.inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise StepError(f"no {due} came within {self._member.timeout_s:g} s") from None
            if (word := self._require(key, message)) is None:
                continue
            if not isinstance(word, words):
                raise EngineError(f"instance {key} said {type(word).__name__} where {due} was due")
            return key, cast(SomeWord, word)

    def gather(self, word: type[SomeWord]) -> dict[InstanceKey, SomeWord]:
        """Leader: one such word of every follower. Raises as `hear`."""
        heard: dict[InstanceKey, SomeWord] = {}
        while len(heard) < len(self._plan.members) - 1:
            key, found = self.hear(word)
            heard[key] = found
        return heard

    def _require(self, key: InstanceKey, message: SwitchMessage | None) -> Word | None:
        """The word, where it is about this plan. Raises where the plan cannot go on."""
        if message is None:
            if key in self._plan.members:
                raise EngineError(f"instance {key} was lost during the switch")
            return None
        if message.plan_id != self._plan.plan_id:
            return None
        if isinstance(message.word, Cancel):
            raise CalledOff(message.word.why)
        return message.word
