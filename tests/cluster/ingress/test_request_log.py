"""Laws of the request log: each ended request is one line of figures, and no fault of a disk reaches a client."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pengserve.cluster import app
from pengserve.cluster.ingress import request_log, vllm_openai_seam
from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.request.request_options import RequestOptions
from pengserve.cluster.ingress.request_log import RequestLog
from pengserve.cluster.settings_sources import load_settings
from pengserve.controller.line_file import LineFile
from tests.controller.test_events import Disk
from tests.support.moving import PROMPT, Cluster

KEYS = [
    "at_s", "prompt_tokens", "output_tokens", "priority", "degree", "ttft_s", "e2e_s", "finish", "instance", "losses",
    "request_id", "life",
]  # fmt: skip


def cluster(path: Path | str, num_instances: int = 1, **options: Any) -> Cluster:
    """Instances behind a book whose ends are logged to `path`; the wall clock stands at 1000 s."""
    made = Cluster(num_instances, **options)
    made.request_log = RequestLog(str(path), wall_clock=lambda: 1000.0)
    for instance in made.instances:
        made.connect(instance)
    return made


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_an_ended_request_is_one_line_of_figures(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "requests.jsonl"
    served = cluster(path)
    served.request(0, 5, RequestOptions(degree=1), priority=-1)
    served.request(1, 7)
    served.settle()
    await served.request_log.flush()
    first, second = lines(path)
    assert list(first) == KEYS
    assert (first["prompt_tokens"], first["output_tokens"], first["priority"], first["degree"]) == (3, 5, -1, 1)
    assert (second["output_tokens"], second["priority"], second["degree"]) == (7, 0, None)
    assert (first["finish"], second["finish"], first["instance"], first["losses"]) == ("length", "stop", "0.0", 0)
    assert 0 <= first["ttft_s"] <= first["e2e_s"]
    assert first["at_s"] == pytest.approx(1000.0 - first["e2e_s"], abs=1e-5)


async def test_no_token_is_in_it(tmp_path: Path) -> None:
    served = cluster(tmp_path / "requests.jsonl")
    served.request(4, 6)
    served.settle()
    await served.request_log.flush()
    (line,) = lines(tmp_path / "requests.jsonl")
    assert not any(isinstance(value, list) for value in line.values())
    assert str(PROMPT) not in str(line) and "4000" not in str(line)  # the answer's tokens are 4000, 4001, ...


async def test_what_a_client_left_is_an_abort_with_the_tokens_it_got(tmp_path: Path) -> None:
    served = cluster(tmp_path / "requests.jsonl")
    served.request(0, 50)
    link = served.instances[0].link
    assert link is not None
    link.read()
    served.instances[0].step()
    served.deliver(link)
    served.abort(0)
    served.abort(0)  # a second word changes nothing
    await served.request_log.flush()
    (line,) = lines(tmp_path / "requests.jsonl")
    assert (line["finish"], line["output_tokens"], line["instance"]) == ("abort", 1, "0.0")


async def test_what_never_ran_has_no_first_token_and_no_instance(tmp_path: Path) -> None:
    made = Cluster(1)
    made.request_log = RequestLog(str(tmp_path / "requests.jsonl"))
    made.request(0, 5)
    made.abort(0)
    await made.request_log.flush()
    (line,) = lines(tmp_path / "requests.jsonl")
    assert (line["ttft_s"], line["instance"], line["output_tokens"]) == (None, None, 0)


async def test_a_request_that_is_given_up_is_an_error_and_its_losses_are_told(tmp_path: Path) -> None:
    served = cluster(tmp_path / "requests.jsonl", 2, limits=LimitConfig(max_losses=1))
    served.request(0, 5)
    for instance in served.instances:
        instance.cut(0, refuses=True)
    for link in list(served.open_links.values()):
        served.deliver(link)
    served.connect(served.instances[0])
    served.instances[0].cut(0, refuses=True)
    for link in list(served.open_links.values()):
        served.deliver(link)
    await served.request_log.flush()
    (line,) = lines(tmp_path / "requests.jsonl")
    assert (line["finish"], line["losses"]) == ("error", 2)


async def test_lines_are_appended_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    for _ in range(2):
        served = cluster(path)
        served.request(0, 2)
        served.settle()
        await served.request_log.flush()
        await served.request_log.flush()
    assert len(lines(path)) == 2


async def test_a_file_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = cluster(tmp_path)  # a directory
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            served.request(number, 2)
            served.settle()
            await served.request_log.flush()
    assert served.ended == {0, 1, 2} and not served.failed
    assert len(caplog.records) == 1 and str(tmp_path) in caplog.text
    assert not served.request_log.is_on


async def test_a_slow_disk_costs_lines_and_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_log, "MAX_BUFFERED", 2)
    served = cluster(tmp_path / "requests.jsonl")
    for number in range(5):
        served.request(number, 2)
    served.settle()
    with caplog.at_level(logging.WARNING):
        await served.request_log.flush()
    assert len(lines(tmp_path / "requests.jsonl")) == 2
    assert "3 requests are not in the request log" in caplog.text


async def test_a_full_disk_costs_the_lines_of_that_time_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "requests.jsonl"
    served = cluster(path)
    served.request_log._file = LineFile(path, write=Disk(free=300).write)
    monkeypatch.setattr(request_log, "RETRY_S", 0.0)
    with caplog.at_level(logging.WARNING):
        for number in range(4):
            served.request(number, 2)
            served.settle()
            await served.request_log.flush()
        assert served.ended == {0, 1, 2, 3} and served.request_log.is_on
        assert len(caplog.records) == 1 and "the disk is full" in caplog.text
        served.request_log._file = LineFile(path)
        served.request(4, 2)
        served.settle()
        await served.request_log.flush()
    assert len(lines(path)) == 2 and "3 requests are not in the request log" in caplog.text


def test_without_a_path_nothing_is_kept() -> None:
    served = cluster("")
    served.request(0, 2)
    served.settle()
    assert served.finishes == {"r0": "length"} and not served.request_log._rows


def test_the_setting_reaches_the_ingress() -> None:
    settings = load_settings(None, model="m", request_log="/logs/requests.jsonl", log_max_bytes=7, log_num_older=2)
    config = app.ingress_config(settings, app.instance_config(settings))
    assert config.request_log == "/logs/requests.jsonl"
    controller = settings.controller_config()
    assert (config.log_max_bytes, config.log_num_older) == (7, 2)
    assert (controller.event_log_max_bytes, controller.event_log_num_older) == (7, 2)


def test_reasons_have_the_names_of_openai() -> None:
    assert str(vllm_openai_seam.FinishReason.STOP) == "stop"
