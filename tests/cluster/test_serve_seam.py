"""The private names of Ray Serve that PengServe changes are where they were."""

import inspect
import os
import subprocess
import sys

import pytest

from pengserve.cluster import serve_seam

pytestmark = pytest.mark.slow  # imports Ray Serve


@pytest.fixture
def replica(monkeypatch):
    """Serve's module of replicas, as it was afterwards."""
    from ray.serve._private import replica

    monkeypatch.setattr(replica, "add_port_to_grpc_server", lambda server, address: server.append(address) or 7)
    return replica


def test_the_inner_grpc_server_listens_on_loopback(replica, monkeypatch):
    monkeypatch.delenv(serve_seam.INNER_GRPC_VARIABLE, raising=False)
    serve_seam.keep_inner_grpc_on_loopback()
    addresses: list[str] = []
    assert replica.add_port_to_grpc_server(addresses, "[::]:0") == 7
    assert addresses == ["127.0.0.1:0"]


def test_operators_who_call_replicas_over_grpc_keep_it(replica, monkeypatch):
    monkeypatch.setenv(serve_seam.INNER_GRPC_VARIABLE, "1")
    serve_seam.keep_inner_grpc_on_loopback()
    addresses: list[str] = []
    replica.add_port_to_grpc_server(addresses, "[::]:0")
    assert addresses == ["[::]:0"]


def test_serve_still_begins_it_there():
    from ray.serve._private import replica

    source = inspect.getsource(replica)
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in source, (
        "Ray Serve begins its inner gRPC server differently: mend cluster/serve_seam.py"
    )


def test_serve_gives_the_application_no_thread_of_its_own():
    name = next(iter(serve_seam.ONE_LOOP))
    code = f"from ray.serve._private import replica; print(replica.{name})"
    for changes, expected in ((serve_seam.ONE_LOOP, "False"), ({}, "True")):
        environment = {key: value for key, value in os.environ.items() if key != name} | changes
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        assert found.stdout.split() == [expected]
