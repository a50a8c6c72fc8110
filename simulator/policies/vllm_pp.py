"""vLLM with pipeline parallelism: pipelines of a fixed number of stages, each GPU with its layers."""

from pydantic import Field, field_validator

from pengserve.planners.types.config import DropConfig
from pengserve.planners.types.layout import GroupKind
from pengserve.simulator.policies.policy import Facts, Policy, Setup, groups_of


class VllmPp(Policy):
    """All instances are in pipelines of `stages`."""

    stages: int = Field(default=2, ge=2)

    @field_validator("stages")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"give a power of two such as 2 or 4; got {value}")
        return value

    def setup(self, facts: Facts) -> Setup:
        """A static layout of pipelines. Raises ConfigError where instances cannot be grouped so."""
        layout = groups_of(facts, GroupKind.PP, self.stages, "policy.options.stages")
        drop = DropConfig(is_auto=False, max_stages=self.stages)
        return Setup(max_stages=self.stages, drop=drop, layout=layout, is_static=True)
