"""How many answers came to their end at a scheduler, and how long they were, wherever their first tokens were made."""

from typing import Any

from pengserve.replicas.engine.vllm_seam import Request, RequestStatus


class EndedAnswers:
    """Belongs to the thread that steps. An answer that is aborted, or goes on elsewhere, has not come to its end."""

    def __init__(self, scheduler: Any) -> None:
        """`scheduler` is vLLM's, and tells of each request that it frees from now on."""
        self._free_request = scheduler._free_request
        scheduler._free_request = self._freed
        self._count = self._tokens = 0

    def take(self) -> tuple[int, int]:
        """Answers that have ended since the last call, and the tokens of all of them."""
        found = self._count, self._tokens
        self._count = self._tokens = 0
        return found

    def _freed(self, request: Request, *given: Any, **named: Any) -> Any:
        if request.status is not RequestStatus.FINISHED_ABORTED:
            self._count += 1
            self._tokens += request.num_output_tokens
        return self._free_request(request, *given, **named)
