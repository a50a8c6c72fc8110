"""The section `classes` of the settings: what requests of a service class may ask for, and what they get by default.

    classes:
      default: {slo: {ttft_ms: 2000, tbt_ms: 100}}
      batch: {priority: 10, min_priority: 0, weight: 0.25}

The classes `default`, `flex` and `priority` are there without being named; what is given of one replaces that field.
Standard library and pydantic only, as `settings.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from pengserve.planners.types.contract import BUILT_IN_CLASSES, Pacing, ServiceClass, Slo, SloPolicy

MAX_CLASSES = 16  # each is a label of metrics
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_RESERVED = frozenset({"auto", "scale"})  # tiers of OpenAI's that name no class


class SloSettings(BaseModel, extra="forbid", validate_default=True, frozen=True):
    """What requests of a class are to keep where they bring no SLO themselves."""

    ttft_ms: float | None = Field(default=None, ge=1, le=3_600_000)
    tbt_ms: float | None = Field(default=None, ge=1, le=60_000)
    policy: Literal["best_effort", "reject"] = "best_effort"
    pacing: Literal["none", "steady"] = "none"

    @model_validator(mode="after")
    def _can_be_kept(self) -> "SloSettings":
        if self.ttft_ms is None and self.tbt_ms is None:
            raise ValueError("give ttft_ms, tbt_ms or both, or leave slo out")
        if self.policy == "reject" and self.ttft_ms is None:
            raise ValueError("policy reject needs ttft_ms, which the predicted time is compared with")
        if self.pacing == "steady" and self.tbt_ms is None:
            raise ValueError("pacing steady needs tbt_ms, the time of one token")
        return self

    def slo(self) -> Slo:
        """As planners see it."""
        return Slo(
            ttft_s=None if self.ttft_ms is None else self.ttft_ms / 1e3,
            tbt_s=None if self.tbt_ms is None else self.tbt_ms / 1e3,
            policy=SloPolicy(self.policy),
            pacing=Pacing(self.pacing),
        )


class ClassSettings(BaseModel, extra="forbid", validate_default=True, frozen=True):
    """One class. Lower priorities are more urgent, as in vLLM."""

    slo: SloSettings | None = None
    priority: int | None = None  # of requests that bring none; None: the built-in class's, or 0
    min_priority: int | None = None  # the most urgent that a request may ask for; None: the built-in class's limit
    max_priority: int | None = None
    weight: float | None = Field(default=None, gt=0, le=1000)  # of its share; None: the built-in class's, or 1
    guaranteed_share: float = Field(default=0, ge=0, le=1)  # of the cluster's time, while requests of it wait

    @model_validator(mode="after")
    def _has_priorities(self) -> "ClassSettings":
        low, high = self.min_priority, self.max_priority
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_priority ({low}) must not be above max_priority ({high})")
        return self

    def service_class(self, name: str) -> ServiceClass:
        """The class `name`, with what the built-in one says where this says nothing.

        Raises:
            ValueError: requests without a priority would have one that the class does not allow.
        """
        base = BUILT_IN_CLASSES.get(name, ServiceClass(name=name))
        given: dict[str, Any] = self.model_dump(exclude={"slo"}, exclude_none=True)
        found = replace(base, slo=self.slo.slo() if self.slo else base.slo, **given)
        if not found.allows(found.priority):
            raise ValueError(
                f"requests without a priority get {found.priority}, which must be within min_priority and max_priority"
            )
        return found


def service_classes(classes: Mapping[str, ClassSettings]) -> tuple[ServiceClass, ...]:
    """All configured classes by name.

    Raises:
        ValueError: a name, a priority, or the sum of the guaranteed shares cannot be.
    """
    if len(set(classes) | set(BUILT_IN_CLASSES)) > MAX_CLASSES:
        raise ValueError(f"at most {MAX_CLASSES} classes are accepted, {', '.join(BUILT_IN_CLASSES)} included")
    found = []
    for name, given in sorted(classes.items()):
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise ValueError(
                f"{name!r} is no name of a class: give 1 to 32 lower-case letters, digits, - and _, a letter first,"
                f" other than {' and '.join(sorted(_RESERVED))}"
            )
        try:
            found.append(given.service_class(name))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    total = sum(each.guaranteed_share for each in found)
    if total > 1:
        raise ValueError(f"the guaranteed shares of all classes may be at most 1 together, got {total:g}")
    return tuple(found)
