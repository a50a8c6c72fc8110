"""Limits of connections travel through variables and come out as they went in."""

import pytest

from pengserve.cluster.haproxy.limits import ConnectionLimits
from pengserve.cluster.settings import Settings
from pengserve.cluster.settings_sources import load_settings
from pengserve.planners.types.errors import ConfigError


def test_what_a_setting_says_is_what_the_proxy_reads():
    settings = Settings.model_validate(
        {
            "model": "demo",
            "http": {"header_timeout_s": 3, "max_connections_per_source": 50, "trusted_sources": "10.1.0.7/16"},
        }
    )
    limits = settings.http.connection_limits
    assert (limits.header_timeout_s, limits.client_timeout_s, limits.trusted_sources) == (3, 60, ("10.1.0.0/16",))
    assert ConnectionLimits.from_environment(limits.to_environment()) == limits


def test_the_variables_are_those_of_the_settings(monkeypatch):
    for name, value in ConnectionLimits(header_timeout_s=4, trusted_sources=("::/64",)).to_environment().items():
        monkeypatch.setenv(name, value)
    http = load_settings(None, model="demo").http
    assert (http.header_timeout_s, http.trusted_sources) == (4, ["::/64"])


def test_without_variables_the_defaults_hold():
    assert ConnectionLimits.from_environment({"PENGSERVE_HTTP__HEADER_TIMEOUT_S": " "}) == ConnectionLimits()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADER_TIMEOUT_S", "0"),
        ("CLIENT_TIMEOUT_S", "-1"),
        ("CLIENT_TIMEOUT_S", "9" * 5000),
        ("MAX_CONNECTIONS_PER_SOURCE", "many"),
        ("TRUSTED_SOURCES", '{"a": 1}'),
        ("TRUSTED_SOURCES", '["10.0.0.0/8 } or { always_true"]'),
    ],
)
def test_other_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"PENGSERVE_HTTP__{name}: "):
        ConnectionLimits.from_environment({f"PENGSERVE_HTTP__{name}": value})


@pytest.mark.parametrize("value", ["10.0.0.0/33", "all", "10.0.0.1 } http-request allow {"])
def test_a_source_that_is_no_network_is_refused_in_the_settings_too(value):
    with pytest.raises(ConfigError, match=r"http\.trusted_sources: .* is no network"):
        load_settings(None, model="demo", http={"trusted_sources": [value]})
