"""No two `pengserve up` of a machine get the same ports, however soon one comes after the other."""

import socket
import subprocess
import sys

import pytest

from pengserve.cluster.cli.ports import NUM_PROBED, http_port, port_block
from pengserve.planners.types.errors import ConfigError
from tests.support.application import free_port


def test_two_clusters_have_ports_apart():
    with port_block() as one, port_block() as other:
        assert {one.fallback, *one.ingresses}.isdisjoint({other.fallback, *other.ingresses})


def test_a_block_is_free_again_after_its_holder_was_killed():
    code = (
        "import time\n"
        "from pengserve.cluster.cli.ports import port_block\n"
        "with port_block() as ports: print(ports.first, flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    first = int(holder.stdout.readline())
    with port_block() as mine:
        assert mine.first != first
        holder.kill()
        holder.wait()
        holder.stdout.close()
        with port_block() as again:
            assert again.first == first


def test_a_block_in_which_a_server_is_left_is_passed_over():
    with port_block() as ports:
        first = ports.first
    with socket.socket() as left:
        left.bind(("127.0.0.1", first + NUM_PROBED - 1))
        left.listen()
        with port_block() as ports:
            assert ports.first != first


def test_the_http_port_of_a_cluster_that_starts_is_refused_with_a_sentence():
    port = free_port()
    with (
        http_port(port),
        pytest.raises(ConfigError, match=f"port {port} belongs to another `pengserve up`"),
        http_port(port),
    ):
        pass
    with http_port(port):
        pass
