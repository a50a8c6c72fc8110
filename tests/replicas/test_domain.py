"""Laws of the question which devices are close to an instance's own."""

from pathlib import Path

import pytest

from pengserve.replicas.domain import domain_of
from tests.support.nvidia import pretend


def test_the_domain_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, 8)
    assert domain_of("cuda:5") == "0"
    for unknown in ("cpu", "cuda", "cuda:GPU-1", "cuda:9"):
        assert domain_of(unknown) == ""


def test_without_an_answer_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert domain_of("cuda:0") == ""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    assert domain_of("cuda:0") == ""
