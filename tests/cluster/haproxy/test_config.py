"""Serve's configuration of HAProxy comes out with time-outs, limits and no open port but the API's."""

import pytest

from pengserve.cluster.haproxy.config import UnknownTemplateError, guarded
from pengserve.cluster.haproxy.limits import ConnectionLimits

CONFIG = """global
    stats socket /tmp/x/admin.sock mode 666 level admin expose-fd listeners
    maxconn 4096
defaults
    timeout client 3600s
    errorfile 503 /tmp/x/500.http
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind *:8000
# frontend of nothing
listen stats
  bind *:8404
  stats enable
"""
DIRECTORY = "/tmp/ps-1/node"


def change(config: str = CONFIG, **options) -> str:
    return guarded(config, DIRECTORY, ConnectionLimits(), max_connections=9000, pages={503: "/p/503.http"}, **options)


def test_statistics_move_to_unix_sockets_and_the_api_stays_where_it_is():
    changed = change()
    assert f"bind unix@{DIRECTORY}/promethe mode 600" in changed
    assert f"bind unix@{DIRECTORY}/stats mode 600" in changed
    assert "bind *:8000" in changed


def test_another_user_cannot_change_haproxy_by_its_socket():
    assert "stats socket /tmp/x/admin.sock mode 600 level admin" in change()


def test_headers_have_ten_seconds_and_a_silent_client_sixty():
    changed = change()
    assert "timeout client 60s" in changed
    assert "timeout http-request 10s" in changed
    assert "timeout client 3600s" in change(keeps_client_timeout=True)


def test_one_source_has_its_share_of_connections_and_a_trusted_one_all():
    changed = change()
    assert "    maxconn 9000\n" in changed
    assert "track-sc0 src,ipmask(32,64) if !{ src 127.0.0.0/8 ::1/128 }" in changed
    assert "reject if { sc0_conn_cur gt 2048 }" in changed
    everyone = guarded(CONFIG, DIRECTORY, ConnectionLimits(trusted_sources=()))
    assert "track-sc0 src,ipmask(32,64)  # pengserve" in everyone
    assert "maxconn 4096" in everyone


def test_own_pages_take_the_place_of_serves():
    changed = change()
    assert "errorfile 503 /p/503.http" in changed
    assert "500.http" not in changed


def test_a_second_pass_changes_nothing():
    assert change(change()) == change()


@pytest.mark.parametrize("gone", ["    timeout client 3600s\n", "frontend http_frontend\n"])
def test_a_configuration_without_a_place_for_a_protection_is_refused(gone):
    with pytest.raises(UnknownTemplateError, match=r"Ray 2\.60"):
        change(CONFIG.replace(gone, ""))
