"""vLLM with data parallelism: every instance alone, for ever."""

from pengserve.simulator.dispatcher import Dispatch
from pengserve.simulator.policies.policy import Facts, Policy, Setup


class VllmDp(Policy):
    """Requests go to the instance with the least virtual KV load, or as `dispatch` says; lost memory is recomputed."""

    dispatch: Dispatch = "load"

    def setup(self, facts: Facts) -> Setup:
        """Every instance alone; the layout never changes."""
        return Setup(dispatch=self.dispatch)
