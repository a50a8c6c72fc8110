"""Keys from files count like those of the settings, and follow their file."""

import os
from pathlib import Path

import pytest

from pengserve.cluster.ingress.config import IngressConfig
from pengserve.cluster.ingress.guards.keys import KeyRing, Keys
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import ConfigError


def config(**fields: object) -> IngressConfig:
    return IngressConfig(instance=InstanceConfig(app="a", model="m"), num_instances=1, **fields)  # type: ignore[arg-type]


def write(path: Path, text: str) -> None:
    """As an editor does: another file takes the name."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_keys_accept_themselves_and_nothing_else() -> None:
    keys = Keys(["one", "two", ""])
    assert keys.accept("one")
    assert keys.accept("two")
    assert not any(map(keys.accept, ("", "On", "one ", "onetwo", "\ud800")))
    assert not Keys([""])


def test_a_file_holds_a_key_a_line_beside_those_of_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\nfirst\n\n  second  \n")
    ring = KeyRing(config(api_keys=("given",), api_keys_file=str(path)))
    assert all(map(ring.api.accept, ("given", "first", "second")))
    assert not any(map(ring.api.accept, ("# of the team", "", "third")))


def test_a_key_is_rotated_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("old\n")
    ring = KeyRing(config(admin_key_file=str(path)))
    assert not ring.refresh()
    write(path, "old\nnew\n")
    assert ring.refresh()
    assert ring.admin.accept("old") and ring.admin.accept("new")
    write(path, "new\n")
    assert ring.refresh()
    assert ring.admin.accept("new") and not ring.admin.accept("old")
    assert ring.metrics.accept("new")


@pytest.mark.parametrize("text", ["", "# nothing\n", None])
def test_a_file_that_has_lost_its_keys_opens_nothing_and_shuts_nothing(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "keys"
    path.write_text("key\n")
    ring = KeyRing(config(api_keys_file=str(path)))
    if text is None:
        os.unlink(path)
    else:
        write(path, text)
    assert not ring.refresh()
    assert ring.api.accept("key") and not ring.api.accept("")
    write(path, "next\n")
    assert ring.refresh()
    assert ring.api.accept("next") and not ring.api.accept("key")


@pytest.mark.parametrize("text", ["", "\n#\n", None])
def test_without_a_key_in_the_file_an_ingress_does_not_start(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"security\.metrics_key_file: .*keys"):
        KeyRing(config(metrics_key_file=str(path)))


def test_metrics_open_to_their_key_and_to_the_admin_key() -> None:
    ring = KeyRing(config(api_keys=("api",), admin_key="admin", metrics_key="metrics"))
    assert ring.metrics.accept("metrics") and ring.metrics.accept("admin")
    assert not ring.metrics.accept("api")
    assert not ring.admin.accept("metrics")
