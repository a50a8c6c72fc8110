"""The demo model as it is shipped with the package, trained: `model: demo` in a configuration."""

from pathlib import Path

SHIPPED_NAME = "demo"
"""What a configuration says in place of a directory."""


def shipped_model() -> Path:
    """Directory of the shipped checkpoint: weights, tokenizer and chat template; `make demo-model` trains it anew."""
    return Path(__file__).parent / "model"
