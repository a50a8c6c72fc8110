"""How long steps take here: batches of chosen chunks, run on a lane that has nothing else to do (KunServe section 4.3).

A request enters with its prefix taken for computed: its blocks are allocated, and their bytes are arbitrary. So every
mix of prefixes, new tokens and decodes is one step, and nothing has to be computed before it.
"""

import random
import statistics
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, cycle, islice
from typing import Any

import torch
from vllm import SamplingParams

from pengserve.planners.cost_model import Chunk, Sample
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.planners.types.units import blocks_for
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.engine.lanes.handoff import Handoff, revive
from pengserve.replicas.engine.vllm_seam import EngineCoreRequest, Request

MIXES = ((True, False), (False, True), (True, True))  # decodes, prefill
MAX_PROMPTS = 8  # prefill chunks of one batch
MIN_TOKENS = 16  # of a prefix or a prefill chunk
VOCABULARY = (10, 200)  # token ids of prompts: every model has them
SALT = "profiling"  # keeps what these requests leave in the prefix cache from all others

_ids = count()


def choose_batches(
    capacity: KvCapacity, max_batched_tokens: int, num_batches: int, seed: int = 0, repetitions: int = 5
) -> list[tuple[Chunk, ...]]:
    """Random batches that fit a lane, lengths spread evenly over their logarithm: decodes, prefill, and both."""
    source = random.Random(seed)
    room = min(capacity.max_model_len, capacity.num_tokens) - repetitions - 2  # decodes grow while they are timed
    return [
        _choose(source, capacity, min(max_batched_tokens, room), room, *mix)
        for mix in islice(cycle(MIXES), num_batches)
    ]


def describe(lane: DpLane) -> dict[str, Any]:
    """What the engine is: its device, its model's sizes and its budget of tokens, by names in `EngineFacts`."""
    vllm_config = lane.core.vllm_config
    model: Any = vllm_config.model_config
    hf_config = model.hf_text_config
    kv_dtype = vllm_config.cache_config.cache_dtype
    return {
        "device_name": "cpu" if lane.worker.device.type == "cpu" else torch.cuda.get_device_name(lane.worker.device),
        "max_num_batched_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
        "layers": hf_config.num_hidden_layers,
        "hidden": hf_config.hidden_size,
        "heads": hf_config.num_attention_heads,
        "kv_heads": model.get_total_num_kv_heads(),
        "head_dim": model.get_head_size(),
        "experts": model.get_num_experts(),
        "value_bytes": model.dtype.itemsize,
        "kv_value_bytes": 1 if kv_dtype.startswith("fp8") else model.dtype.itemsize,
    }


def profile(lane: DpLane, batches: Sequence[Sequence[Chunk]], repetitions: int = 5) -> Iterator[Sample]:
    """Times each batch: the median of `repetitions` steps, after one that is not counted.

    Decodes go on from step to step, as they do in service, and the sample tells their middle length; prefill chunks
    enter anew. The lane must be idle, and takes no other request until the iterator is at its end.

    Raises:
        EngineError: the lane has requests, or no room for a batch, or did not run it in one step.
    """
    return (sample for sample in profile_steps(lane, batches, repetitions) if sample is not None)


def profile_steps(
    lane: DpLane, batches: Sequence[Sequence[Chunk]], repetitions: int
) -> Generator[Sample | None, None, None]:
    """As `profile`, one step at a time: None after each step, then the sample of each batch after its last.

    Closing the generator early ends what is being timed, and leaves the lane idle.
    """
    if lane.has_work():
        raise EngineError("steps are timed on an idle lane; this one has requests")
    with _forward_times(lane.worker) as forward_s:
        for chunks in batches:
            yield from _time(lane, chunks, repetitions, forward_s)


@contextmanager
def _forward_times(worker: Any) -> Iterator[list[float]]:
    """Seconds that the model takes, forward by forward. None on a GPU: its kernels run on, and graphs call no hooks."""
    found: list[float] = []
    if worker.device.type != "cpu":
        yield found
        return
    model: torch.nn.Module = worker.model_runner.model
    begun_s = 0.0

    def begin(*_: object) -> None:
        nonlocal begun_s
        begun_s = time.perf_counter()

    def end(*_: object) -> None:
        found.append(time.perf_counter() - begun_s)

    hooks = model.register_forward_pre_hook(begin), model.register_forward_hook(end)
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _time(
    lane: DpLane, chunks: Sequence[Chunk], repetitions: int, forward_s: list[float]
) -> Generator[Sample | None, None, None]:
    decodes = [chunk for chunk in chunks if chunk.num_tokens == 1]
    prefill = [chunk for chunk in chunks if chunk.num_tokens > 1]
    took_s: list[float] = []
    host_s: list[float] = []
    running: list[Request] = []
    entered: list[Request] = []
    try:
        running.extend(_enter(lane, chunk) for chunk in decodes)
        for repetition in range(repetitions + 1):
            entered.extend(_enter(lane, chunk) for chunk in prefill)
            forward_s.clear()
            started_s = time.perf_counter()
            lane.step()
            took_s.append(time.perf_counter() - started_s)
            host_s.append(took_s[-1] - sum(forward_s) if forward_s else 0.0)
            _check(running, decodes, repetition)
            _check(entered, prefill, 0)
            lane.release([request.request_id for request in entered])
            entered.clear()
            yield None
    finally:
        lane.release([request.request_id for request in (*running, *entered)])
    middle = (repetitions + 1) // 2
    grown = [Chunk(prefix_tokens=chunk.prefix_tokens + middle, num_tokens=1) for chunk in decodes]
    seconds, beside_s = statistics.median(took_s[1:]), statistics.median(host_s[1:])
    yield Sample(chunks=(*grown, *prefill), seconds=seconds, host_s=beside_s)


def _enter(lane: DpLane, chunk: Chunk) -> Request:
    """Gives the lane a request whose next step is `chunk`."""
    num_tokens = chunk.prefix_tokens + chunk.num_tokens
    most = lane.capacity.max_model_len - num_tokens
    asked = EngineCoreRequest(
        request_id=f"{SALT}-{next(_ids)}",
        prompt_token_ids=random.choices(range(*VOCABULARY), k=num_tokens),
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=most, temperature=0, ignore_eos=True),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=SALT,
        data_parallel_rank=None,
    )
    if not chunk.prefix_tokens:
        request = Request.from_engine_core_request(asked, None)
        lane.add(request)
        return request
    request = revive(Handoff(asked, "", [], chunk.prefix_tokens), 0)
    lane.adopt(request)
    if (block_ids := lane.admit(request, chunk.prefix_tokens)) is None:
        lane.forget([request.request_id])
        raise EngineError(f"the lane has no room for a request of {num_tokens} tokens: profile smaller batches")
    lane.take_as_computed(block_ids)
    return request


def _check(requests: Sequence[Request], chunks: Sequence[Chunk], more: int) -> None:
    """Whether a step has computed all that it was given."""
    for request, chunk in zip(requests, chunks, strict=True):
        if request.num_computed_tokens != chunk.prefix_tokens + chunk.num_tokens + more:
            raise EngineError("the lane did not run a batch in one step: profile within its limits")


def _choose(
    source: random.Random, capacity: KvCapacity, max_tokens: int, room: int, has_decodes: bool, has_prefill: bool
) -> tuple[Chunk, ...]:
    chunks: list[Chunk] = []
    if has_decodes:
        num_decodes = _spread(source, 1, capacity.max_num_seqs - (MAX_PROMPTS if has_prefill else 0))
        longest = _spread(source, 2 * MIN_TOKENS, room)
        chunks += [Chunk(prefix_tokens=_spread(source, MIN_TOKENS, longest), num_tokens=1) for _ in range(num_decodes)]
    if has_prefill:
        for _ in range(_spread(source, 1, MAX_PROMPTS)):
            num_tokens = _spread(source, MIN_TOKENS, max_tokens)
            prefix = _spread(source, MIN_TOKENS, room) if source.random() < 0.5 else 0
            chunks.append(Chunk(prefix_tokens=min(prefix, room - num_tokens), num_tokens=num_tokens))
    source.shuffle(chunks)
    return _fitting(chunks, capacity, max_tokens)


def _fitting(chunks: Sequence[Chunk], capacity: KvCapacity, max_tokens: int) -> tuple[Chunk, ...]:
    """Those chunks, the first first, that fit into one step and into memory together."""
    fitting: list[Chunk] = []
    num_tokens, num_blocks = 0, 0
    for chunk in chunks:
        num_tokens += chunk.num_tokens
        num_blocks += blocks_for(chunk.prefix_tokens + chunk.num_tokens, capacity.block_size) + 1
        if fitting and (num_tokens > max_tokens or num_blocks > capacity.num_blocks):
            break
        fitting.append(chunk)
    return tuple(fitting)


def _spread(source: random.Random, least: int, most: int) -> int:
    """A whole number between the two, evenly over its logarithm."""
    return max(least, min(most, round(least * (most / least) ** source.random()))) if most > least else least
