"""vLLM with data parallelism: every instance alone, for ever."""

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.dispatcher import Dispatch
from pengserve.simulator.policies.policy import Facts, Policy, Setup


class VllmDp(Policy):
    """Requests go to the instance with the least virtual KV load, or as `dispatch` says; lost memory is recomputed.

    With `offload`, KV of prefixes is kept on the host too, as vLLM's own CPU offloading does.
    """

    dispatch: Dispatch = "load"
    offload: bool = False

    def setup(self, facts: Facts) -> Setup:
        """Every instance alone; the layout never changes. Raises ConfigError where there is no host to offload to."""
        if self.offload and not facts.has_host:
            raise ConfigError("policy.options.offload is true, and cluster.host_bytes is 0: give it")
        return Setup(dispatch=self.dispatch, host="prefixes" if self.offload else "unused")
