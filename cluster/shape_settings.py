"""The section `shape` of the settings: which groups the instances may form, and when.

Standard library and pydantic only, as `settings.py`.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from pengserve.planners.types.config import DropConfig, MergeConfig, MicrobatchPolicy

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
        if value & (value - 1):
            raise ValueError(f"give a power of two such as 2 or 4, or 1 for none; got {value}")
        return value

    @model_validator(mode="after")
    def _hysteresis(self) -> "DropSettings":
        if self.target > self.drop_above:
            raise ValueError(
                f"target ({self.target:g}) must not be above drop_above ({self.drop_above:g}),"
                " or memory would be short right after a drop"
            )
        if self.restore_below >= self.drop_above:
            raise ValueError(
                f"restore_below ({self.restore_below:g}) must be below drop_above ({self.drop_above:g}),"
                " or parameters would come and go"
            )
        return self

    def drop_config(self) -> DropConfig:
        """What the planners of drops and restores go by."""
        return DropConfig(is_auto=self.auto, **self.model_dump(exclude={"auto", "microbatches", "max_in_flight"}))


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
    cuda: Literal["off", "experimental"] = "off"  # off: on CUDA the shape never changes; none of it ran on a GPU yet

    migrate: bool = False  # running requests move from full instances to free ones, while both serve

    drop: DropSettings = DropSettings()

    @field_validator("cuda", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads `off` as false

    @field_validator("degrees", mode="before")
    @classmethod
    def _powers_of_two(cls, value: Any) -> Any:
        if value == "auto":
            return value
        degrees = list(value) if isinstance(value, list | tuple) else [value]
        if not all(type(degree) is int and degree >= 2 and not degree & (degree - 1) for degree in degrees):
            raise ValueError(f"give powers of two such as [2, 4], or auto, or [] for none; got {value!r}")
        return sorted(set(degrees))

    @model_validator(mode="after")
    def _hysteresis(self) -> "ShapeSettings":
        if self.split_above <= self.merge_below:
            raise ValueError(
                f"split_above ({self.split_above:g}) must be above merge_below ({self.merge_below:g}),"
                " or the shape would change to and fro"
            )
        return self

    def merge_config(self) -> MergeConfig:
        """What the merge planner goes by."""
        elsewhere = {"degrees", "auto", "peer_timeout_s", "cuda", "migrate", "drop"}
        return MergeConfig(is_auto=self.auto, **self.model_dump(exclude=elsewhere))
