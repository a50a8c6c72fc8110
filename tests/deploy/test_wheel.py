"""A user's `pip install .`: command line and client, without torch, Ray or vLLM, in half a minute."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.speed import slowness

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
INSTALL_S = 30.0
HEAVY = ("torch", "ray", "vllm", "transformers")


def run(*command: str | Path, timeout_s: float = 400) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of a fresh environment with the wheel installed."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("pengserve-*.whl")
    started_s = time.monotonic()
    run(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--disable-pip-version-check", wheel)
    took_s = time.monotonic() - started_s
    assert took_s < INSTALL_S * slowness(), f"the base install took {took_s:.0f} s"
    return python


def test_the_base_install_has_no_engine(python: Path) -> None:
    installed = run(python, "-m", "pip", "list", "--format=freeze").lower()
    assert "pengserve==" in installed
    assert [name for name in HEAVY if f"\n{name}==" in installed] == []


def test_command_line_and_client_work(python: Path, tmp_path: Path) -> None:
    command = python.parent / "pengserve"
    assert "OpenAI API" in run(command, "--help")
    run(command, "init", tmp_path / "mine")
    assert (tmp_path / "mine" / "deploy" / "serve.yaml").is_file()
    run(python, "-c", "from pengserve.client import PengServe; PengServe('http://127.0.0.1:1').close()")
    run(command, "simulate", "--help")


def test_the_demo_model_is_inside(python: Path) -> None:
    code = (
        "from pengserve.cluster.demo.shipped import shipped_model; print((shipped_model() / 'config.json').is_file())"
    )
    assert run(python, "-c", code).strip() == "True"


def test_the_live_page_is_inside(python: Path) -> None:
    code = (
        "from importlib.resources import files; "
        "print(*(p.name for p in files('pengserve.cluster.ui').joinpath('static').iterdir()))"
    )
    names = run(python, "-c", code).split()
    assert {"page.html", "page.css", "page.js", "login.html", "uplot"} <= set(names)
