"""vLLM with tensor parallelism: groups of a fixed degree, each GPU with its share of the weights."""

from pydantic import Field

from pengserve.planners.types.layout import GroupKind
from pengserve.simulator.policies.policy import Facts, Policy, Setup, groups_of


class VllmTp(Policy):
    """All instances are in groups of `degree`."""

    degree: int = Field(default=2, ge=2)

    def setup(self, facts: Facts) -> Setup:
        """A static layout of tensor-parallel groups. Raises ConfigError where instances cannot be grouped so."""
        layout = groups_of(facts, GroupKind.TP, self.degree, "policy.options.degree")
        return Setup(degrees=(self.degree,), layout=layout, is_static=True)
