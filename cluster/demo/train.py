"""Training of the demo model: a fixed number of steps from a fixed seed."""

import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pengserve.cluster.demo.checkpoint import LlamaShape, build_llama
from pengserve.cluster.demo.corpus import DocString
from pengserve.cluster.demo.dialogue import documents

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

TEXTS_AT_ONCE = 256  # texts given to the tokenizer in one call


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """How long and how fast to train. Steps are fixed, never seconds, so that a seed gives one model."""

    num_steps: int
    batch_size: int  # sequences in a step
    seq_len: int  # tokens in a sequence
    peak_lr: float
    warmup_share: float = 0.05
    final_lr_share: float = 0.05
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


def train_llama(
    docs: Sequence[DocString],
    tokenizer: "PreTrainedTokenizerFast",
    shape: LlamaShape,
    plan: TrainPlan,
    *,
    sampling: Mapping[str, float],
    seed: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> "LlamaForCausalLM":
    """A float32 model trained on `docs`, with `sampling` as its defaults.

    `on_step` receives the number of finished steps and the loss of the last one.

    Matrix products run in bfloat16 where the processor multiplies it natively; weights and optimiser stay float32.
    Neither torch's global generator nor its number of threads is changed for the caller.
    """
    import torch
    from torch.nn import functional

    with torch.random.fork_rng(devices=[]), _threads():
        torch.manual_seed(seed)
        model = build_llama(shape, tokenizer, sampling)
        model.train()
        optimizers = _optimizers(model, plan)
        batches = _batches(docs, tokenizer, plan, seed)
        for step in range(plan.num_steps):
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = learning_rate(plan, step)
            tokens = next(batches)  # [batch_size, seq_len + 1]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=_has_bfloat16()):
                logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.max_grad_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            on_step(step + 1, loss.item())
    return model.eval()


def learning_rate(plan: TrainPlan, step: int) -> float:
    """Linear warm-up from zero, then a cosine down to `final_lr_share` of the peak."""
    warmup = max(1, round(plan.num_steps * plan.warmup_share))
    if step < warmup:
        return plan.peak_lr * (step + 1) / warmup
    done = (step - warmup) / max(1, plan.num_steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return plan.peak_lr * (plan.final_lr_share + (1 - plan.final_lr_share) * cosine)


def _optimizers(model: "LlamaForCausalLM", plan: TrainPlan) -> list["torch.optim.Optimizer"]:
    """Muon for the layers' matrices, AdamW for the rest: in so few steps, well below AdamW alone in loss."""
    import torch

    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in named if p.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=plan.peak_lr, weight_decay=plan.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=plan.peak_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def _batches(
    docs: Sequence[DocString], tokenizer: "PreTrainedTokenizerFast", plan: TrainPlan, seed: int
) -> Iterator["torch.Tensor"]:
    """Texts packed one after the other without gaps, pass after pass over the corpus, each in a new order."""
    import torch

    rng = random.Random(seed)
    batch_tokens = plan.batch_size * (plan.seq_len + 1)
    stream: list[int] = []
    while True:
        texts = list(documents(docs, rng))
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            for ids in tokenizer(texts[start : start + TEXTS_AT_ONCE])["input_ids"]:
                stream += ids
            num_batches = len(stream) // batch_tokens
            yield from torch.tensor(stream[: num_batches * batch_tokens]).view(num_batches, plan.batch_size, -1)
            stream = stream[num_batches * batch_tokens :]


def _has_bfloat16() -> bool:
    """Whether bfloat16 products are quicker than float32 ones here (AVX512-BF16 or AMX, not an emulation)."""
    import torch

    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@contextmanager
def _threads() -> Iterator[None]:
    """Uses all cores that this process may use, up to eight. OMP_NUM_THREADS, set for serving, does not limit it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)
