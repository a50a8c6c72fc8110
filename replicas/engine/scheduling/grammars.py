"""Guided requests: which library guides them, and grammars that lead to where no token is allowed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pengserve.planners.types.errors import ConfigError
from pengserve.replicas.engine.scheduling.grammar_budget import is_used_up
from pengserve.replicas.engine.vllm_seam import Request, StructuredOutputsConfig

DEAD_END = "the grammar allows no token"
"""Stop reason of a request that ended in error because its grammar allowed none of the tokens that there are."""

TOO_COSTLY = "the grammar takes too much time"
"""Stop reason of a request that ended in error because its grammar used its budget up (`grammar_budget.py`)."""

AcceptTokens = Callable[[Request, Sequence[int]], bool]


def guide_config(given: Mapping[str, Any]) -> StructuredOutputsConfig:
    """vLLM's configuration of structured output: the user's, with one backend for all requests of all instances.

    vLLM's own default, `auto`, checks each request against several backends, but an engine keeps the one that its
    first guided request asked for. Instances would then differ, and a request that is resumed on another instance would
    get another backend.

    Raises:
        ConfigError: vLLM takes no such configuration.
    """
    try:
        return StructuredOutputsConfig(**{"backend": "xgrammar", **given})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"engine.structured_outputs_config is not usable: {error}") from error


def explaining_rejections(manager: Any) -> AcceptTokens:
    """`accept_tokens` of vLLM's StructuredOutputManager that also says when a rejection is the grammar's fault.

    Where a grammar allows no token, vLLM samples any, rejects it and fails the request as if the server were at
    fault. Grammars that match no text do so, for example one whose rule never ends (`root ::= root "a"`).
    """
    accept: AcceptTokens = manager.accept_tokens

    def accept_tokens(request: Request, new_token_ids: Sequence[int]) -> bool:
        is_accepted = accept(request, new_token_ids)
        if not is_accepted and is_used_up(request):
            request.stop_reason = TOO_COSTLY
        elif not is_accepted and _allows_nothing(manager, request):
            request.stop_reason = DEAD_END
        return is_accepted

    return accept_tokens


def _allows_nothing(manager: Any, request: Request) -> bool:
    assert request.structured_output_request is not None
    mask = manager.backend.allocate_token_bitmask(1)
    request.structured_output_request.grammar.fill_bitmask(mask, 0)
    return not mask.any()
