"""Communicators of every group this instance may be asked to join, built before a switch needs them.

Flying Serving section 4.3. The groups are independent: one that fails, or loses a member, is built anew under a new
name while the others go on.
"""

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pengserve.planners.types.directory import GroupSpec
from pengserve.planners.types.errors import EngineError, LinkLostError, UnsupportedShapeError, one_line
from pengserve.planners.types.layout import GroupKind
from pengserve.replicas.comm.bulk import BulkWays, connect_ways
from pengserve.replicas.comm.communicator import Communicator
from pengserve.replicas.comm.direct import DirectCommunicator
from pengserve.replicas.comm.peers import PeerNetwork
from pengserve.replicas.comm.staged import StagedCommunicator
from pengserve.replicas.comm.store import PeerStore, StoreBoard
from pengserve.replicas.comm.torch_group import TorchCommunicator, gloo_device, gloo_group, nccl_group

logger = logging.getLogger(__name__)

BACKENDS = ("direct", "gloo", "nccl")
_BULK_CTAS = 4  # thread blocks of a piece beside a step's: some GB/s want no more


class CommunicatorPool:
    """Groups by name. Make it before the network's first `connect`; one thread builds, any thread asks.

    `backend` is "direct" (own TCP; tensors of a device go by way of the host), "gloo" or "nccl"; None takes what fits
    `device`: direct on the CPU, NCCL on CUDA. A group has a second, direct communicator for control data where its own
    is NCCL's, and a pipeline then has ways for much that goes beside its steps (`bulk.py`).
    """

    def __init__(
        self, network: PeerNetwork, device: torch.device | str, timeout_s: float, backend: str | None = None
    ) -> None:
        self._network, self._device, self._timeout_s = network, torch.device(device), timeout_s
        self._backend = backend or ("nccl" if self._device.type == "cuda" else "direct")
        if self._backend not in BACKENDS:
            raise UnsupportedShapeError(f"there is no backend {backend!r} for groups; use one of {BACKENDS}")
        self.board = StoreBoard(network)
        self._gloo_device: Any = gloo_device(network.host) if self._backend == "gloo" else None
        self._groups: dict[str, Communicator] = {}
        self._controls: dict[str, Communicator] = {}  # sockets whose end breaks the group; `direct` has no others
        self._ways: dict[str, BulkWays] = {}
        self._failed: set[str] = set()
        self._faults: dict[str, str] = {}
        self._lock = threading.Lock()  # guards the five above
        self._building = threading.Lock()
        self._is_closed = False

    def build(self, specs: Sequence[GroupSpec]) -> None:
        """Builds the groups of `specs` that this instance is in and that are not there; ends the others.

        Blocks until each is ready or failed: a member that is gone fails its groups at once, a silent one after the
        time-out. The members may start at different times, within the time-out.
        """
        with self._building:
            wanted = {spec.name: spec for spec in specs if self._network.key in spec.members}
            for name in [name for name in (*self._groups, *self._failed) if name not in wanted]:
                self._drop(name)
            # One order for all members: the first group that is not ready has all its members waiting for it.
            for name in sorted(wanted.keys() - self._groups.keys() - self._failed):
                if self._is_closed:
                    return
                self._build_one(wanted[name])

    def ready(self) -> tuple[str, ...]:
        """Names of the groups that can run, in order."""
        with self._lock:
            return tuple(sorted(name for name in self._groups if name not in self._failed))

    def failed(self) -> tuple[str, ...]:
        """Names of the groups that were asked for and could not be built, or broke since."""
        with self._lock:
            return tuple(sorted(self._failed))

    def fault(self, name: str) -> str:
        """Why a group could not be built, where another round would not help; else empty."""
        with self._lock:
            return self._faults.get(name, "")

    def get(self, name: str) -> Communicator:
        """A ready group. Raises EngineError where it is not."""
        with self._lock:
            communicator = self._groups.get(name)
            if communicator is None or name in self._failed:
                raise EngineError(f"group {name} is not ready here; plan with the groups that instances report")
            return communicator

    def bulk(self, name: str) -> BulkWays | None:
        """How much goes between members of a group beside its steps; None where that goes by peer messages."""
        with self._lock:
            return self._ways.get(name) if name not in self._failed else None

    def mark_failed(self, name: str) -> None:
        """Takes a group out of use after one of its calls failed. It comes back under the name of its next round."""
        with self._lock:
            communicators = self._of(name)
            if communicators:
                self._failed.add(name)
        for communicator in communicators:
            communicator.abort()

    def abort(self, name: str) -> None:
        """Breaks a group: a thread that waits in one of its calls raises EngineError, also at the other members."""
        self.mark_failed(name)

    def close(self) -> None:
        """Ends all groups. Idempotent."""
        self._is_closed = True
        for name in list(self._groups):
            self._drop(name)

    def _of(self, name: str) -> list[Communicator | BulkWays]:
        found = self._ways.get(name), self._groups.get(name), self._controls.get(name)
        return list({id(communicator): communicator for communicator in found if communicator is not None}.values())

    def _drop(self, name: str) -> None:
        with self._lock:
            communicators = self._of(name)
            self._groups.pop(name, None)
            self._controls.pop(name, None)
            self._ways.pop(name, None)
            self._failed.discard(name)
            self._faults.pop(name, None)
        for communicator in communicators:
            communicator.abort()
        self.board.discard(name)

    def _build_one(self, spec: GroupSpec) -> None:
        name = spec.name
        undo: list[Callable[[], object]] = []
        try:
            control = self._connect(spec, undo)
            communicator = self._over(control) if self._backend == "direct" else self._process_group(spec)
            undo.append(communicator.abort)
            ways = self._build_ways(spec, control)
        except Exception as error:
            is_foreseen = isinstance(error, (LinkLostError, OSError, RuntimeError, EngineError))
            logger.warning("group %s cannot be built: %s", name, one_line(error), exc_info=not is_foreseen)
            for end in undo:
                end()
            with self._lock:
                self._failed.add(name)
                if not is_foreseen:
                    self._faults[name] = one_line(error)
        else:
            with self._lock:
                self._groups[name] = communicator
                self._controls[name] = control
                if ways is not None:
                    self._ways[name] = ways
        finally:
            self.board.discard(name)

    def _connect(self, spec: GroupSpec, undo: list[Callable[[], object]]) -> DirectCommunicator:
        sockets: dict[int, socket.socket] = {}
        rank = spec.members.index(self._network.key)
        for other, key in enumerate(spec.members):
            if other != rank:
                sockets[other] = self._network.open_stream(key, spec.name, self._timeout_s)
                undo.append(sockets[other].close)
        return DirectCommunicator(spec.name, spec.members, rank, self._timeout_s, sockets)

    def _over(self, control: DirectCommunicator) -> Communicator:
        return control if self._device.type == "cpu" else StagedCommunicator(control)

    def _process_group(self, spec: GroupSpec) -> TorchCommunicator:
        return self._connected(spec, spec.name, self._timeout_s)

    def _connected(self, spec: GroupSpec, name: str, timeout_s: float, max_ctas: int = 0) -> TorchCommunicator:
        rank, size = spec.members.index(self._network.key), len(spec.members)
        store = PeerStore(self.board, name, spec.members, timeout_s)
        try:
            if self._backend == "gloo":
                group = gloo_group(store, rank, size, self._gloo_device, timeout_s)
            else:
                group = nccl_group(store, rank, size, self._device, timeout_s, max_ctas)
        finally:
            self.board.discard(name)
        return TorchCommunicator(name, spec.members, rank, timeout_s, group)

    def _build_ways(self, spec: GroupSpec, control: DirectCommunicator) -> BulkWays | None:
        """A communicator for each sender, where all members have made all of them; else peer messages do it."""
        if self._backend == "direct" or spec.group.kind is not GroupKind.PP:
            return None
        made: list[TorchCommunicator] = []
        ways: BulkWays | None = None
        try:
            for src in range(len(spec.members)):
                # Half of the time: a member that waits in vain here is in time for the sum below.
                made.append(self._connected(spec, f"{spec.name}/from-{src}", self._timeout_s / 2, _BULK_CTAS))
                connect_ways(made[-1], src, self._device)
            ways = BulkWays(made, self._device)
        except (LinkLostError, RuntimeError, EngineError) as error:
            logger.warning("KV of group %s goes by way of the host: %s", spec.name, one_line(error))
        num_ready = control.all_reduce(torch.tensor([int(ways is not None)]))
        if int(num_ready) == len(spec.members):
            return ways
        for communicator in made:
            communicator.abort()
        return None
