"""What planners decide. A plan is a frozen value with an id, the epoch it was made for, and an inverse."""

from dataclasses import dataclass

from pengserve.planners.types.ids import Epoch, InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacePlan:
    """Fill the slots of dead instances again."""

    plan_id: str
    epoch: Epoch
    slots: tuple[InstanceId, ...]
    why: str
