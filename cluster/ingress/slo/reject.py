"""Requests that are refused because they would come too late, or have: `slo.policy: reject`, and the queue limit."""

import math
from collections.abc import Callable, Sequence
from http import HTTPStatus
from time import monotonic

from pengserve.cluster.ingress.errors import OverloadedError
from pengserve.cluster.ingress.request.kept import current_kept
from pengserve.cluster.ingress.request.request_options import RequestOptions, current_options
from pengserve.cluster.ingress.vllm_openai_seam import EngineCoreRequest
from pengserve.planners.types.contract import SloPolicy

DROPPED_REASON, QUEUE_TIMEOUT = "predicted-ttft", "queue-timeout"
MIN_RETRY_S, MAX_RETRY_S = 1, 60

Predict = Callable[[EngineCoreRequest, RequestOptions], float | None]


def require_ttft(token_ids: Sequence[int], predict: Predict, clock: Callable[[], float] = monotonic) -> None:
    """Refuses the HTTP request of this task where its first token would come too late.

    Where nothing can be predicted it is served. `token_ids` are those of its prompt.

    Raises:
        OverloadedError: 429 with the predicted TTFT, and when to try again.
    """
    slo, kept = current_options.get().contract.slo, current_kept.get()
    if slo is None or kept is None or slo.policy is not SloPolicy.REJECT or slo.ttft_s is None:
        return
    wait_s = predict(_unsent(token_ids), current_options.get())
    if wait_s is None:
        return
    ttft_s = clock() - kept.arrived_s + wait_s
    if ttft_s <= slo.ttft_s:
        return
    late_s = ttft_s - slo.ttft_s  # after which what waits now has shrunk by as much
    raise OverloadedError(
        f"The first token is predicted after {ttft_s * 1e3:.0f} ms, and slo.ttft_ms is {slo.ttft_s * 1e3:g} with the"
        " policy reject. Try again later.",
        HTTPStatus.TOO_MANY_REQUESTS,
        min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(late_s))),
        DROPPED_REASON,
    )


def queue_timeout(limit_s: float) -> OverloadedError:
    """What a request gets that has waited for its first token for as long as it allows."""
    return OverloadedError(
        f"No token came within the {limit_s * 1e3:g} ms that the request allows to wait. Try again later.",
        HTTPStatus.TOO_MANY_REQUESTS,
        MIN_RETRY_S,
        QUEUE_TIMEOUT,
    )


def _unsent(token_ids: Sequence[int]) -> EngineCoreRequest:
    """A request as the prediction needs it: it is never sent."""
    return EngineCoreRequest(
        request_id="",
        prompt_token_ids=list(token_ids),
        mm_features=None,
        sampling_params=None,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
