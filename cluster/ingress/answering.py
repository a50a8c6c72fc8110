"""How the outputs of one request come to the task that answers it."""

import asyncio
from typing import Any

from pengserve.cluster.ingress.request.kept import KeptAnswer
from pengserve.cluster.ingress.slo.deposit import DepositCollector
from pengserve.cluster.ingress.vllm_openai_seam import (
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
    VLLMClientError,
)
from pengserve.replicas.engine.scheduling.grammars import DEAD_END, TOO_COSTLY

GUIDE_FAULTS = {
    DEAD_END: "No text meets the constraint of this request: its grammar, pattern or schema comes to where it allows no"
    " token, for example by a rule that never ends.",
    TOO_COSTLY: "The schema, pattern or grammar of this request takes too much time for each token: make it simpler,"
    " for example by having only one way to read a text.",
}


def collector_of(request_id: str, kind: RequestOutputKind, kept: KeptAnswer | None) -> RequestOutputCollector:
    """What hands a request's outputs to the task that answers it: at once, or paced."""
    if kept is not None and kept.is_paced and kind is RequestOutputKind.DELTA:
        return DepositCollector(kind, request_id, kept.interval_s)
    return RequestOutputCollector(kind, request_id)


async def next_output(collector: RequestOutputCollector, deadline_s: float) -> Any:
    """The next output. vLLM takes each output of a list of prompts in a task of its own, so each wait has its time-out.

    Raises:
        TimeoutError: `deadline_s` has passed.
    """
    async with asyncio.timeout_at(deadline_s):
        output = collector.get_nowait()
        if output is None:
            return await collector.get()
        await asyncio.sleep(0)  # where a time-out that is due is noticed
        return output


def refuse_guide_fault(output: RequestOutput) -> None:
    """Raises VLLMClientError where what guides the request has ended it."""
    for choice in output.outputs:
        if choice.finish_reason == "error" and choice.stop_reason in GUIDE_FAULTS:
            raise VLLMClientError(GUIDE_FAULTS[choice.stop_reason])
