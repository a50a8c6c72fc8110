"""The drain of one instance, as operators see it."""

from dataclasses import dataclass
from enum import StrEnum

from pengserve.planners.types.ids import InstanceKey


class DrainPhase(StrEnum):
    """How far a drain is."""

    LEAVING = "leaving"  # it is a member of a group, which serves on until a switch has dissolved it
    MOVING = "moving"  # running requests move to other instances, or end
    ENDING = "ending"  # nothing runs there any more, and its process is being ended
    DONE = "done"  # its process has ended; the slot stays empty until `undrain`


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOperation:
    """The drain of one life. Asking for it again gives the same operation, as it is then."""

    id: str
    key: InstanceKey
    phase: DrainPhase
    num_left: int  # requests that are still there
    safe_to_delete: bool  # nothing of the instance is left: its machine may go
