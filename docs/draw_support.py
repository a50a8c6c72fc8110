"""Draws docs/support.md: which models tests run in which shapes, on which devices.

python docs/draw_support.py              (or `make support`)

What can be read from the tests is read from them: layouts, families and degrees. A claim that cannot be read names its
test, and the script fails where that is gone.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXACTNESS = "tests/system/test_shape_exactness.py"
VIEWS = "tests/replicas/engine/test_shared_model.py"
PRECISION = "tests/system/test_shape_precision.py"
ALONE = "tests/cluster/ingress/test_unsupported_shapes.py"
SHAPES = ("dp", "tp2", "tp4", "pp2", "pp4")
NOT_RUN = "not run"
SPECULATIVE = "Llama, speculative decoding"
WORDS = {
    "exact": "Requests are served while instances change between all shapes of the row. Every output equals the"
    " undisturbed one.",
    "served": "Requests are served. In bfloat16, switches move the mean log-probability of tokens by less than 0.001.",
    "weights": "Each member's weights equal those that vLLM loads there. No request is served.",
    "refused": "The shape is refused with a sentence that says why; instances work alone.",
    NOT_RUN: "No test runs it.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a test shows of a model in some shapes, on a CPU."""

    model: str
    weights: str
    shapes: frozenset[str]
    word: str
    test: str  # path::function


def draw() -> str:
    """The whole document."""
    found = claims()
    rows = list(dict.fromkeys((claim.model, claim.weights) for claim in found))
    rows += [("any", "quantised (fp8, int8, AWQ, GPTQ, ...)")]
    lines = [
        "# Models and shapes that tests run",
        "",
        "Made by `make support` from the tests themselves; a test compares this file with them.",
        "",
        "| model | weights | " + " | ".join(f"{shape}, CPU" for shape in SHAPES) + " | any shape, GPU |",
        "|---" * (len(SHAPES) + 3) + "|",
        *(_row(model, weights, found) for model, weights in rows),
        "",
        "`dp` is an instance alone, `tpN` a tensor-parallel group of N instances, `ppN` a pipeline of N. No group is",
        "both.",
        "",
        *(f"- **{word}**: {meaning}" for word, meaning in WORDS.items()),
        "",
        "Llama checkpoints are tiny random ones (`tests/support/models.py`). The shipped demo model is a Llama too.",
        "Other models that vLLM 0.32 serves may work alone (`dp`), but no test here shows it. Groups and pipelines are",
        "refused for quantised weights, mixtures of experts, LoRA, multi-modal input, speculative decoding and",
        "attention other than full: one check comes before all of them.",
        "",
        "Tests:",
        "",
        *(f"- `{test}`" for test in sorted({claim.test for claim in found})),
        "",
        "**GPUs**: one H200 and one H100, on 2026-11-26 and 27 ([what held](../benchmarks/results/gpu-h100.md),",
        "[figures, and what failed](../benchmarks/results/gpu-h200.md)). Not run: anything between two GPUs. Tests",
        "that need a GPU (`make test-gpu`, ten minutes at most):",
        "",
        *(f"- `{path}`" for path in _gpu_tests()),
    ]
    return "\n".join(lines) + "\n"


def claims() -> tuple[Claim, ...]:
    """All that tests show."""
    layouts: Mapping[int, Iterable[str]] = _constant(EXACTNESS, "LAYOUTS")
    exact = frozenset(re.findall(r"dp|[tp]p\d+", " ".join(text for texts in layouts.values() for text in texts)))
    families: list[str] = _constant(VIEWS, "FAMILIES")
    degrees = frozenset(f"tp{degree}" for degree in _parameters(VIEWS, "test_views_are_what_vllm_loads", "degree"))
    if unknown := (exact | degrees) - set(SHAPES):
        raise SystemExit(f"add the shapes {', '.join(sorted(unknown))} to SHAPES")
    return (
        _claim("Llama", "float32", exact, "exact", EXACTNESS, "test_any_sequence"),
        _claim("Llama", "bfloat16", {"dp", "tp2"}, "served", PRECISION, "test_teacher_forced_nll_in_bfloat16"),
        _claim(SPECULATIVE, "float32", {"dp"}, "served", ALONE, "test_it_serves_alone_and_the_layout_says_why"),
        _claim(SPECULATIVE, "float32", {"tp2"}, "refused", ALONE, "test_it_serves_alone_and_the_layout_says_why"),
        *(
            _claim(family, "float32", degrees, "weights", VIEWS, "test_views_are_what_vllm_loads")
            for family in families
            if family != "Llama"
        ),
        _claim(
            "Mixtral", "float32", set(SHAPES) - {"dp"}, "refused", VIEWS, "test_experts_are_refused_with_a_sentence"
        ),
    )


def _claim(model: str, weights: str, shapes: Iterable[str], word: str, path: str, function: str) -> Claim:
    _function(path, function)
    return Claim(model=model, weights=weights, shapes=frozenset(shapes), word=word, test=f"{path}::{function}")


def _row(model: str, weights: str, found: Iterable[Claim]) -> str:
    cells = [NOT_RUN] * len(SHAPES)
    for claim in found:
        if (claim.model, claim.weights) == (model, weights):
            cells = [claim.word if shape in claim.shapes else cell for shape, cell in zip(SHAPES, cells, strict=True)]
    return "| " + " | ".join([model, weights, *cells, NOT_RUN]) + " |"


def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def _constant(path: str, name: str) -> Any:
    """The value of a module's constant."""
    for node in _tree(path).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return ast.literal_eval(node.value)
    raise SystemExit(f"{path} has no constant {name} any more")


def _function(path: str, name: str) -> ast.FunctionDef:
    for node in _tree(path).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise SystemExit(f"{path} has no test {name} any more")


def _parameters(path: str, function: str, parameter: str) -> list[int]:
    """What `pytest.mark.parametrize` gives a parameter of a test."""
    for call in _function(path, function).decorator_list:
        if isinstance(call, ast.Call) and isinstance(call.args[0], ast.Constant) and call.args[0].value == parameter:
            values: list[int] = ast.literal_eval(call.args[1])
            return values
    raise SystemExit(f"{path}::{function} has no parameter {parameter} any more")


def _gpu_tests() -> list[str]:
    marked = re.compile(r"^ +pytest\.mark\.gpu,$", re.MULTILINE)
    tests = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(path.relative_to(ROOT)) for path in tests if marked.search(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    Path(__file__).with_name("support.md").write_text(draw(), encoding="utf-8")
