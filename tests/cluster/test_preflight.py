"""Mistakes in the settings that are told before anything starts, by `pengserve up` and by `pengserve doctor`."""

import json
import os
import subprocess

import pytest
import yaml

from pengserve.cluster.cli.main import main
from pengserve.cluster.preflight import mistakes
from pengserve.cluster.settings_sources import load_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Nothing that the shell which runs the tests has set."""
    for name in list(os.environ):
        if name.upper().startswith("PENGSERVE_") or name.startswith("VLLM_"):
            monkeypatch.delenv(name)


@pytest.fixture
def model(tmp_path):
    """A directory that has every file of a model, with nothing in them."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (directory / "model.safetensors").write_bytes(b"0" * 64)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def found(model, **settings) -> list[str]:
    return list(mistakes(load_settings(None, model=str(model), **settings)))


def test_a_complete_model_and_usual_settings_have_no_mistake(model):
    engine = {"max_model_len": 512, "dtype": "float32", "kv-cache-memory-bytes": 1 << 28, "quantization": "fp8"}
    openai = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "reasoning_parser": "qwen3"}
    assert found(model, engine=engine, openai=openai) == []


WRONG = [
    ({"engine": {"max_model_length": 512}}, ("engine.max_model_length", "did you mean max_model_len?")),
    ({"engine": {"xyzzy": 1}}, ("engine.xyzzy", "vllm serve --help")),
    ({"engine": {"max_model_len": "lots"}}, ("engine.max_model_len", "a whole number", "'lots'")),
    ({"engine": {"worker_cls": "x"}}, ("engine.worker_cls", "leave it out")),
    ({"engine": {"reasoning_parser": "qwen33"}}, ("engine.reasoning_parser", "did you mean qwen3?")),
    ({"openai": {"tool_call_parser": "hermess"}}, ("openai.tool_call_parser", "did you mean hermes?")),
    ({"openai": {"reasoning_parser": "xyzzy"}}, ("openai.reasoning_parser", "'xyzzy'", "there are", "deepseek_r1")),
    ({"openai": {"enable_auto_tool_choice": True}}, ("openai.tool_call_parser",)),
    ({"openai": {"chat_template": "missing.jinja"}}, ("openai.chat_template", "missing.jinja", "No such file")),
    ({"openai": {"chat_template": "{% for m in messages %}"}}, ("openai.chat_template", "line 1", "Jinja")),
    (
        {"http": {"proxy": "serve", "ssl_keyfile": "no.key", "ssl_certfile": "no.pem"}},
        ("http.ssl_keyfile", "no.key", "http.ssl_certfile", "no.pem", "No such file"),
    ),
    ({"event_log": "/"}, ("event_log", "is a directory")),
    ({"event_log": "/dev/null/events.jsonl"}, ("event_log", "/dev/null")),
    ({"request_log": "/"}, ("request_log", "is a directory")),
]


@pytest.mark.parametrize(("settings", "named"), WRONG, ids=lambda value: str(value)[:60])
def test_up_and_doctor_tell_the_mistake_in_the_users_names(model, tmp_path, capsys, settings, named):
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"model": str(model), **settings}))
    with pytest.raises(SystemExit) as end:
        main(["up", str(path)])
    refusal = capsys.readouterr().err
    assert end.value.code == 1 and refusal.count("\n") == 1
    with pytest.raises(SystemExit) as end:
        main(["doctor", str(path)])
    report = capsys.readouterr().out
    assert end.value.code == 1 and "fail" in report
    for name in named:
        assert name in refusal and name in report, (name, refusal, report)


@pytest.mark.parametrize(
    ("missing", "named"),
    [("config.json", "config.json"), ("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer")],
)
def test_a_model_directory_that_lacks_a_file_is_refused(model, capsys, missing, named):
    (model / missing).unlink()
    with pytest.raises(SystemExit) as end:
        main(["up", "--model", str(model)])
    assert end.value.code == 1 and named in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--model", str(model)])
    assert end.value.code == 1


def test_a_configuration_that_is_no_json_is_refused(model):
    (model / "config.json").write_text("{")
    (problem,) = found(model)
    assert "config.json is no valid JSON" in problem


def test_weights_of_another_kind_are_left_to_vllm(model):
    (model / "model.safetensors").unlink()
    assert found(model, engine={"load_format": "dummy"}) == []


def test_a_name_of_the_hub_is_refused_where_it_is_neither_here_nor_may_be_fetched():
    code = (
        "from pengserve.cluster.preflight import mistakes\n"
        "from pengserve.cluster.settings_sources import load_settings\n"
        "print(*mistakes(load_settings(None, model='owner/nothing')))"
    )

    def told(offline: str, cache: str) -> str:
        environment = {**os.environ, "HF_HUB_OFFLINE": offline, "HF_HOME": cache}
        done = subprocess.run(
            [os.sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout.strip()

    assert "HF_HUB_OFFLINE" in told("1", "/nonexistent")
    assert told("0", "/nonexistent") == ""


def test_a_path_of_several_parts_is_no_name_of_the_hub():
    (problem,) = mistakes(load_settings(None, model="models/small/nothing"))
    assert "models/small/nothing does not exist" in problem


def test_a_key_that_does_not_belong_to_the_certificate_is_refused(model, tmp_path):
    for name in ("a", "b"):
        _make_certificate(tmp_path / f"{name}.key", tmp_path / f"{name}.pem")

    def http(key: str) -> dict[str, str]:
        return {"proxy": "serve", "ssl_keyfile": str(tmp_path / key), "ssl_certfile": str(tmp_path / "a.pem")}

    assert found(model, http=http("a.key")) == []
    (problem,) = found(model, http=http("b.key"))
    assert "http.ssl_certfile" in problem and "MISMATCH" in problem


def _make_certificate(key, certificate) -> None:
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True, timeout=120)


def test_files_of_another_machine_are_not_looked_for(model):
    http = {"proxy": "serve", "ssl_keyfile": "no.key", "ssl_certfile": "no.pem"}
    settings = load_settings(None, model=str(model), http=http, event_log="/dev/null/events.jsonl")
    assert list(mistakes(settings, is_local=False)) == []


def test_a_mistake_is_told_without_importing_what_is_slow(model):
    code = (
        "import sys\n"
        "from pengserve.cluster.preflight import mistakes\n"
        "from pengserve.cluster.settings_sources import load_settings\n"
        f"assert list(mistakes(load_settings(None, model={str(model)!r}, engine={{'max_model_length': 1}})))\n"
        "assert not {'vllm', 'torch', 'ray', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([os.sys.executable, "-c", code], check=True, timeout=120)
