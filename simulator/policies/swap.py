"""vLLM's data parallelism, where memory that runs out is swapped to the host instead of recomputed (InferCept-like)."""

from pengserve.simulator.policies.policy import Facts, Policy, Setup


class Swap(Policy):
    """Needs the fast scheduler: vLLM's own has no swapping any more."""

    def setup(self, facts: Facts) -> Setup:
        """Every instance alone, with preemption by swapping KV to the host."""
        return Setup(preemption="swap")
