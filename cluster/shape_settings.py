"""The section `shape` of the settings: which groups the instances may form, and when.

Standard library and pydantic only, as `settings.py`.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from pengserve.planners.types.config import (
    DropConfig,
    JudgeConfig,
    MergeConfig,
    MicrobatchPolicy,
    check_degrees,
    check_max_stages,
)

Strategy = Literal["sequential", "soft", "hard", "carry"]  # `planners.types.plans.SwitchStrategy`


class DropSettings(BaseModel, extra="forbid", validate_default=True, frozen=True):
    """When instances drop parameters that others have too, for KV room; see `planners.types.config.DropConfig`."""

    max_stages: int = Field(default=1, ge=1)  # of the pipelines that they then form; 1: parameters are never dropped
    microbatches: MicrobatchPolicy = MicrobatchPolicy.LOOKAHEAD  # lookahead, or tokens: what fills the stages
    max_in_flight: int = Field(default=0, ge=0)  # microbatches; 0: one a stage, fewer where instances share cores
    auto: bool = True  # as memory demands; false: only where a layout with pipelines is asked for
    drop_above: float = Field(default=0.95, gt=0, le=1)
    target: float = Field(default=0.8, gt=0, le=1)
    restore_below: float = Field(default=0.5, ge=0, le=1)
    horizon_s: float = Field(default=1, ge=0)
    quiet_s: float = Field(default=1, ge=0)
    min_dwell_s: float = Field(default=2, ge=0)
    link_bytes_per_s: float = Field(default=1e9, gt=0)

    @field_validator("max_stages")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        return check_max_stages(value)

    @model_validator(mode="after")
    def _can_plan(self) -> "DropSettings":
        self.drop_config()
        return self

    def drop_config(self) -> DropConfig:
        """What the planners of drops and restores go by."""
        return DropConfig(is_auto=self.auto, **self.model_dump(exclude={"auto", "microbatches", "max_in_flight"}))


class JudgeSettings(BaseModel, extra="forbid", validate_default=True, frozen=True):
    """When a change of the layout pays; see `planners.types.config.JudgeConfig`."""

    enabled: bool = True  # false: thresholds decide, as before anything was measured
    horizon_s: float = Field(default=20, gt=0)
    margin: float = Field(default=0.15, ge=0)
    least_s: float = Field(default=1, ge=0)
    slo_scale: float = Field(default=5, ge=0)
    miss_weight: float = Field(default=20, ge=0)
    regret: float = Field(default=0.5, ge=0)

    def judge_config(self) -> JudgeConfig:
        """What the judge goes by."""
        return JudgeConfig(is_on=self.enabled, **self.model_dump(exclude={"enabled"}))


COMMUNICATORS = {"auto": "", "tcp": "direct", "nccl": "nccl"}
"""Names of `shape.communicator` and of `InstanceConfig.communicator`."""


class ShapeSettings(BaseModel, extra="forbid", validate_default=True, frozen=True):
    """Which groups the instances may form, and when; see `planners.types.config.MergeConfig`.

    Instances that may form groups keep their weights as they are, without vLLM's packing for CPUs.
    """

    degrees: Literal["auto"] | list[int] = "auto"  # auto: all powers of two that fit; []: the shape never changes
    auto: bool = True  # the cluster chooses its layout from the load, until a user pins one; false: it stays as it is
    min_dwell_s: float = Field(default=5, ge=0)
    merge_below: float = Field(default=0.25, ge=0, le=1)
    split_above: float = Field(default=0.5, ge=0, le=1)
    busy_requests: int = Field(default=8, ge=1)
    quiet_s: float = Field(default=2, ge=0)
    max_degree: int = Field(default=8, ge=1)  # of groups that the cluster chooses by itself, and of `auto` degrees
    load_strategy: Strategy = "carry"
    priority_strategy: Strategy = "hard"
    long_context_strategy: Strategy = "carry"
    peer_timeout_s: float = Field(default=5, gt=0)
    communicator: Literal["auto", "tcp", "nccl"] = "auto"  # of groups. auto: NCCL on cuda, own TCP on cpu
    cuda: Literal["off", "experimental"] = "off"  # off: on CUDA the shape never changes; it ran on one GPU alone

    redirect: bool = True  # requests that wait where there is no room go on to where they can begin
    migrate: bool = False  # running requests move from full instances to free ones, while both serve

    drop: DropSettings = DropSettings()
    judge: JudgeSettings = JudgeSettings()

    @field_validator("cuda", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads `off` as false

    @field_validator("degrees", mode="before")
    @classmethod
    def _powers_of_two(cls, value: Any) -> Any:
        if value == "auto":
            return value
        return list(check_degrees(value if isinstance(value, list | tuple) else [value], also="auto"))

    @model_validator(mode="after")
    def _can_plan(self) -> "ShapeSettings":
        self.merge_config()
        return self

    def merge_config(self) -> MergeConfig:
        """What the merge planner goes by."""
        elsewhere = {
            "degrees",
            "auto",
            "peer_timeout_s",
            "communicator",
            "cuda",
            "redirect",
            "migrate",
            "drop",
            "judge",
        }
        return MergeConfig(is_auto=self.auto, **self.model_dump(exclude=elsewhere))
