"""Commands of other floors come through the entry points that pyproject.toml names."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from pengserve.cluster.cli import commands
from pengserve.cluster.cli.main import main
from pengserve.planners.types.errors import ConfigError

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
HEAVY = ("torch", "ray", "vllm", "transformers", "httpx", "numpy", "msgspec", "pydantic", "yaml")


def declared() -> list[EntryPoint]:
    table = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"][commands.GROUP]
    return [EntryPoint(name, value, commands.GROUP) for name, value in table.items()]


@pytest.fixture
def points(monkeypatch):
    """Sets the entry points that are installed; an editable install may not know those of today."""

    def use(*chosen: EntryPoint) -> None:
        monkeypatch.setattr(commands, "entry_points", lambda group: chosen)
        commands._points.cache_clear()

    yield use
    commands._points.cache_clear()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return int(end.value.code or 0)


@pytest.mark.parametrize("point", declared(), ids=lambda point: point.name)
def test_every_declared_command_explains_itself(point, points, capsys):
    points(point)
    assert run(point.name, "--help") == 0
    assert "Usage" in capsys.readouterr().out


def test_help_lists_declared_commands_after_those_of_the_floor(points, capsys):
    points(*declared())
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert all(shown.index("doctor") < shown.index(point.name) for point in declared())


@pytest.mark.parametrize("point", declared(), ids=lambda point: point.name)
def test_loading_a_declared_command_imports_nothing_heavy(point):
    code = f"import sys, {point.module}; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_an_entry_point_does_not_replace_a_command_of_the_floor(points, capsys):
    points(EntryPoint("doctor", "no.such.module:doctor", commands.GROUP))
    assert run("doctor", "--help") == 0


def test_an_entry_point_that_cannot_be_loaded_is_one_sentence(points):
    points(EntryPoint("broken", "no.such.module:broken", commands.GROUP))
    with pytest.raises(ConfigError, match="the command broken cannot be loaded from no"):
        commands._command(commands._points()["broken"])


def test_an_unknown_command_stays_unknown(points, capsys):
    points()
    assert run("nonsense") == 2
