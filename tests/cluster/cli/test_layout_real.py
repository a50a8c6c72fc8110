"""What people see and use of the shape, over a real cluster: HTTP, SDK, command line, metrics."""

import threading
from collections.abc import Iterator

import httpx
import pytest
from rich.console import Console

from pengserve.client import PengServe, PengServeAPIError
from pengserve.cluster.cli.main import main
from pengserve.cluster.cli.views import top_view
from pengserve.planners.types.strategy import SwitchStrategy
from tests.support.elastic import elastic_cluster
from tests.support.models import tiny_model

pytestmark = pytest.mark.slow
SWITCHES = 'pengserve_switches_total{app="tests",kind="merge",outcome="done",strategy="carry"}'


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """An ingress in front of two instances that can merge."""
    with elastic_cluster(tiny_model(), 2) as cluster, cluster.ingress() as url:
        yield url


def run(url: str, *arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--url", url])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_layout_set_by_the_sdk_serves_and_is_seen(url: str) -> None:
    answers: list[int] = []

    def ask() -> None:
        body = {"model": "tiny", "prompt": "one two", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).status_code)

    with PengServe(url) as client:
        running = threading.Thread(target=ask)
        running.start()
        view = client.set_layout("tp2", timeout_s=60)
        running.join(60)
        assert [str(group) for group in view.layout.groups] == ["tp2@(0,1)"]
        assert (view.policy.is_auto, view.cannot) == (False, ())
        record = client.layout().last_switch
        assert record is not None and record.phase == "done"
        assert record.report is not None and record.report.cutover_s > 0
        ask()
        assert answers == [200, 200]
        console = Console(width=160, color_system=None)
        with console.capture() as capture:
            console.print(top_view(None, client.status()))
        text = capture.get()
        assert "tp2 leads" in text and "tp2 with 0" in text and "merge tp2@(0,1) (carry) done" in text
        assert client.set_layout("dp", strategy=SwitchStrategy.HARD).layout.epoch > view.layout.epoch
        with pytest.raises(PengServeAPIError, match=r"tp4.*choose dp, tp2"):
            client.set_layout("tp4")
        with pytest.raises(PengServeAPIError, match=r"no instance 7"):
            client.set_layout("tp2@(0,7)")


def test_the_command_line_shows_each_switch(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(url, "layout", "set", "tp2") == 0
    out, err = capsys.readouterr()
    assert "layout tp2@(0,1)" in out and "merge tp2@(0,1) (carry)" in err and "cutover" in err
    assert run(url, "layout", "set", "dp", "--strategy", "sequential") == 0
    out, err = capsys.readouterr()
    assert "layout 2 dp" in out and "split tp2@(0,1) (sequential)" in err
    assert run(url, "layout", "set", "tp3") == 1
    assert "choose dp, tp2" in capsys.readouterr().err
    assert run(url, "layout") == 0
    assert "can form     tp2@(0,1)" in capsys.readouterr().out


def test_switches_are_counted_after_a_while(url: str) -> None:
    with PengServe(url) as client, httpx.Client(base_url=url, trust_env=False) as http:
        client.set_layout("tp2")
        client.set_layout("dp")
        for _ in range(200):
            if any(line.startswith(SWITCHES) for line in http.get("/metrics").text.splitlines()):
                return
            threading.Event().wait(0.1)
    pytest.fail("no merge was counted")
