"""Load tools that others wrote, against the running application."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.application import Application
from tests.support.processes import OFFLINE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_vllm_bench_serve_completes_200_requests(application: Application, model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm_bench_serve", "--url", application.url, "--tokenizer", str(model)],
        cwd=ROOT,
        env=os.environ | OFFLINE,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "200 completed, 0 failed" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.returncode == 0
