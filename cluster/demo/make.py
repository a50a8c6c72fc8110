"""`make_demo`: from nothing to a servable checkpoint."""

import logging
from collections.abc import Callable
from pathlib import Path

from pengserve.cluster.demo.checkpoint import LlamaShape, is_complete, recipe_hash, refuse_foreign, write_once
from pengserve.cluster.demo.corpus import DocString, read_docstrings
from pengserve.cluster.demo.tokenizer import CHAT_TEMPLATE, save_tokenizer, train_tokenizer
from pengserve.cluster.demo.train import TrainPlan, train_llama

logger = logging.getLogger(__name__)

RECIPE_VERSION = 3  # raise it when the code of this package changes what is written
DEMO = LlamaShape(  # 3.5 million parameters
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=704,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    max_len=2048,
    tie_embeddings=True,
)
# A model this small repeats itself; greedy requests get the penalty too unless they name their own.
SAMPLING = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.15}
PLAN = TrainPlan(num_steps=3000, batch_size=2, seq_len=512, peak_lr=3e-3)

Progress = Callable[[str, float], None]
"""Receives the phase ("corpus", "tokenizer", "train", "save") and how much of it is done, from 0.0 to 1.0."""


def make_demo(
    directory: Path | str,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    shape: LlamaShape = DEMO,
    plan: TrainPlan = PLAN,
) -> Path:
    """Train the demo model and write it to `directory` as a Hugging Face checkpoint.

    A directory that already holds the model of this recipe, corpus and seed is returned at once; one that holds an
    older or half-written one is replaced. The same seed on the same machine gives the same model.

    Raises:
        ConfigError: the directory holds something else than a model made by PengServe.
    """
    report = progress or (lambda phase, done: None)
    directory = Path(directory)
    refuse_foreign(directory)
    report("corpus", 0.0)
    docs = read_docstrings()
    report("corpus", 1.0)
    texts = [[doc.full_name, doc.text] for doc in docs]
    recipe = recipe_hash(RECIPE_VERSION, seed, shape, plan, SAMPLING, CHAT_TEMPLATE, texts)
    if is_complete(directory, recipe):
        return directory.absolute()
    return write_once(directory, recipe, lambda scratch: _write(scratch, docs, shape, plan, seed, report))


def _write(
    directory: Path, docs: tuple[DocString, ...], shape: LlamaShape, plan: TrainPlan, seed: int, report: Progress
) -> None:
    import torch

    report("tokenizer", 0.0)
    tokenizer = train_tokenizer((doc.text for doc in docs), vocab_size=shape.vocab_size, max_len=shape.max_len)
    report("tokenizer", 1.0)
    report("train", 0.0)

    def on_step(step: int, loss: float) -> None:
        report("train", step / plan.num_steps)
        if step % 100 == 0 or step == plan.num_steps:
            logger.info("step %d of %d: loss %.3f", step, plan.num_steps, loss)

    model = train_llama(docs, tokenizer, shape, plan, sampling=SAMPLING, seed=seed, on_step=on_step)
    report("save", 0.0)
    model.to(torch.bfloat16).save_pretrained(str(directory), safe_serialization=True)
    save_tokenizer(tokenizer, directory)
    report("save", 1.0)
