"""Llama checkpoints in Hugging Face form, and the folders they are kept in."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pengserve.planners.types.errors import ConfigError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

try:
    import fcntl
except ImportError:  # not a POSIX system: two processes may then do the same work, and the last one wins
    fcntl = None  # type: ignore[assignment]

MARKER = "pengserve-model.json"  # written last: a folder without it is not complete
OLD = ".replaced"  # inside the new folder, for a moment: the one it replaces


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a small Llama. vLLM's CPU attention takes head sizes of 32, 64, ..."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    max_len: int
    tie_embeddings: bool

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_heads


def build_llama(
    shape: LlamaShape, tokenizer: "PreTrainedTokenizerFast", sampling: Mapping[str, float] | None = None
) -> "LlamaForCausalLM":
    """A float32 model with Hugging Face's own initialisation, taken from torch's global generator.

    `sampling` goes into generation_config.json: what servers use where a request says nothing.
    """
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_len,
        tie_word_embeddings=shape.tie_embeddings,
        attn_implementation="sdpa",
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    model = LlamaForCausalLM(config)
    # Training texts are packed, each after a BOS token: it ends the text before it as surely as EOS does.
    model.generation_config = GenerationConfig(
        bos_token_id=bos, eos_token_id=[eos, bos], pad_token_id=pad, do_sample=bool(sampling), **(sampling or {})
    )
    return model


def recipe_hash(*parts: Any) -> str:
    """Sixteen hexadecimal digits that name a recipe: JSON values, or dataclasses of them."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, str | int | float | list | tuple | Mapping) else asdict(part)
        digest.update(json.dumps(data, sort_keys=True).encode() + b"\0")
    return digest.hexdigest()[:16]


def is_complete(directory: Path, recipe: str) -> bool:
    """Whether `directory` holds the whole model of this recipe."""
    return _marked_recipe(directory) == recipe


def write_once(directory: Path, recipe: str, write: Callable[[Path], None]) -> Path:
    """Have `write` fill a new folder beside `directory`, then put it in place in one step.

    Several processes may call this at the same time: one writes, the others wait for it (a lock that dies with its
    process), and each reader sees no folder or a complete one. What an older run of ours left there is replaced.

    Raises:
        ConfigError: `directory` holds something that is not ours.
    """
    directory = directory.absolute()
    if is_complete(directory, recipe):
        return directory
    refuse_foreign(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory.parent / f".{directory.name}.lock"):
        for abandoned in directory.parent.glob(f".{directory.name}-*"):  # of a run that was killed: we hold the lock
            shutil.rmtree(abandoned, ignore_errors=True)
        if not is_complete(directory, recipe):
            _write_and_place(directory, recipe, write)
    return directory


def refuse_foreign(directory: Path) -> None:
    """Raise ConfigError where `directory` holds files that no run of ours wrote."""
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists() and _marked_recipe(directory) is None:
        raise ConfigError(f"{directory} exists and is not a model made by PengServe; name another directory")


def _marked_recipe(directory: Path) -> str | None:
    try:
        recipe = json.loads((directory / MARKER).read_text())["recipe"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return recipe if isinstance(recipe, str) else None


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_and_place(directory: Path, recipe: str, write: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        write(scratch)
        (scratch / MARKER).write_text(json.dumps({"recipe": recipe}) + "\n")
        scratch.chmod(0o755)
        if directory.exists():
            directory.rename(scratch / OLD)  # so nothing is left beside the new one
        scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    shutil.rmtree(directory / OLD, ignore_errors=True)
