"""`pengserve doctor` names what is wrong with a model directory, a port or the environment, and what to do."""

import json
import socket

import pytest

from pengserve.cluster.cli.doctor import Level, check_ray, check_settings, examine
from pengserve.cluster.cli.main import main
from pengserve.cluster.settings_sources import load_settings
from tests.support.nvidia import pretend

CONFIG = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 256}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Nothing unsafe from the shell that runs the tests."""
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path):
    """A directory that has every file of a model, with nothing in the weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"0" * 64)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    return tmp_path


def levels(model, subject: str) -> list[Level]:
    return [f.level for f in examine(None, str(model), None) if f.subject == subject]


def test_a_complete_directory_is_well(model):
    findings = [
        f for f in examine(None, str(model), None) if f.subject in ("model", "tokenizer", "chat template", "head size")
    ]
    assert [f.level for f in findings] == [Level.OK] * 4


def test_every_problem_says_what_to_do(model, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    (model / "config.json").unlink()
    for finding in examine(None, str(model), None):
        assert finding.level is Level.OK or finding.action or "unset it" in finding.text, finding


@pytest.mark.parametrize(
    ("missing", "subject", "level"),
    [
        ("config.json", "model", Level.FAIL),
        ("model.safetensors", "model", Level.FAIL),
        ("tokenizer.json", "tokenizer", Level.FAIL),
        ("tokenizer_config.json", "chat template", Level.WARN),
    ],
)
def test_a_missing_file_is_found(model, missing, subject, level):
    (model / missing).unlink()
    assert level in levels(model, subject)


def test_a_head_size_without_cpu_kernel_is_found(model):
    (model / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 48}))
    findings = [f for f in examine(None, str(model), None) if f.subject == "head size"]
    from pengserve.cluster.settings import has_cuda_driver

    assert [f.level for f in findings] == [Level.OK if has_cuda_driver() else Level.FAIL]


def test_a_taken_port_is_found(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert [f.level for f in examine(None, str(model), port) if f.subject == "port"] == [Level.WARN]
    assert [f.level for f in examine(None, str(model), port) if f.subject == "port"] == [Level.OK]


def test_a_failure_is_exit_code_1_and_names_itself(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--model", str(tmp_path / "nowhere")])
    assert end.value.code == 1
    assert "fail  model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "level", "said"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, Level.FAIL, "RAY_AUTH_MODE is disabled"),
        ({"RAY_AUTH_MODE": "token"}, Level.OK, "asks for the token"),
        ({}, Level.OK, "set RAY_AUTH_MODE=token"),
    ],
)
def test_a_ray_without_a_token_is_told(environment, level, said, tmp_path):
    (finding,) = check_ray(environment, tmp_path)
    assert finding.level is level
    assert said in finding.text


def test_haproxy_as_it_comes_is_told(tmp_path):
    *_, finding = check_ray({"RAY_SERVE_ENABLE_HA_PROXY": "1"}, tmp_path)
    assert (finding.level, finding.subject) == (Level.WARN, "haproxy")


def test_gpus_and_shapes_are_told(model, monkeypatch, tmp_path_factory):
    pretend(monkeypatch, tmp_path_factory.mktemp("tool"), 8)
    monkeypatch.setenv("PENGSERVE_SHAPE__CUDA", "experimental")
    found = {}
    for finding in examine(None, str(model), None):
        found.setdefault(finding.subject, []).append((finding.level, finding.text))
    assert "NVIDIA H100 80GB HBM3" in found["gpu 7"][0][1] and "driver 580.65.06" in found["gpu 7"][0][1]
    assert found["nvlink"] == [(Level.OK, "between all devices")]
    assert [level for level, _ in found["gpu memory"]] == [Level.OK]
    shapes = [text for _, text in found["shape"]]
    assert "tp4 works over NVLink" in shapes
    assert any(text.startswith("no tp8: 4 attention heads do not split into 8") for text in shapes)


def test_a_model_that_does_not_fit_a_gpu_is_told_how_much_is_missing(model, monkeypatch, tmp_path_factory):
    pretend(monkeypatch, tmp_path_factory.mktemp("tool"), 1)
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(30 << 30)
    (finding,) = [f for f in examine(None, str(model), None) if f.subject == "gpu memory"]
    assert finding.level is Level.FAIL and "GiB are missing: 30.0 GiB of weights" in finding.text and finding.action


def test_a_missing_file_of_keys_is_told(tmp_path):
    (tmp_path / "keys").write_text("key\n")
    files = {"api_keys_file": str(tmp_path / "keys"), "admin_key_file": str(tmp_path / "nowhere")}
    (finding,) = check_settings(load_settings(None, model="demo", security=files))
    assert finding.text.startswith("security.admin_key_file: cannot read the file")
