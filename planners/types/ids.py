"""Names of things. New types, so that a checker tells a slot from a count."""

from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Version:
    """Of what a controller gives out: the controller's term first, then a count within it. Newer ones are greater.

    Terms come from a store that all controllers of an application share, so no clock is involved.
    """

    term: int
    counter: int

    def __str__(self) -> str:
        return f"{self.term}.{self.counter}"

    @property
    def next(self) -> "Version":
        """The version after this one, of the same controller."""
        return replace(self, counter=self.counter + 1)


NO_VERSION = Version(term=0, counter=0)
"""Older than all that a controller gives out: terms begin at 1."""
