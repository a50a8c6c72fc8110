"""What `pengserve up` refuses before it starts anything, what it prints, and how it takes signals."""

import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys

import pytest
from rich.console import Console

from pengserve.cluster.cli.main import main
from pengserve.cluster.cli.ports import PortBlock
from pengserve.cluster.cli.progress import Steps
from pengserve.cluster.cli.ray_local import ray_environment
from pengserve.cluster.cli.supervisor import StopRequest
from pengserve.cluster.cli.up import curl_line, local_url
from pengserve.cluster.ingress import serve_front
from pengserve.cluster.settings_sources import load_settings

KEY = "secret-key-of-the-test"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Nothing that the shell which runs the tests has set."""
    for name in list(os.environ):
        if name.upper().startswith("PENGSERVE_") or name in (
            "VLLM_SERVER_DEV_MODE",
            "VLLM_ALLOW_INSECURE_SERIALIZATION",
        ):
            monkeypatch.delenv(name)


def refusal(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["up", *arguments])
    assert end.value.code == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_a_taken_port_is_refused_before_anything_starts(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port} is taken" in refusal(capsys, "--model", "demo", "--port", port)


def test_a_missing_model_directory_is_refused_with_a_model_to_try(tmp_path, capsys):
    assert "--model demo" in refusal(capsys, "--model", str(tmp_path / "nowhere"))


def test_an_unsafe_variable_is_refused_by_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert "VLLM_SERVER_DEV_MODE" in refusal(capsys, "--model", str(tmp_path))


def test_an_unknown_key_in_the_file_is_refused_with_file_and_key(tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text("model: m\nhttp: {prot: 1}")
    err = refusal(capsys, str(path))
    assert "'http.prot'" in err and "http.port" in err and str(path) in err


@pytest.mark.parametrize("command", [["down"], ["up", "--model", "demo", "--detach"]])
def test_without_ray_the_cluster_commands_say_so_at_once(command):
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:9"}  # the discard port: nobody listens
    done = subprocess.run(
        [sys.executable, "-m", "pengserve.cluster.cli.main", *command],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 1
    assert "found no Ray cluster" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_pasted_line_is_a_request_and_holds_no_key():
    settings = load_settings(
        None, model="m", served_model_name=["demo"], security={"api_keys": [KEY], "admin_key": KEY + "-admin"}
    )
    words = shlex.split(curl_line(settings))
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["stream"]) == ("demo", True)
    assert "http://127.0.0.1:8000/v1/chat/completions" in words
    assert KEY not in curl_line(settings)
    assert "Authorization: Bearer $PENGSERVE_API_KEY" in words


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
    ],
)
def test_this_machine_finds_the_application_wherever_it_listens(host, url):
    assert (
        local_url(
            load_settings(None, model="m", http={"host": host}, security={"api_keys": [KEY], "admin_key": "admin"})
        )
        == url
    )


def test_tls_is_spoken_where_a_certificate_is_given():
    http = {"proxy": "serve", "ssl_keyfile": "k.pem", "ssl_certfile": "c.pem"}
    settings = load_settings(None, model="m", http=http)
    assert local_url(settings).startswith("https://")
    assert " -k " in curl_line(settings)


def test_the_first_signal_asks_and_the_second_insists():
    before = signal.getsignal(signal.SIGTERM)
    stop = StopRequest()
    with stop.listening():
        assert not stop.wait(0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(5.0) and stop.is_asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
    assert signal.getsignal(signal.SIGTERM) is before


def test_haproxy_is_asked_for_only_where_it_is_wanted_and_its_sockets_have_short_paths():
    scratch = "/tmp/ps-12345678"
    ports = PortBlock(18400)
    with_haproxy = ray_environment(load_settings(None, model="m"), scratch, ports)
    assert with_haproxy["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    # Serve puts a directory named after the node, 56 characters, into the path; Linux takes 107 bytes.
    assert all(len(v) + 57 <= 107 for k, v in with_haproxy.items() if k.endswith("SOCKET_PATH"))
    without = ray_environment(load_settings(None, model="m", http={"proxy": "serve"}), scratch, ports)
    assert not any("HAPROXY" in name or "HA_PROXY" in name for name in without)
    assert without[serve_front.VARIABLE] == serve_front.IMPORT_PATH, "the proxies themselves read Serve's headers"


def test_into_a_pipe_each_change_is_one_line():
    out = io.StringIO()
    with Steps(Console(file=out)) as steps:
        steps.waiting("ray", "starting")
        steps.waiting("ray", "starting")
        steps.done("ray", "there")
        steps.done("ray", "there")
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].split() == ["ray", "starting"]
    assert lines[1].startswith("ray") and "there (" in lines[1]
