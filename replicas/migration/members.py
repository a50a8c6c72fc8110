"""How members of groups hear of migrations: words to leaders go on to `Migrations`, others are carried out here."""

import logging
from collections.abc import Callable, Sequence

from pengserve.planners.types.errors import EngineError, LinkLostError, PengServeError, one_line
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.instance_lanes import Lanes
from pengserve.replicas.migration.messages import (
    Expect,
    Failed,
    MigrationCodec,
    MigrationMessage,
    Name,
    Over,
    Send,
    Sent,
    Word,
    Written,
)
from pengserve.replicas.migration.receiving import Receivers
from pengserve.replicas.migration.sending import Senders
from pengserve.replicas.migration.sides import side_of
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.step_thread import Submit

logger = logging.getLogger(__name__)

MIGRATE, MIGRATE_KV = "migrate", "migrate-kv"  # kinds of peer messages: words, and pieces of KV

Hear = Callable[[InstanceKey, Name, Word], None]


class Members:
    """This instance as one member of its group, which it may lead. Belongs to the step thread."""

    def __init__(self, member: Member, submit: Submit, hear: Hear, on_lost: Callable[[InstanceKey], None]) -> None:
        """`hear` takes what is said to a leader; `on_lost` is told of peers that are gone."""
        self._member, self._submit, self._hear, self._on_lost = member, submit, hear, on_lost
        self.on_piece: Callable[[Name], None] = lambda name: None  # KV of a migration has come here
        self._codec = MigrationCodec()
        self.senders = Senders(member, self._send_piece)
        self.receivers = Receivers(member, self._written)
        member.network.subscribe(MIGRATE, self._on_word, lambda key: submit(lambda: self._lost(key)))
        member.network.subscribe(MIGRATE_KV, self._on_piece)

    def say(self, to: InstanceKey, name: Name, word: Word) -> None:
        """Sends a word, or hears it where it is to this instance.

        Raises:
            LinkLostError: `to` is gone.
        """
        if to == self._member.key:
            self._hear(to, name, word)
        else:
            self._member.network.send(to, MIGRATE, self._codec.encode(MigrationMessage(name, word)))

    # What is said and sent here ---------------------------------------------------------------------------------------

    def _on_word(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        """In a reader thread."""
        message = MigrationCodec().decode(parts)
        self._submit(lambda: self._take(key, message.name, message.word))

    def _take(self, key: InstanceKey, name: Name, word: Word) -> None:
        match word:
            case Send():
                self._guarded(name, lambda: self._send(name, word))
            case Expect():
                self._guarded(name, lambda: self._expect(name, word))
            case Over():
                self._over(name, word)
            case _:
                self._hear(key, name, word)

    def _send(self, name: Name, word: Send) -> None:
        reached("sharing-last" if word.is_last else "sharing")
        self.senders.send(
            name, word, lambda number: self._tell_leader(name, Sent(number=number)), lambda why: self._fail(name, why)
        )

    def _expect(self, name: Name, word: Expect) -> None:
        if (running := self._member.lanes.running) is None:
            raise EngineError(f"instance {self._member.key} is in no group any more")
        running.accept_lease(word.lease)
        reached("expecting")
        self.receivers.expect(name, word)

    def _over(self, name: Name, word: Over) -> None:
        if (running := self._member.lanes.running) is not None:
            running.accept_lease(word.lease)
        self.senders.end(name)
        self.receivers.end(name)

    def _on_piece(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        """In a reader thread."""
        name = _read_name(parts[0])

        def take() -> None:
            self.on_piece(name)
            self.receivers.piece(name, key, parts[1:])

        self._submit(lambda: self._guarded(name, take))

    def _send_piece(self, to: InstanceKey, name: Name, parts: Sequence[Buffer]) -> None:
        key, number = name
        head = b"%d %d %d" % (key.instance_id, key.incarnation, number)
        self._member.network.send(to, MIGRATE_KV, [head, *parts])

    def _written(self, name: Name, number: int) -> None:
        self._tell_leader(name, Written(number=number))

    # Faults and ends --------------------------------------------------------------------------------------------------

    def _lost(self, key: InstanceKey) -> None:
        for name in self.receivers.lost(key):
            self._tell_leader(name, Failed(why=f"instance {key} was lost"))
        self._on_lost(key)

    def fail_all(self, why: str) -> None:
        """This member takes part in nothing more; its leader calls it off."""
        for name in (*self.senders.names, *self.receivers.names):
            self._fail(name, why)

    def end_all(self) -> None:
        """As `fail_all`, where there is no group that could be told."""
        for name in self.senders.names:
            self.senders.end(name)
        for name in self.receivers.names:
            self.receivers.end(name)

    def _guarded(self, name: Name, work: Callable[[], None]) -> None:
        """A fault of a migration ends that migration, never the instance."""
        try:
            work()
        except Exception as error:
            if not isinstance(error, PengServeError):
                logger.exception("a share of a request's KV could not be moved")
            self._fail(name, one_line(error))

    def _fail(self, name: Name, why: str) -> None:
        self.senders.end(name)
        self.receivers.end(name)
        self._tell_leader(name, Failed(why=why))

    def _tell_leader(self, name: Name, word: Word) -> None:
        try:
            self.say(side_of(self._member).leader, name, word)
        except LinkLostError as error:
            logger.debug("%s; its group ends", error)


def why_never(lanes: Lanes) -> str:
    """Why KV of running requests cannot leave this engine, or come to it; empty where it can."""
    config = lanes.dp.pristine_config
    if config is None or config.speculative_config is not None:
        return "requests do not move with speculative decoding"
    if lanes.dp.num_kv_groups != 1:
        return "requests of this model move only where all its layers keep KV alike"
    try:
        lanes.dp_view()
    except Exception as error:
        return f"KV of this attention backend cannot be moved ({one_line(error)})"
    return ""


def _read_name(part: memoryview) -> Name:
    instance_id, incarnation, number = map(int, bytes(part).split())
    return InstanceKey(instance_id=InstanceId(instance_id), incarnation=incarnation), number
