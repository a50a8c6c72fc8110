"""The section `fairness`: what it makes of the engine and of tenants, and what it refuses, by name."""

from typing import Any

import pytest

from pengserve.cluster.settings_sources import parse_settings
from pengserve.planners.types.errors import ConfigError

BASE: dict[str, Any] = {"model": "m"}


def test_shares_need_vllms_policy_priority_and_set_it() -> None:
    assert "scheduling_policy" not in parse_settings(BASE).engine_args()
    settings = parse_settings({**BASE, "fairness": {"enabled": True}})
    assert settings.engine_args()["scheduling_policy"] == "priority"
    with pytest.raises(ConfigError, match=r"engine\.scheduling_policy is fcfs: leave out one"):
        parse_settings({**BASE, "fairness": {"enabled": True}, "engine": {"scheduling_policy": "fcfs"}})


def test_each_ingress_grants_its_part_of_a_limit() -> None:
    given = {"default": {"max_requests": 5}, "tenants": {"acme": {"weight": 3, "tokens_per_minute": 1000}}}
    config = parse_settings({**BASE, "fairness": given}).fairness.config(2)
    assert config.default.max_requests == 3 and config.default.tokens_per_minute is None
    assert config.tenant("acme").tokens_per_minute == 500 and config.tenant("acme").weight == 3
    assert config.tenant("other") is config.default and config.has_limits and not config.is_on


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tenants": {"bad name": {}}}, "is no name of a tenant"),
        ({"tenants": {"*": {}}}, "is no name of a tenant"),
        ({"tenants": {f"t{i}": {} for i in range(10_001)}}, "at most 10,000 tenants"),
        ({"default": {"weight": 0}}, "weight"),
        ({"default": {"max_requests": 0}}, "max_requests"),
        ({"age_s": 0}, "age_s"),
        ({"enabeld": True}, "enabeld"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_settings({**BASE, "fairness": given})
