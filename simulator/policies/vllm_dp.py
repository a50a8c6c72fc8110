"""vLLM with data parallelism: every instance alone, for ever."""

from pengserve.simulator.policies.policy import Facts, Policy, Setup


class VllmDp(Policy):
    """Requests go to the instance with the least virtual KV load; memory that runs out is recomputed."""

    def setup(self, facts: Facts) -> Setup:
        """Every instance alone; the layout never changes."""
        return Setup()
