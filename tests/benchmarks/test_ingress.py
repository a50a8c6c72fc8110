"""The ingress of benchmarks stops for what a deployed one stops for, and leaves nothing behind."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.ingress import settled_ingress


@contextmanager
def _ingress() -> Iterator[str]:
    yield "http://here"


def test_it_is_settled_while_it_serves_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    cluster: Any = SimpleNamespace(ingress=_ingress)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    with pytest.raises(RuntimeError, match="ends"), settled_ingress(cluster) as url:
        assert url == "http://here"
        assert gc.get_freeze_count() > 0
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        assert envs.VLLM_LOGGING_LEVEL == "INFO"  # read for the last time before
        raise RuntimeError("ends")
    assert gc.get_freeze_count() == 0
    assert envs.VLLM_LOGGING_LEVEL == "ERROR"
