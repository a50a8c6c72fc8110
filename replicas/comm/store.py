"""A rendezvous store without a server, so that none can die: the member that sets a value sends it to the others.

Seen with torch 2.13: ProcessGroupGloo calls `set`, `wait`, `get` and nothing that would need one owner of a key. The
source of ProcessGroupNCCL does the same; it has not run over this store, as no group of two GPUs has been made yet.
"""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from pengserve.planners.types.errors import LinkLostError
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.comm.peers import PeerNetwork

STORE_MESSAGE = "store"


class StoreBoard:
    """What peers have set, for groups that are built here now or soon. One for each instance."""

    def __init__(self, network: PeerNetwork) -> None:
        self.network = network
        self.changed = threading.Condition()
        self._values: dict[str, dict[str, tuple[InstanceKey, bytes]]] = {}
        network.subscribe(STORE_MESSAGE, self._on_message, self._on_lost)

    def put(self, group: str, name: str, sender: InstanceKey, value: bytes) -> None:
        """Keeps a value and wakes the threads that wait for it."""
        with self.changed:
            self._values.setdefault(group, {})[name] = (sender, value)
            self.changed.notify_all()

    def find(self, group: str, name: str) -> bytes | None:
        """The value, if it was set. Call with `changed` held."""
        entry = self._values.get(group, {}).get(name)
        return None if entry is None else entry[1]

    def discard(self, group: str) -> None:
        """Forgets a group that is built, or will not be."""
        with self.changed:
            self._values.pop(group, None)

    def _on_message(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        group, name, value = parts
        self.put(str(group, "utf-8"), str(name, "utf-8"), key, bytes(value))

    def _on_lost(self, key: InstanceKey) -> None:
        """A group with a lost member is never built: its values go, and waiting threads are woken."""
        with self.changed:
            for group, values in list(self._values.items()):
                self._values[group] = {name: entry for name, entry in values.items() if entry[0] != key}
                if not self._values[group]:
                    del self._values[group]
            self.changed.notify_all()


class PeerStore(dist.Store):
    """The store of one group, for the process group's constructor alone. Waiting ends at once when a member is lost.

    All that torch leaves to a store is here. A call that would need one owner of a key raises a clear error: torch
    itself would report a pure virtual function.
    """

    def __init__(self, board: StoreBoard, group: str, members: Sequence[InstanceKey], timeout_s: float) -> None:
        super().__init__()
        self._board, self._group, self._timeout_s = board, group, timeout_s
        self._others = [key for key in members if key != board.network.key]

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a value here and at every other member. Raises LinkLostError where one is gone."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._board.put(self._group, key, self._board.network.key, data)
        for other in self._others:
            self._board.network.send(other, STORE_MESSAGE, [self._group.encode(), key.encode(), data])

    def get(self, key: str) -> bytes:
        """Waits for a value. Raises LinkLostError where a member is lost or the time is over."""
        return self._wait_for([key], self._timeout_s)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for values; as `get`."""
        self._wait_for(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        """Whether all are set."""
        with self._board.changed:
            return all(self._board.find(self._group, key) is not None for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Refused: a counter would need one owner, and process groups do without."""
        raise NotImplementedError("a PeerStore has no counters")

    def delete_key(self, key: str) -> bool:
        """Nothing is deleted here alone: the group's values go together."""
        return False

    def num_keys(self) -> int:
        """Refused: a member knows only the keys that have reached it, and process groups do not ask for the number."""
        raise NotImplementedError("a PeerStore does not count its keys")

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long `get` waits."""
        self._timeout_s = timeout.total_seconds()

    def _wait_for(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        deadline_s = time.monotonic() + timeout_s
        board = self._board
        with board.changed:
            while True:
                values = [board.find(self._group, key) for key in keys]
                found = [value for value in values if value is not None]
                if len(found) == len(values):
                    return found
                connected = board.network.peers()
                lost = [str(key) for key in self._others if key not in connected]
                if lost:
                    raise LinkLostError(f"instance {', '.join(lost)} is gone; group {self._group} cannot be built")
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise LinkLostError(f"no member of {self._group} set {keys} within {timeout_s} s")
                board.changed.wait(left_s)
