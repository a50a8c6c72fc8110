"""What members say to each other during a switch.

    leader                            follower
    DRAIN  ------------------------>           (sequential, soft) let running requests end
           <------------------------  DRAINED
    RETURN ------------------------>           (restore) let weights come back beside the steps
    MEET   ------------------------>           stop at a step boundary (a pipeline that grows: its leader tells its
                                               followers, after its last step)
           <------------------------  MET      free blocks; on a merge, the requests that can be carried
    PLACE  ------------------------>           (restore) give these requests blocks where they go on
           <------------------------  PLACED   those that found room, with their blocks
    WAVE   ------------------------>           move these requests' KV (zero or more waves); on a merge, release
                                               those that are given up
           <------------------------  DONE     free blocks, what was refused
    COMMIT ------------------------>           the new shape holds from the next step on

Either side may say CANCEL instead, with a reason. Before the first wave that leaves everything as it was.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.reshard import Traveller
from pengserve.replicas.engine.vllm_seam import MsgpackDecoder, MsgpackEncoder


class MessageKind(StrEnum):
    """What a message is for."""

    DRAIN = "drain"
    DRAINED = "drained"
    RETURN = "return"
    MEET = "meet"
    MET = "met"
    PLACE = "place"
    PLACED = "placed"
    WAVE = "wave"
    DONE = "done"
    COMMIT = "commit"
    CANCEL = "cancel"


class SwitchMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message; most fields belong to one kind only."""

    kind: MessageKind
    plan_id: str
    plan: SwitchPlan | None = None  # DRAIN, MEET
    num_free: int = 0  # MET, DONE: blocks of `dp` that are free; of a drop, blocks of `lease` that have memory
    num_lendable: int = 0  # MET, of a merge: blocks of `dp` that no paused request keeps
    travellers: list[Traveller] = []  # MET: requests that can be carried; PLACE, PLACED, WAVE: requests that move
    lease: list[int] = []  # WAVE: logical blocks that join the lane with it; of a drop, in the order they get memory
    release: list[int] = []  # WAVE: logical blocks that leave the tp lane before it
    refused: list[str] = []  # requests that found no room. Merge, WAVE: their members release them; split: DONE
    why: str = ""  # CANCEL


class SwitchCodec:
    """Encoder and decoder; any thread may use its own."""

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(SwitchMessage)

    def encode(self, message: SwitchMessage) -> Sequence[Buffer]:
        """Parts of a peer message."""
        return self._encoder.encode(message)

    def decode(self, parts: Sequence[Buffer]) -> SwitchMessage:
        """Inverse of `encode`. Raises msgspec.MsgspecError on what is no such message."""
        message: SwitchMessage = self._decoder.decode(parts)
        return message
