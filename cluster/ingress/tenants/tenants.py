"""Limits of tenants at an ingress: who has how much in flight, and the refusal of what is beyond."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from time import monotonic

from pengserve.cluster.ingress.errors import OverloadedError
from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.cluster.ingress.request.request_options import RequestOptions
from pengserve.cluster.ingress.tenants.tenant_figures import computed_tokens
from pengserve.cluster.ingress.vllm_openai_seam import EngineCoreRequest
from pengserve.planners.tenant_limits import Refused, TenantLimits, TenantRefusal, limits_of
from pengserve.planners.types.tenants import FairnessConfig

_WHY = {
    TenantRefusal.REQUESTS: "This tenant may have {} sequences in flight at this ingress. Wait until some have ended.",
    TenantRefusal.TOKENS: "This tenant may have {} tokens of prompts and answers in flight at this ingress. Wait until"
    " some requests have ended.",
    TenantRefusal.RATE: "This tenant may use {} tokens per minute at this ingress, and has used them. Try again later.",
}


class Tenants:
    """Does nothing where no tenant has a limit."""

    def __init__(self, config: FairnessConfig, clock: Callable[[], float] = monotonic) -> None:
        self.limits: TenantLimits | None = limits_of(config)
        self._clock = clock
        self._held: dict[str, int] = {}  # tokens, by request id

    @contextmanager
    def place(self, tenant: str, num_sequences: int) -> Iterator[None]:
        """Within it, a tenant has so many sequences more in flight.

        Raises:
            OverloadedError: it has come to a limit; 429 with the reason.
        """
        if self.limits is None:
            yield
            return
        if (refused := self.limits.why_not(tenant, num_sequences, self._clock())) is not None:
            raise _refusal(refused)
        self.limits.take(tenant, num_sequences)
        try:
            yield
        finally:
            self.limits.give_back(tenant, num_sequences, self._clock())

    def come(self, request: EngineCoreRequest, options: RequestOptions) -> None:
        """The tokens of a sequence are known."""
        if self.limits is None:
            return
        params = request.sampling_params
        num_tokens = len(request.prompt_token_ids or ()) + (params.max_tokens or 0 if params is not None else 0)
        self._held[request.request_id] = num_tokens
        self.limits.hold(options.contract.tenant, num_tokens)

    def ended(self, record: RequestRecord) -> None:
        """A sequence is over: what it has really cost counts."""
        held = self._held.pop(record.request.request_id, None)
        if self.limits is None or held is None:
            return
        self.limits.use(record.options.contract.tenant, held, computed_tokens(record), self._clock())


def _refusal(refused: Refused) -> OverloadedError:
    message = _WHY[refused.refusal].format(f"{refused.limit:,}")
    return OverloadedError(message, HTTPStatus.TOO_MANY_REQUESTS, refused.retry_after_s, refused.refusal.value)
