"""What an instance knows of its peers, and the lanes and communicators it builds from that, before they are needed."""

import logging
import threading
from collections.abc import Callable
from functools import partial

from pengserve.planners.types.directory import GroupSpec, PeerDirectory
from pengserve.planners.types.errors import LinkLostError, StepError
from pengserve.planners.types.ids import NO_VERSION, InstanceKey
from pengserve.planners.types.layout import Group
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.step_thread import Submit

logger = logging.getLogger(__name__)

_BUILD_LANES_S = 60.0


class Wiring:
    """Follows the newest directory. `on_built` runs in the step thread whenever everything is as it says."""

    def __init__(self, member: Member, submit: Submit, on_built: Callable[[], None]) -> None:
        self._member, self._submit, self._on_built = member, submit, on_built
        self._directory = PeerDirectory(version=NO_VERSION, peers=(), groups=())
        self._building = threading.Lock()

    def connect(self, directory: PeerDirectory) -> None:
        """Takes a newer directory; returns at once. From any thread."""
        if directory.version > self._directory.version:
            self._directory = directory
            threading.Thread(target=self._build, args=(directory,), name="connect", daemon=True).start()

    def spec_of(self, group: Group, members: tuple[InstanceKey, ...]) -> GroupSpec:
        """The group of exactly these instances, each with its incarnation.

        Raises:
            StepError: the directory lists none.
        """
        for spec in self._directory.groups:
            if spec.members == members and spec.group == group:
                return spec
        raise StepError(f"instance {self._member.key} knows no group {group} of the instances in the plan")

    def group_named(self, name: str) -> Group | None:
        """The group whose communicators have this name; None where the directory lists none. From any thread."""
        return next((spec.group for spec in self._directory.groups if spec.name == name), None)

    def lost(self, key: InstanceKey) -> None:
        """Marks the groups with that peer as failed: without its connection no member can ask the others for a switch.

        Their communicators may be whole. The next round connects again. From any thread: a call that waits for the peer
        ends with an error.
        """
        for spec in self._directory.groups:
            if key in spec.members:
                self._member.pool.mark_failed(spec.name)

    def _build(self, directory: PeerDirectory) -> None:
        with self._building:
            if self._directory is not directory:
                return  # a newer one came meanwhile
            member = self._member
            try:
                member.network.connect(directory.peers, member.timeout_s)
            except LinkLostError as error:
                logger.warning("%s", error)  # groups with those peers fail, the others are built
            mine = [spec for spec in directory.groups if member.key in spec.members]
            built = threading.Event()
            self._submit(partial(member.lanes.registry.share_machine, directory.num_beside(member.key)))
            for spec in mine:
                self._submit(partial(member.lanes.registry.build, spec.group, spec.members.index(member.key)))
            self._submit(built.set)
            built.wait(_BUILD_LANES_S)
            member.pool.build(mine)
            for spec in mine:
                if why := member.pool.fault(spec.name):
                    why = f"members of a group cannot be connected ({why})"
                    self._submit(partial(member.lanes.refuse, spec.group.shape, why))
            self._submit(self._on_built)
