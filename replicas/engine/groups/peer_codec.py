"""How the messages that instances send each other are written: as msgpack, by vLLM's encoder, without pickle."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.vllm_seam import MsgpackDecoder, MsgpackEncoder

M = TypeVar("M", bound=msgspec.Struct)


class PeerWord(msgspec.Struct, kw_only=True, tag=True, tag_field="word"):
    """A word of a conversation; its name goes along."""


class Cancel(PeerWord):
    """What the conversation is about is called off, or has failed."""

    why: str


class PeerCodec(Generic[M]):
    """Encoder and decoder of one kind of messages; any thread may use its own."""

    def __init__(self, kind: type[M], what: str) -> None:
        """`what` names the kind in errors: "a switch"."""
        self._what = what
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(kind)

    def encode(self, message: M) -> Sequence[Buffer]:
        """Parts of a peer message."""
        return self._encoder.encode(message)

    def decode(self, parts: Sequence[Buffer]) -> M:
        """Inverse of `encode`.

        Raises:
            EngineError: it is no such message.
        """
        try:
            message: M = self._decoder.decode(parts)
        except Exception as error:  # vLLM's hooks raise what they come upon
            raise EngineError(f"a peer sent what is no message of {self._what} ({type(error).__name__})") from error
        return message
