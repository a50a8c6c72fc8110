"""Names of things. New types, so that a checker tells a slot from a count."""

from dataclasses import dataclass
from typing import NewType

"""Engine-internal request id, unique in the cluster."""

InstanceId = NewType("InstanceId", int)
"""Slot of an instance in the application, `[0, num_instances)`. A replacement takes over the slot of the dead one."""

Epoch = NewType("Epoch", int)
"""Version of the layout. Grows by one with every committed transition; messages with an older one are refused."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class InstanceKey:
    """One life of one instance: the slot and how often it was filled. Nothing is shared between two lives."""

    instance_id: InstanceId
    incarnation: int

    def __str__(self) -> str:
        return f"{self.instance_id}.{self.incarnation}"
