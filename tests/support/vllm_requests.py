"""Requests as ingresses send them, and as vLLM's schedulers hold them."""

import time
from collections.abc import Sequence

from vllm import SamplingParams

from pengserve.replicas.engine.vllm_seam import EngineCoreRequest, Request


def sent_request(
    request_id: str, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0
) -> EngineCoreRequest:
    """A request of text, as an ingress sends it."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        priority=priority,
        external_req_id=request_id,
    )


def scheduled_request(request_id: str, num_tokens: int = 8, *, max_tokens: int = 50) -> Request:
    """A request with a prompt of so many equal tokens, as a scheduler takes it."""
    return Request(request_id, [1] * num_tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True), None)
