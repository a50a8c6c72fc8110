"""Comments, docstrings and messages name their subject: the instance, the request, the controller, the user."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.words import FORBIDDEN

ROOT = Path(__file__).parents[1]
FOLDERS = ("planners", "controller", "replicas", "cluster", "simulator", "deploy")
# Between two words of a phrase: also the end of a comment's line, or of a literal that the next one continues.
_GAP = r"""(?:[\s#"']|[rf](?=["']))+"""
_FORBIDDEN = re.compile(rf"\b({'|'.join(word.replace(' ', _GAP) for word in FORBIDDEN)})\b", re.IGNORECASE)
_ONLY_SEE = re.compile(r"See\s(`[^`]*`|\.(?=\w)|[^.:`])+\.?")  # one sentence, and no fact after a colon
ONLY_SEE = "a docstring that only says where to see"
_PROSE = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}  # from Python 3.12
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("folder", FOLDERS)
def test_prose_names_its_subject(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [(path.relative_to(ROOT), line, fault) for path in files for line, fault in faults(path.read_text())]
    assert not found, "\n".join(f"{path}:{line}: {fault}" for path, line, fault in found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1  # Nobody waits", [(1, "nobody")]),
        ("# what runs of its\n# own accord", [(1, "of its own accord")]),
        ('"""A log.\n\nIn two\nminds.\n"""', [(3, "in two minds")]),
        ('x = "says"\ny = (\n    "kept for "\n    "somebody"\n)', [(4, "somebody")]),
        ('x = "in " "two" \\\n    " minds"', [(1, "in two minds")]),
        ('n = 1\nx = f"instance {n} and whatever {n:d} has"', [(2, "whatever")]),
        ('def f():\n    """See `LaneScheduler`."""', [(2, ONLY_SEE)]),
        ('class A:\n    """See the module, and `a.b.C` for what\n    each method does."""', [(2, ONLY_SEE)]),
        ('x = "first\\nnobody"', [(1, "nobody")]),
        ('def f():\n    """See `A`. The time is virtual."""', []),
        ('def f():\n    """See `A`: it takes no time."""', []),
        ('def f():\n    """Sees `A`."""', []),
        ("in_ = of(its); two = minds  # of its own", []),
        ("nobody = anybody_else = 1  # names are not prose", []),
    ],
)
def test_faults_are_found_where_they_are(source: str, expected: list[tuple[int, str]]) -> None:
    assert list(faults(source)) == expected


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Lines and faults of one file: forbidden words, and docstrings that only point elsewhere."""
    text = prose(source)
    for found in _FORBIDDEN.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, " ".join(re.split(_GAP, found[1].lower()))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and _ONLY_SEE.fullmatch(ast.get_docstring(node) or ""):
            yield node.body[0].lineno, ONLY_SEE


def prose(source: str) -> str:
    """`source` with its comments and string literals where they were, and a bar for each other visible character."""
    starts = [0, *(match.end() for match in re.finditer("\n", source))]
    text = re.sub(r"[^\s\\]", "|", source).replace("\\", " ")  # a backslash outside continues a line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _PROSE:
            start, stop = (starts[row - 1] + column for row, column in (token.start, token.end))
            text = text[:start] + re.sub(r"\\[nt]", "  ", source[start:stop]) + text[stop:]
    return text
