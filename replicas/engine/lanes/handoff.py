"""Requests on their way from one lane to another, with their tokens and how much of their KV is computed."""

import msgspec

from pengserve.planners.types.contract import Contract
from pengserve.replicas.engine.vllm_seam import EngineCoreRequest, Request, RequestStatus


class Handoff(msgspec.Struct, array_like=True):
    """A request in mid-flight. Its KV of `num_computed_tokens` tokens travels beside it, or is recomputed."""

    request: EngineCoreRequest  # as the ingress sent it; `client_index` belongs to the instance it was sent to
    client_id: str  # the ingress, by the name it has everywhere
    output_token_ids: list[int]
    num_computed_tokens: int
    contract: Contract | None = None  # None: `NO_CONTRACT`


def revive(handoff: Handoff, client_index: int) -> Request:
    """The request as another scheduler must see it: as one that was preempted, with its KV still there.

    It goes on exactly where it was: output tokens are output tokens (penalties, seeds, minimum lengths).
    """
    request = Request.from_engine_core_request(handoff.request, None)
    request.client_index = client_index
    if handoff.output_token_ids:
        request.append_output_token_ids(handoff.output_token_ids)
    return as_preempted(request)


def as_preempted(request: Request) -> Request:
    """Marks a half-decoded request as the scheduler marks one that it has preempted."""
    if request.num_output_tokens:
        request.prefill_stats = None  # its first prefill was counted where it ended
    request.status = RequestStatus.PREEMPTED
    request.num_preemptions = 1
    return request


def can_carry(request: Request) -> bool:
    """Whether it can go along with a switch, with its KV. A grammar's state cannot be sent, and a switch waits for
    none to be compiled: such requests are resumed from their tokens.
    """
    return request.structured_output_request is None and can_migrate(request)


def can_migrate(request: Request) -> bool:
    """Whether its KV can move. Prompt logprobs that are half collected cannot: the request is resumed from its tokens.

    A grammar is led through the tokens where the request comes.
    """
    params = request.sampling_params
    return (
        request.num_computed_tokens > 0
        and not request.mm_features
        and request.prompt_token_ids is not None
        and request.lora_request is None
        and params is not None
        and (params.prompt_logprobs is None or request.num_output_tokens > 0)
    )
