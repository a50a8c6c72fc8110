"""Fixtures shared by the whole suite. Starting an engine costs ten seconds, so the session's two are shared."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import gpu_budget, run_budget
from tests.support.effort import register_profiles
from tests.support.heartbeat import Heartbeat, is_worker
from tests.support.models import tiny_model
from tests.support.processes import InstanceProcess, start_instances

register_profiles()


def pytest_configure(config: pytest.Config) -> None:
    """Adds the time that tests have, here and on a GPU, and the heartbeat to the process that prints."""
    run_budget.pytest_configure(config)
    gpu_budget.pytest_configure(config)
    if not is_worker(config):
        config.pluginmanager.register(Heartbeat(), "heartbeat")


def pytest_collection_finish() -> None:
    """Leaves what was imported out of all later garbage collections: hundreds of thousands of objects that stay."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def model() -> Path:
    """Directory of the tiny float32 model."""
    return tiny_model()


@pytest.fixture(scope="session")
def instances(model: Path) -> Iterator[list[InstanceProcess]]:
    """Two ready instances. Tests leave them idle and alive."""
    processes = start_instances(model, [0, 1])
    yield processes
    for process in processes:
        assert process.process.poll() is None, f"instance {process.instance_id} died in a test"
        assert process.stop() == 0


@pytest.fixture(scope="session")
def no_blanks(model: Path) -> dict[str, int]:
    """A logit bias against blanks: JSON allows any number of them, and the random model would write them for ever."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return {str(i): -100 for i in range(len(tokenizer)) if not tokenizer.decode([i]).strip()}
