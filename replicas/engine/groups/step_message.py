"""What a leader sends its followers for one step: vLLM's `SchedulerOutput`, as far as a group's lane uses it."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from vllm import SamplingParams

from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.scheduling.block_groups import blocks_of, grouped
from pengserve.replicas.engine.tiers.lane_tiers import Hint
from pengserve.replicas.engine.vllm_seam import (
    CachedRequestData,
    GrammarOutput,
    MsgpackDecoder,
    MsgpackEncoder,
    NewRequestData,
    SchedulerOutput,
)


class NewRequest(msgspec.Struct, array_like=True):
    """Of `NewRequestData`."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int


class ResumedRequest(msgspec.Struct, array_like=True):
    """A request that came to the leader half decoded, without KV: members must know it before it is scheduled."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    output_token_ids: list[int]


class StepMessage(msgspec.Struct, array_like=True):
    """One step. Block ids are logical ones of the lane."""

    lease: list[int]  # blocks that join the lane before this step
    forgotten: list[str]  # requests that have left it since the last step, with their KV
    known: list[ResumedRequest]  # requests that join it before this step
    new: list[NewRequest]
    req_ids: list[str]  # of requests that ran before; the next four or five lists go with it
    new_block_ids: list[list[int] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]
    new_token_ids: list[list[int]]  # sampled since; only stages that do not sample need them
    resumed: list[str]
    num_scheduled_tokens: dict[str, int]
    finished: list[str]
    grammar_ids: list[str]
    grammar_shape: tuple[int, int]
    grammar_bits: bytes
    is_first: bool  # a pipeline had no work before this step
    hints: list[Hint]  # where KV is to be, where there are host tiers
    uses: bytes  # what the lane's blocks are used for, a `Use` each; empty: as far as known


class Step(NamedTuple):
    """A step message, decoded."""

    output: SchedulerOutput
    grammar: GrammarOutput | None
    lease: list[int]
    forgotten: list[str]
    known: list[ResumedRequest]
    is_first: bool
    hints: list[Hint]
    uses: bytes


class StepCodec:
    """Encoder and decoder of one thread."""

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(StepMessage)

    def encode(
        self,
        output: SchedulerOutput,
        grammar: GrammarOutput | None,
        lease: Sequence[int],
        forgotten: Sequence[str],
        known: Sequence[ResumedRequest],
        *,
        is_first: bool = False,
        hints: Sequence[Hint] = (),
        uses: bytes = b"",
    ) -> Sequence[Buffer]:
        """Parts of a step message; the buffers may be reused once they are sent."""
        cached = output.scheduled_cached_reqs
        mask = None if grammar is None else grammar.grammar_bitmask
        return self._encoder.encode(
            StepMessage(
                lease=list(lease),
                forgotten=list(forgotten),
                known=list(known),
                new=[
                    NewRequest(
                        new.req_id,
                        new.prompt_token_ids,
                        new.sampling_params,
                        blocks_of(new.block_ids),
                        new.num_computed_tokens,
                    )
                    for new in output.scheduled_new_reqs
                ],
                req_ids=cached.req_ids,
                new_block_ids=[None if ids is None else blocks_of(ids) for ids in cached.new_block_ids],
                num_computed_tokens=cached.num_computed_tokens,
                num_output_tokens=cached.num_output_tokens,
                new_token_ids=cached.new_token_ids,
                resumed=list(cached.resumed_req_ids),
                num_scheduled_tokens=output.num_scheduled_tokens,
                finished=list(output.finished_req_ids),
                grammar_ids=[] if grammar is None else grammar.structured_output_request_ids,
                grammar_shape=(0, 0) if mask is None else mask.shape,
                grammar_bits=b"" if mask is None else mask.tobytes(),
                is_first=is_first,
                hints=list(hints),
                uses=uses,
            )
        )

    def decode(self, parts: Sequence[Buffer]) -> Step:
        """Inverse of `encode`. Raises msgspec.MsgspecError on what is no step message."""
        message: StepMessage = self._decoder.decode(parts)
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [
            NewRequestData(
                req_id=new.req_id,
                prompt_token_ids=new.prompt_token_ids,
                mm_features=[],
                sampling_params=new.sampling_params,
                pooling_params=None,
                block_ids=grouped(new.block_ids),
                num_computed_tokens=new.num_computed_tokens,
                lora_request=None,
            )
            for new in message.new
        ]
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=message.req_ids,
            resumed_req_ids=set(message.resumed),
            new_token_ids=message.new_token_ids,
            all_token_ids={},
            new_block_ids=[None if ids is None else grouped(ids) for ids in message.new_block_ids],
            num_computed_tokens=message.num_computed_tokens,
            num_output_tokens=message.num_output_tokens,
        )
        output.num_scheduled_tokens = message.num_scheduled_tokens
        output.total_num_scheduled_tokens = sum(message.num_scheduled_tokens.values())
        output.finished_req_ids = set(message.finished)
        grammar = None
        if message.grammar_ids:
            bits = np.frombuffer(message.grammar_bits, dtype=np.int32).reshape(message.grammar_shape)
            grammar = GrammarOutput(message.grammar_ids, bits)
        rest = (
            message.lease,
            message.forgotten,
            message.known,
            message.is_first,
            message.hints,
            message.uses,
        )
        return Step(output, grammar, *rest)
