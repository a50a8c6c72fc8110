"""What the ingress refuses to start with."""

import pytest

from pengserve.cluster.ingress.config import IngressConfig
from pengserve.cluster.ingress.guards.security import refuse_unsafe
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import ConfigError


def config(**changes: object) -> IngressConfig:
    return IngressConfig(instance=InstanceConfig(app="a", model="m"), num_instances=1, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION"])
def test_unsafe_vllm_modes_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=name):
        refuse_unsafe(config())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_an_open_address_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="api_keys"):
        refuse_unsafe(config(host=host))
    refuse_unsafe(config(host=host, api_keys=("k",), admin_key="a"))
    refuse_unsafe(config(host=host, api_keys_file="/keys", admin_key_file="/admin"))


@pytest.mark.parametrize("keys", [{"api_keys": ("k",)}, {"api_keys_file": "/keys"}])
def test_an_api_with_keys_needs_an_admin_key(keys: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"security\.admin_key is missing.*openssl rand"):
        refuse_unsafe(config(**keys))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_none(host: str) -> None:
    refuse_unsafe(config(host=host))


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(config(api_keys=("secret",), admin_key="secret", metrics_key="secret"))
