"""A tiny random Llama checkpoint for tests: float32, grouped-query attention, a real tokenizer and chat template.

Its greedy text is varied nonsense in ASCII that never ends by itself: the output rows of special tokens and of bytes
outside printable ASCII are zero, so that lengths are those a test asks for. The best token leads the second by more
than a thousandth nearly always, far above float32 noise, so that exact comparison of outputs is fair.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pengserve.cluster.demo.checkpoint import LlamaShape, build_llama, is_complete, recipe_hash, write_once
from pengserve.cluster.demo.corpus import read_docstrings
from pengserve.cluster.demo.tokenizer import CHAT_TEMPLATE, MARKUP, save_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TINY = LlamaShape(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    max_len=2048,
    tie_embeddings=False,
)
WIDE = LlamaShape(
    vocab_size=512,
    hidden_size=384,
    intermediate_size=768,
    num_layers=4,
    num_heads=6,
    num_kv_heads=6,
    max_len=2048,
    tie_embeddings=False,
)
DEEP = LlamaShape(
    vocab_size=512,
    hidden_size=384,
    intermediate_size=768,
    num_layers=12,
    num_heads=6,
    num_kv_heads=6,
    max_len=2048,
    tie_embeddings=False,
)
EVEN = LlamaShape(
    vocab_size=512,
    hidden_size=384,
    intermediate_size=832,  # a multiple of 32, so that weights can be packed
    num_layers=12,
    num_heads=6,
    num_kv_heads=6,
    max_len=2048,
    tie_embeddings=False,
)
SHALLOW = replace(EVEN, num_layers=6)
RECIPE_VERSION = 2  # raise it when the code below changes what is written
SEED = 20
TEXT_MODULES = ("argparse", "json", "textwrap")
LINEAR_STD = 0.12  # large against the usual 0.02: attention then decides the next token, so lost KV shows at once
HEAD_STD = 0.4


def cache_dir() -> Path:
    """Where test models are kept between runs: `pengserve` in $XDG_CACHE_HOME, else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pengserve"


def tiny_model() -> Path:
    """Directory of the tiny checkpoint, made on first use. Safe to call from several processes at once."""
    return _made("tiny", TINY)


def wide_model() -> Path:
    """The same, larger and with a KV head per query head: a step computes for longer than it is prepared."""
    return _made("wide", WIDE)


def deep_model() -> Path:
    """The same, with so many layers that a half of them computes for far longer than a step is prepared."""
    return _made("deep", DEEP)


def even_model() -> Path:
    """As deep, and its layers fill chunks of 2 MiB, but for 2 %, as those of large models do."""
    return _made("even", EVEN)


def shallow_model() -> Path:
    """The same with half as many layers: what half a core computes in the time that a whole one takes for the other."""
    return _made("shallow", SHALLOW)


def _made(name: str, shape: LlamaShape) -> Path:
    texts = [doc.text for doc in read_docstrings(modules=TEXT_MODULES)]
    recipe = recipe_hash(shape, RECIPE_VERSION, SEED, LINEAR_STD, HEAD_STD, CHAT_TEMPLATE, texts)
    directory = cache_dir() / f"{name}-{recipe}"
    if is_complete(directory, recipe):
        return directory
    return write_once(directory, recipe, lambda scratch: _write(scratch, shape, texts))


def _write(directory: Path, shape: LlamaShape, texts: list[str]) -> None:
    import torch

    tokenizer = train_tokenizer(texts, vocab_size=shape.vocab_size, max_len=shape.max_len)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(SEED)
        model = build_llama(shape, tokenizer)
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                std = HEAD_STD if name.startswith("lm_head") else 1.0 if "embed" in name else LINEAR_STD
                weight.normal_(0.0, std)
        silent = [i for i in range(shape.vocab_size) if not _is_plain(tokenizer, i)]
        model.lm_head.weight[silent] = 0.0
        model.save_pretrained(str(directory), safe_serialization=True)
    save_tokenizer(tokenizer, directory)


def _is_plain(tokenizer: "PreTrainedTokenizerFast", token_id: int) -> bool:
    text = tokenizer.decode([token_id])
    printable = text.isascii() and text.replace("\n", "").isprintable()
    return printable and token_id not in tokenizer.all_special_ids and text not in MARKUP
