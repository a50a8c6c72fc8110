"""The corpus: documentation strings, read without importing anything."""

import sys
from pathlib import Path

import pytest

from pengserve.cluster.demo.corpus import first_sentence, read_docstrings


def test_no_text_comes_twice_and_the_order_is_fixed() -> None:
    docs = read_docstrings(modules=("json", "argparse"))
    assert len({doc.text for doc in docs}) == len(docs) > 30
    assert docs == read_docstrings(modules=("json", "argparse"))


def test_names_are_those_of_python() -> None:
    docs = {doc.full_name: doc.text for doc in read_docstrings(modules=("json",))}
    import json

    assert docs["json"].startswith("JSON (JavaScript Object Notation)")
    assert docs["json.dumps"].split()[0] == json.dumps.__doc__.split()[0]
    assert "json.decoder.JSONDecoder.raw_decode" in docs


def test_reading_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text('"""A trap for readers."""\nraise SystemExit("it was run")\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    assert [doc.text for doc in read_docstrings(tmp_path)] == ["A trap for readers."]
    assert "trap" not in sys.modules


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Return the number of items. More.", "Return the number of items."),
        ("Return the number\nof items\n\nMore.", "Return the number of items."),
        ("foo(x) -> int", ""),
        ("Short.", ""),
        (">>> print(1) is not a sentence.", ""),
    ],
)
def test_first_sentence(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence
