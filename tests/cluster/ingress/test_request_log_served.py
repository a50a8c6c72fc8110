"""The request log of a real ingress: what clients asked for, once each, with how it ended."""

import json
from pathlib import Path

import httpx
import pytest

from tests.support.ingress import FixedRoutes, ingress_config, serving, wait_ready
from tests.support.processes import InstanceProcess

pytestmark = pytest.mark.slow


def test_each_answer_is_one_line_when_the_ingress_stops(tmp_path: Path, instances: list[InstanceProcess]) -> None:
    path = tmp_path / "requests.jsonl"
    config = ingress_config(instances, request_log=str(path))
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 24, "temperature": 0}
    two = {"n": 2, "temperature": 1, "priority": -1}
    with (
        serving(config, FixedRoutes(instances)) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as http,
    ):
        wait_ready(url)
        answer = http.post("/v1/completions", json=body).json()
        text = answer["choices"][0]["text"]
        assert http.post("/v1/completions", json={**body, "stop": [text[10:14]]}).status_code == 200
        both = http.post("/v1/completions", json={**body, **two}, headers={"x-pengserve-parallelism": "dp"})
        refused = http.post("/v1/completions", json={**body, "n": 99})
    assert (both.status_code, refused.status_code) == (200, 400)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["finish"] for line in lines] == ["length", "stop", "length", "length"]
    assert [line["degree"] for line in lines] == [None, None, 1, 1]
    assert [line["priority"] for line in lines] == [0, 0, -1, -1]
    assert lines[0]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert lines[0]["output_tokens"] == answer["usage"]["completion_tokens"] == 24
    assert lines[1]["output_tokens"] < 24
    assert {line["instance"] for line in lines} <= {str(process.snapshot.key) for process in instances}
    assert all(0 < line["ttft_s"] <= line["e2e_s"] for line in lines)
    assert lines[0]["request_id"] == answer["id"] + "-0"
    assert [line["life"].split()[1:] for line in lines] == [["sent", line["instance"]] for line in lines]
    assert text not in path.read_text()
