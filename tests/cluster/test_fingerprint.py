"""Laws of the fingerprint: what changes tokens or layout changes it, nothing else does, and it costs little."""

import os
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from pengserve.cluster import fingerprint as module
from pengserve.cluster.fingerprint import fingerprint_of, fingerprinted
from pengserve.cluster.serve_name import agreed
from pengserve.planners.types.config import InstanceConfig, MicrobatchPolicy
from pengserve.planners.types.errors import ConfigError
from pengserve.replicas.versions import versions


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 128}')
    (tmp_path / "model.safetensors").write_bytes(bytes(module.SMALL_FILE_BYTES + 1))
    return tmp_path


def config(directory: Path, **changes: Any) -> InstanceConfig:
    return replace(InstanceConfig(app="a", model=str(directory), engine={"max_model_len": 512}), **changes)


MATERIAL: dict[str, Any] = {
    "model": "another/name",
    "device": "cuda",
    "cpu_threads": 7,
    "engine": {"max_model_len": 1024},
    "degrees": (2,),
    "max_stages": 2,
    "microbatches": MicrobatchPolicy.TOKENS,
    "max_in_flight": 3,
    "memory_bytes": 1 << 30,
    "chunk_bytes": 4 << 20,
    "host_bytes": 1 << 30,
    "link_bytes_per_s": 1e9,
    "host_file": "/mnt/kv",
    "session_pin_s": 60.0,
    "communicator": "direct",
    "places_by_slo": True,
    "versions": "PengServe 9.9.9, vLLM 9.9.9",
}


def test_every_field_is_known_to_matter_or_not() -> None:
    assert {field.name for field in fields(InstanceConfig)} == {*MATERIAL, *module._IMMATERIAL}


@pytest.mark.parametrize("name", MATERIAL)
def test_what_matters_changes_it(model: Path, name: str) -> None:
    assert fingerprint_of(config(model, **{name: MATERIAL[name]})) != fingerprint_of(config(model))


def test_what_does_not_matter_changes_nothing(model: Path) -> None:
    other = config(model, app="b", channel_token="t", channel_host="::", lease_s=1.0, drain_timeout_s=1.0)
    assert fingerprint_of(other) == fingerprint_of(config(model))
    assert fingerprint_of(replace(other, engine={"max_model_len": 512})) == fingerprint_of(config(model))
    assert fingerprinted(fingerprinted(config(model))) == fingerprinted(config(model))


def test_files_of_the_model_count(model: Path) -> None:
    before = fingerprint_of(config(model))
    os.utime(model / "config.json", (1, 1))
    (model / ".cache").mkdir()
    (model / ".cache" / "notes").write_text("not the model's")
    assert fingerprint_of(config(model)) == before, "a small file counts by what is in it"
    weights = model / "model.safetensors"
    os.utime(weights, (1, 1))
    after = fingerprint_of(config(model))
    assert after != before, "weights that were written anew"
    (model / "config.json").write_text('{"hidden_size": 256}')
    assert fingerprint_of(config(model)) != after


def test_large_files_are_not_read(model: Path) -> None:
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(1 << 40)  # a sparse TiB
    started_s = time.process_time()
    fingerprint_of(config(model))
    assert time.process_time() - started_s < 5.0


def test_versions_leave_the_build_out() -> None:
    assert "+" not in versions() and versions().startswith("PengServe ")


@pytest.mark.parametrize(("configured", "given"), [("", "my-app"), ("my-app", "my-app")])
def test_an_application_has_the_name_that_serve_has_for_it(configured: str, given: str) -> None:
    assert agreed(configured, given) == "my-app"


@pytest.mark.parametrize(
    ("configured", "given", "why"),
    [
        (
            "pengserve",
            "chat",
            r"args\.app is 'pengserve' and the Serve application's name is 'chat': leave args\.app out",
        ),
        ("", "two words", "cannot be used: take letters, digits"),
        ("", "a:instance", "cannot be used"),
    ],
)
def test_another_name_is_refused(configured: str, given: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        agreed(configured, given)
