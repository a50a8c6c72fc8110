"""Classes in the settings: the built-in ones, what replaces them, and what is refused by name."""

import json
from typing import Any

import pytest

from pengserve.cluster.class_settings import service_classes
from pengserve.cluster.settings import Settings
from pengserve.cluster.settings_sources import parse_settings
from pengserve.planners.types.contract import BUILT_IN_CLASSES, Pacing, ServiceClass, Slo, SloPolicy, by_name
from pengserve.planners.types.errors import ConfigError


def classes(**given: Any) -> dict[str, ServiceClass]:
    return by_name(service_classes(parse_settings({"model": "m", "classes": given}).classes))


def test_without_settings_there_are_the_tiers_of_openai() -> None:
    assert classes() == BUILT_IN_CLASSES
    assert sorted(BUILT_IN_CLASSES) == ["default", "flex", "priority"]
    assert BUILT_IN_CLASSES["default"] == ServiceClass(name="default"), "it changes nothing"


def test_a_class_is_added_or_replaces_what_it_names() -> None:
    found = classes(
        flex={"weight": 0.1},
        chat={"slo": {"ttft_ms": 2000, "tbt_ms": 100, "policy": "reject", "pacing": "steady"}, "guaranteed_share": 0.5},
    )
    assert found["flex"] == ServiceClass(name="flex", priority=1, min_priority=0, weight=0.1)
    slo = Slo(ttft_s=2.0, tbt_s=0.1, policy=SloPolicy.REJECT, pacing=Pacing.STEADY)
    assert found["chat"] == ServiceClass(name="chat", slo=slo, guaranteed_share=0.5)
    assert found["default"] == BUILT_IN_CLASSES["default"]


def test_settings_travel_whole() -> None:
    settings = parse_settings({"model": "m", "classes": {"flex": {"weight": 2}, "a": {"slo": {"tbt_ms": 9}}}})
    again = Settings.model_validate(json.loads(json.dumps(settings.to_args())))
    assert again == settings
    assert service_classes(again.classes) == service_classes(settings.classes) == settings.controller_config().classes


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"Big": {}}, ("classes", "'Big'", "lower-case")),
        ({"auto": {}}, ("classes", "'auto'", "other than auto and scale")),
        ({f"c{i}": {} for i in range(14)}, ("classes", "at most 16")),
        ({"a": {"slo": {}}}, ("classes.a.slo", "ttft_ms")),
        ({"a": {"slo": {"ttft_ms": 0}}}, ("classes.a.slo.ttft_ms", "got 0")),
        ({"a": {"slo": {"tbt_ms": 5, "policy": "reject"}}}, ("classes.a.slo", "reject needs ttft_ms")),
        ({"a": {"slo": {"ttft_ms": 5, "pacing": "steady"}}}, ("classes.a.slo", "steady needs tbt_ms")),
        ({"a": {"wight": 1}}, ("unknown key 'classes.a.wight'",)),
        ({"a": {"min_priority": 5, "max_priority": 1}}, ("classes.a", "min_priority (5)", "max_priority (1)")),
        ({"a": {"min_priority": 1}}, ("classes", "a: requests without a priority get 0")),
        ({"a": {"weight": 0}}, ("classes.a.weight", "got 0")),
        ({"a": {"guaranteed_share": 0.6}, "b": {"guaranteed_share": 0.6}}, ("classes", "at most 1 together, got 1.2")),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        classes(**given)
    assert all(word in str(caught.value) for word in words), str(caught.value)
