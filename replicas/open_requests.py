"""Which requests are here, for which ingress, and as they were sent: what a request needs to travel on."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from pengserve.planners.types.contract import NO_CONTRACT, Contract
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.channel.frames import FrameKind
from pengserve.replicas.channel.server import ChannelServer

if TYPE_CHECKING:
    from pengserve.replicas.engine.lanes.handoff import Handoff
    from pengserve.replicas.engine.vllm_seam import EngineCoreRequest, Request


class OpenRequests:
    """By client index and request id. Requests come in the channel's thread, and come and go in the step thread."""

    def __init__(
        self,
        server: ChannelServer,
        on_come: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            on_come: is called when a request has come from another instance.
            clock: seconds.
        """
        self._server, self._on_come, self._clock = server, on_come, clock
        self._requests: dict[int, dict[str, EngineCoreRequest]] = {}
        self._contracts: dict[str, Contract] = {}  # of those that have one
        self._paced: set[str] = set()  # of these, those with an SLO for the time between tokens
        self._hurried: dict[str, tuple[float, float]] = {}  # ... for the first token: since when, and seconds to it
        self._lock = threading.Lock()
        self._was_reordered = False  # ever
        self.num_sent_back = 0  # requests that ingresses were told to send again, ever

    def add(self, request: "EngineCoreRequest", contract: Contract | None = None) -> None:
        """A request came, with its client's index in it. None: it has no contract."""
        with self._lock:
            self._requests.setdefault(request.client_index, {})[request.request_id] = request
            if contract is not None:
                self._note(request.request_id, contract)

    def remove(self, client_index: int, request_ids: Iterable[str]) -> None:
        """Requests ended, or are asked for no more."""
        with self._lock:
            mine = self._requests.get(client_index, {})
            for request_id in request_ids:
                mine.pop(request_id, None)
                self._forget(request_id)

    def reorder(self, client_index: int, orders: Iterable[tuple[str, int, float]]) -> None:
        """Requests of a client have another `(priority, arrival_time)`, also where they go on."""
        with self._lock:
            mine = self._requests.get(client_index, {})
            for request_id, priority, arrival_time in orders:
                if (request := mine.get(request_id)) is not None:
                    request.priority, request.arrival_time = priority, arrival_time
                    self._was_reordered = True

    def order(self, request: "Request") -> None:
        """Gives a prepared request the order that came for it meanwhile."""
        if not self._was_reordered:
            return
        with self._lock:
            sent = self._requests.get(request.client_index, {}).get(request.request_id)
        if sent is not None:
            request.priority, request.arrival_time = sent.priority, sent.arrival_time

    def contract(self, request_id: str) -> Contract:
        """What holds for a request; any thread may ask."""
        return self._contracts.get(request_id, NO_CONTRACT)

    @property
    def num_paced(self) -> int:
        """Requests here that have an SLO for the time between tokens."""
        return len(self._paced)

    def is_paced(self, request_id: str) -> bool:
        """Whether a request has an SLO for the time between its tokens; any thread may ask."""
        return request_id in self._paced

    @property
    def num_hurried(self) -> int:
        """Requests here that have an SLO for their first token."""
        return len(self._hurried)

    def gone(self, request_id: str) -> float:
        """Share of the time to its first token that is gone; 0 where nothing was promised. Any thread may ask."""
        found = self._hurried.get(request_id)
        return 0.0 if found is None else (self._clock() - found[0]) / found[1]

    def _note(self, request_id: str, contract: Contract) -> None:
        """Under the lock: this holds for a request."""
        self._contracts[request_id] = contract
        slo = contract.slo
        if slo is not None and slo.tbt_s:
            self._paced.add(request_id)
        if slo is not None and slo.ttft_s:
            self._hurried[request_id] = self._clock() - contract.waited_s, slo.ttft_s

    def _forget(self, request_id: str) -> None:
        """Under the lock: nothing holds for a request any more."""
        if self._contracts.pop(request_id, None) is not None:
            self._paced.discard(request_id)
            self._hurried.pop(request_id, None)

    def ids(self) -> list[str]:
        """Of all requests."""
        with self._lock:
            return [request_id for mine in self._requests.values() for request_id in mine]

    def remove_client(self, client_index: int) -> list[str]:
        """A client is gone; the ids of its requests."""
        with self._lock:
            gone = list(self._requests.pop(client_index, {}))
            for request_id in gone:
                self._forget(request_id)
            return gone

    # What a switch asks (see switching.RequestOwner) --------------------------------------------------------

    def handoff(self, request: "Request") -> "Handoff | None":
        """The request as it can travel; None where its ingress is gone."""
        from pengserve.replicas.engine.lanes.handoff import Handoff

        client_id = self._server.client_id(request.client_index)
        with self._lock:
            sent = self._requests.get(request.client_index, {}).get(request.request_id)
            contract = self._contracts.get(request.request_id)
        if sent is None or not client_id:
            return None
        return Handoff(sent, client_id, list(request.output_token_ids), request.num_computed_tokens, contract)

    def serves(self, client_id: str) -> bool:
        """Whether that ingress is connected here."""
        return self._server.client_index(client_id) is not None

    def welcome(self, handoff: "Handoff") -> int | None:
        """Takes note of a request that came from a peer: its client index; None where its ingress is not here."""
        client_index = self._server.client_index(handoff.client_id)
        if client_index is None:
            return None
        handoff.request.client_index = client_index
        self.add(handoff.request, handoff.contract)
        if not self._server.client_id(client_index):
            # It left in between: `remove_client` has not seen the request, or has already asked for its abort.
            self.remove(client_index, [handoff.request.request_id])
            return None
        self._on_come()
        return client_index

    def moved(self, request_ids: list[str], to: InstanceKey | None, *, carried: bool) -> None:
        """Tells ingresses that these requests are no longer here."""
        from pengserve.replicas.engine.wire import Moved

        wanted = set(request_ids)
        going: dict[int, list[str]] = {}
        with self._lock:
            for client_index, mine in self._requests.items():
                found = [request_id for request_id in mine if request_id in wanted] if wanted else []
                for request_id in found:
                    del mine[request_id]
                    self._forget(request_id)
                if found:
                    going[client_index] = found
                    self.num_sent_back += 0 if carried else len(found)
        for client_index, ids in going.items():
            frame = msgspec.msgpack.encode(Moved(ids, to, carried))
            self._server.send(client_index, [frame], FrameKind.MOVED)
