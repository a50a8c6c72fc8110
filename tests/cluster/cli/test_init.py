"""`pengserve init` writes what the package ships, and overwrites nothing."""

from pathlib import Path

import pytest

from pengserve.cluster.cli.init import run_init
from pengserve.cluster.settings_sources import load_settings
from pengserve.planners.types.errors import ConfigError


def test_the_files_are_those_of_the_repository_and_can_be_used(tmp_path: Path) -> None:
    run_init(tmp_path / "mine")
    written = {path.relative_to(tmp_path / "mine") for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    root = Path(__file__).parents[3]
    kept = {path.relative_to(root) for f in ("deploy", "dashboards") for path in (root / f).iterdir() if path.is_file()}
    assert written == {path for path in kept if path.suffix != ".py"}
    assert load_settings(tmp_path / "mine" / "deploy" / "laptop.yaml").instances.count == 2


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "serve.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"serve\.yaml exists already"):
        run_init(tmp_path)
    assert (tmp_path / "deploy" / "serve.yaml").read_text() == "mine"
    assert not (tmp_path / "dashboards").exists()
