"""A model folder is complete or absent, however many processes make it and wherever one stops."""

import threading
import time
from pathlib import Path

import pytest

from pengserve.cluster.demo.checkpoint import is_complete, write_once
from pengserve.planners.types.errors import ConfigError


def _write(directory: Path) -> None:
    (directory / "a").write_text("1")
    time.sleep(0.01)
    (directory / "b").write_text("2")


def _visible(directory: Path) -> list[str]:
    """Everything but lock files."""
    return sorted(entry.name for entry in directory.iterdir() if not entry.name.endswith(".lock"))


def test_written_once(tmp_path: Path) -> None:
    calls = []
    for _ in range(2):
        write_once(tmp_path / "model", "r1", lambda scratch: (calls.append(scratch), _write(scratch)))
    assert len(calls) == 1
    assert is_complete(tmp_path / "model", "r1")
    assert _visible(tmp_path) == ["model"]


def test_another_recipe_replaces_it(tmp_path: Path) -> None:
    write_once(tmp_path / "model", "r1", lambda scratch: (scratch / "old").touch())
    write_once(tmp_path / "model", "r2", _write)
    assert is_complete(tmp_path / "model", "r2")
    assert not (tmp_path / "model" / "old").exists()


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(scratch: Path) -> None:
        _write(scratch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_once(tmp_path / "model", "r1", interrupted)
    assert _visible(tmp_path) == []


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".model-killed").mkdir()
    write_once(tmp_path / "model", "r1", _write)
    assert _visible(tmp_path) == ["model"]


def test_other_peoples_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not a model made by PengServe"):
        write_once(tmp_path, "r1", _write)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert is_complete(write_once(tmp_path / "model", "r1", _write), "r1")


def test_of_many_at_once_one_writes(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    writes: list[Path] = []

    def write(scratch: Path) -> None:
        writes.append(scratch)
        _write(scratch)

    def make() -> None:
        try:
            path = write_once(tmp_path / "model", "r1", write)
            assert (path / "a").read_text() + (path / "b").read_text() == "12"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not errors
    assert len(writes) == 1
    assert _visible(tmp_path) == ["model"]
