"""Headless Chromium over its DevTools protocol: a page is opened, read, clicked and photographed."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START_TIMEOUT_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class ProtocolError(Exception):
    """The browser refused a command, for example because the page went elsewhere meanwhile."""


class Page:
    """One tab. Each call has a time-out."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._ids = connection, itertools.count(1)
        self.messages: list[dict[str, Any]] = []  # events that came between answers
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, timeout_s: float = 60.0, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._ids)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        deadline_s = time.monotonic() + timeout_s
        while True:
            answer = json.loads(self._connection.recv(timeout=max(deadline_s - time.monotonic(), 0.01)))
            if answer.get("id") == number:
                if "error" in answer:
                    raise ProtocolError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self.messages.append(answer)

    def open(self, url: str) -> None:
        """Loads a page."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        given = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        result = self.call("Runtime.evaluate", **given)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 60.0) -> Any:
        """Waits until a JavaScript expression is true; its value."""

        def value() -> Any:
            with contextlib.suppress(ProtocolError):  # a page that is being left
                return self.run(f"document.body && ({expression})")  # none yet: a page that is being loaded

        return self.wait_for(value, expression, timeout_s)

    def wait_for(self, what: Callable[[], Any], name: str, timeout_s: float = 60.0) -> Any:
        """Waits until `what()` is true; its value."""
        deadline_s = time.monotonic() + timeout_s
        while not (value := what()):
            assert time.monotonic() < deadline_s, f"the page never said: {name}\n{self.text()[:2000]}"
            time.sleep(0.05)
        return value

    def text(self, selector: str = "body") -> str:
        """What is to be read in an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """Clicks an element."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        """Sets the size of the window."""
        given = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **given)

    def prefer(self, **features: str) -> None:
        """What the reader prefers, such as `color_scheme="dark"`."""
        told = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=told)

    def photograph(self, path: Path) -> None:
        """Writes a PNG of the window."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def faults(self) -> list[str]:
        """What the console and the network have complained of."""
        self.run("1")
        found = []
        for message in self.messages:
            told = message["params"]
            if message["method"] == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"].get("exception", {}).get("description", told)))
            elif message["method"] == "Log.entryAdded" and told["entry"]["level"] == "error":
                found.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        return found

    def num_bytes_loaded(self) -> int:
        """Bytes of all that was loaded and has ended."""
        self.run("1")
        ends = [m["params"] for m in self.messages if m["method"] == "Network.loadingFinished"]
        return int(sum(end["encodedDataLength"] for end in ends))


@contextlib.contextmanager
def browser(width: int = 1440, height: int = 960) -> Iterator[Page]:
    """A page of a new browser, which is ended afterwards."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="pengserve-browser-", ignore_cleanup_errors=True) as folder:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with connect(_address(Path(folder)), max_size=64 << 20, proxy=None) as connection:
                page = Page(connection)
                page.size(width, height)
                yield page
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


def _address(folder: Path) -> str:
    """Where the browser's first tab listens."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    port_file = folder / "DevToolsActivePort"
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError, httpx.HTTPError, StopIteration, IndexError):
            port = port_file.read_text().split()[0]
            tabs = httpx.get(f"http://127.0.0.1:{port}/json", trust_env=False).json()
            return str(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
        time.sleep(0.05)
    raise TimeoutError("the browser did not start")
