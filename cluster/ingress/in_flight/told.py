"""What a book of records tells others, so that no fault of theirs reaches a request.

An error in the middle of a batch would leave tokens noted and not handed on: a hole in a stream.
"""

import logging
from collections.abc import Callable
from typing import Any

from pengserve.cluster.ingress.request.record import RecordEvents, RequestRecord, Resumption
from pengserve.cluster.ingress.vllm_openai_seam import EngineCoreOutput
from pengserve.planners.types.ids import InstanceKey

logger = logging.getLogger(__name__)


class Told:
    """`RecordEvents` that calls `events` and logs what they raise."""

    def __init__(self, events: RecordEvents) -> None:
        self._events = events

    def on_failed(self, request_id: str, error: Exception) -> None:
        """The request is given up."""
        _tell(self._events.on_failed, request_id, error)

    def on_ended(self, record: RequestRecord, finish: str) -> None:
        """The book forgets `record`."""
        _tell(self._events.on_ended, record, finish)

    def on_finished(self, output: EngineCoreOutput) -> None:
        """The request was complete when its instance died."""
        _tell(self._events.on_finished, output)

    def on_dispatched(self, key: InstanceKey, resumed: Resumption | None) -> None:
        """A request went to an instance."""
        _tell(self._events.on_dispatched, key, resumed)

    def on_resumed(self, gap_s: float) -> None:
        """The first token after a loss came."""
        _tell(self._events.on_resumed, gap_s)

    def on_request_moved(self, *, carried: bool) -> None:
        """A switch moved a request."""
        _tell(lambda: self._events.on_request_moved(carried=carried))

    def on_switched(self, gap_s: float) -> None:
        """The first token after a switch came."""
        _tell(self._events.on_switched, gap_s)


def _tell(listener: Callable[..., None], *arguments: Any) -> None:
    try:
        listener(*arguments)
    except Exception:
        logger.exception("what became of a request could not be told; the request goes on")
