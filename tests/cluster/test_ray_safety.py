"""An application does not start on a Ray without a token, nor open and keyless because Serve listens elsewhere."""

import subprocess
import sys

import pytest

pytest.importorskip("ray")

from pengserve.cluster.ray_safety import refuse_open_serve
from pengserve.planners.types.errors import ConfigError

pytestmark = pytest.mark.slow  # imports Ray

_START = """
import ray
from pengserve.cluster.ray_safety import refuse_open_ray
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
ray.get(ray.remote(num_cpus=0)(refuse_open_ray).remote(), timeout=120)
print("started")
"""

_SERVE = """
import ray
from ray import serve
from pengserve.cluster.ray_safety import serve_http_host
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
serve.start(proxy_location="Disabled", http_options={"host": "0.0.0.0", "port": 1})
print("host", ray.get(ray.remote(num_cpus=0)(serve_http_host).remote(), timeout=120))
"""


def test_the_address_is_the_one_that_serve_was_started_with() -> None:
    environment = {
        "PATH": "/usr/bin:/bin",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 64,
        "HOME": "/nonexistent",
    }
    done = subprocess.run([sys.executable, "-c", _SERVE], capture_output=True, text=True, timeout=300, env=environment)
    assert "host 0.0.0.0" in done.stdout, done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "serve.example.org"])
def test_serve_on_an_open_address_needs_keys_no_matter_what_the_settings_say(host: str) -> None:
    with pytest.raises(ConfigError, match=r"Ray Serve listens on .*security\.api_keys"):
        refuse_open_serve(host, has_keys=False)
    refuse_open_serve(host, has_keys=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_serve_on_loopback_needs_none(host: str) -> None:
    refuse_open_serve(host, has_keys=False)


@pytest.mark.parametrize(("mode", "starts"), [("disabled", False), ("token", True)])
def test_a_ray_without_a_token_is_refused(mode: str, starts: bool) -> None:
    environment = {"PATH": "/usr/bin:/bin", "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "0" * 64, "HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", _START], capture_output=True, text=True, timeout=300, env=environment)
    assert ("started" in done.stdout) is starts, done.stderr
    if not starts:
        assert "ray get-auth-token --generate" in done.stderr
