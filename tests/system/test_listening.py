"""With a loopback `http.host`, nothing that `pengserve up` starts can be reached from another machine."""

import ipaddress

import psutil
import pytest

from tests.support.application import Application

pytestmark = pytest.mark.slow


def test_every_socket_that_listens_is_on_loopback(application: Application) -> None:
    up = psutil.Process(application.process.pid)
    listening = {}
    for process in (up, *up.children(recursive=True)):
        try:
            name = " ".join(process.cmdline())[:80]
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    listening[connection.laddr.port] = (connection.laddr.ip, name)
        except psutil.NoSuchProcess:
            continue
    assert application.port in listening
    opened = {port: (ip, name) for port, (ip, name) in listening.items() if not _is_loopback(ip)}
    assert not opened, f"reachable from other machines: {opened}"


def _is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
