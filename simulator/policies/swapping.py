"""Priorities that change while requests run: vLLM 0.x with swapping or recompute, and FastSwitch with its parts."""

from typing import Literal

from pydantic import Field

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.engine.swapping.costs import SwapOptions
from pengserve.simulator.policies.policy import Facts, Policy, Setup


class _Churn(Policy):
    """`every`: iterations between two updates of priorities (the paper's frequency is 1 / every)."""

    every: int = Field(default=25, ge=1)
    pattern: Literal["random", "markov"] = "random"
    seed: int = 0

    def _setup(self, facts: Facts, **parts: bool) -> Setup:
        if not facts.has_host:
            raise ConfigError("cluster.host_bytes is 0, and this policy swaps KV to the host: give it")
        swap = SwapOptions(every=self.every, pattern=self.pattern, seed=self.seed, **parts)
        return Setup(host="swap", swap=swap)


class VllmPriority(_Churn):
    """Every instance alone; a request that is preempted is swapped block by block while nothing runs, or recomputed."""

    preemption: Literal["swap", "recompute"] = "swap"

    def setup(self, facts: Facts) -> Setup:
        """As above. Raises ConfigError where there is no host."""
        return self._setup(facts, is_recompute=self.preemption == "recompute")


class FastSwitch(_Churn):
    """Block groups, asynchronous swapping, and reuse of what the host has; each can be left out."""

    groups: bool = True
    is_async: bool = True
    reuse: bool = True

    def setup(self, facts: Facts) -> Setup:
        """As above. Raises ConfigError where there is no host."""
        return self._setup(facts, groups=self.groups, is_async=self.is_async, reuse=self.reuse)
