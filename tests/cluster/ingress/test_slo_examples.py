"""The examples of `docs/slo.md` run as they are written, with another address and model."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ingress import MODEL_NAME

pytestmark = pytest.mark.slow

DOCUMENT = Path(__file__).parents[3] / "docs" / "slo.md"
EXAMPLES = re.findall(r"```(sh|python)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def run(kind: str, text: str, url: str) -> str:
    """What an example prints."""
    text = text.replace("http://127.0.0.1:8000", url).replace('"demo"', f'"{MODEL_NAME}"')
    command = ["bash", "-c", text] if kind == "sh" else [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_one_for_each_way() -> None:
    assert [kind for kind, _ in EXAMPLES] == ["sh", "python", "python"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl(ingress: str) -> None:
    usage = json.loads(run(*EXAMPLES[0], ingress))["usage"]
    assert usage["completion_tokens"] == 16 and set(usage["pengserve"]) >= {"ttft_ms", "slo_met"}


@pytest.mark.parametrize(("place", "words"), [(1, "slo_met"), (2, "SLO met: ")])
def test_python(ingress: str, place: int, words: str) -> None:
    assert words in run(*EXAMPLES[place], ingress)
