"""Text that any machine with Python has: the documentation strings of the standard library.

Sources are parsed, never imported, so that reading a module of the standard library runs none of its code.
"""

import ast
import inspect
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Folders whose text is about tests or about other people's packages, not about the library.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"})
MIN_SENTENCE_CHARS = 20
MAX_SENTENCE_CHARS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class DocString:
    """One documentation string and what it documents."""

    module: str  # "collections.abc"
    name: str  # "Counter.most_common"; empty for the module itself
    text: str  # dedented, as `inspect.cleandoc` leaves it

    @property
    def full_name(self) -> str:
        """Dotted name with the module, e.g. "collections.Counter.most_common"."""
        return f"{self.module}.{self.name}" if self.name else self.module


def standard_library() -> Path:
    """Folder that holds the standard library's sources."""
    return Path(sysconfig.get_paths()["stdlib"])


@cache
def read_docstrings(root: Path | None = None, modules: tuple[str, ...] | None = None) -> tuple[DocString, ...]:
    """All different documentation strings below `root`, in the order of the files' names.

    Args:
        root: folder of sources; the standard library where None.
        modules: keep these top-level names alone ("argparse", "json"); all where None.
    """
    root = root or standard_library()
    found: list[DocString] = []
    seen: set[str] = set()
    for path in _sources(root, modules):
        for doc in _docstrings_of(path, _module_name(path.relative_to(root))):
            if doc.text not in seen:
                seen.add(doc.text)
                found.append(doc)
    return tuple(found)


def first_sentence(text: str) -> str:
    """The first sentence of a documentation string on one line, or "" where it does not begin with a plain one."""
    paragraph = " ".join(text.split("\n\n", 1)[0].split())
    match = re.match(r"(.+?[.!?])(?:\s|$)", paragraph)
    sentence = match.group(1) if match else paragraph
    if not MIN_SENTENCE_CHARS <= len(sentence) <= MAX_SENTENCE_CHARS or not sentence[0].isalpha():
        return ""
    if any(mark in sentence for mark in ("->", ">>>", "--", "::")) or not sentence.isascii():
        return ""
    return sentence if sentence[-1] in ".!?" else sentence + "."


def words(text: str) -> list[str]:
    """Words of a text in lower case: runs of two or more letters."""
    return re.findall(r"[a-z]{2,}", text.lower())


def _sources(root: Path, modules: tuple[str, ...] | None) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.isdisjoint(parts) and (modules is None or parts[0].removesuffix(".py") in modules):
            yield path


def _module_name(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


def _docstrings_of(path: Path, module: str) -> Iterator[DocString]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a few files of the library are broken on purpose
        return
    yield from _walk(tree, module, "")


def _walk(node: ast.AST, module: str, name: str) -> Iterator[DocString]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False)
        if text and text.strip():
            yield DocString(module=module, name=name, text=inspect.cleandoc(text))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, module, f"{name}.{child.name}" if name else child.name)
