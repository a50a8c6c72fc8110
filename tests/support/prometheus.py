"""A real Prometheus server, from the distribution: what it scrapes, and what its queries find."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

INSTALLED = shutil.which("prometheus") is not None
START_TIMEOUT_S = 60.0

_CONFIG = """
global: {{scrape_interval: 300ms, scrape_timeout: 300ms}}
scrape_configs: [{{job_name: pengserve, file_sd_configs: [{{files: ["{targets}"], refresh_interval: 1s}}]}}]
"""


class PrometheusServer:
    """Scrapes what `scrape` names, three times a second."""

    def __init__(self, folder: Path) -> None:
        self._targets = folder / "targets.json"
        self._urls: list[str] = []
        self.scrape()
        config = folder / "prometheus.yml"
        config.write_text(_CONFIG.format(targets=self._targets))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        self._process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL)
        self._http = httpx.Client(base_url=f"http://{address}", timeout=30, trust_env=False)
        self.started_s = time.time()

    def scrape(self, *urls: str) -> None:
        """Adds targets."""
        self._urls += urls
        whole = self._targets.with_suffix(".new")
        whole.write_text(json.dumps([{"targets": [url.removeprefix("http://") for url in self._urls]}]))
        whole.replace(self._targets)

    def wait_scraped(self, url: str, times: int = 3) -> None:
        """Waits until a target was scraped so many times."""
        promql = f'count_over_time(up{{instance="{url.removeprefix("http://")}"}}[10m]) >= {times}'
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            try:
                if self.query(promql):
                    return
            except httpx.HTTPError:
                pass  # not listening yet
            time.sleep(0.1)
        raise TimeoutError(f"{url} was not scraped {times} times")

    def query(self, promql: str) -> Sequence[Any]:
        """What an expression is now."""
        return self._ask("query", query=promql)

    def over_run(self, promql: str) -> list[float]:
        """Every number that an expression had since the server started, of all its series."""
        series = self._ask("query_range", query=promql, start=self.started_s, end=time.time(), step=1)
        values = [float(value) for one in series for _, value in one["values"]]
        return [value for value in values if value == value]

    def close(self) -> None:
        """Ends the server."""
        self._http.close()
        self._process.terminate()
        self._process.wait(20)

    def _ask(self, kind: str, **parameters: Any) -> Sequence[Any]:
        answer = self._http.get(f"/api/v1/{kind}", params=parameters).json()
        assert answer["status"] == "success", f"{parameters.get('query')}: {answer}"
        result: Sequence[Any] = answer["data"]["result"]
        return result
