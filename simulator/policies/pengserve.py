"""PengServe: the production controller decides, by load and by memory."""

from typing import Any

from pydantic import Field

from pengserve.planners.long_answers import GivingWay
from pengserve.planners.types.config import DropConfig, JudgeConfig, MergeConfig
from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.dispatcher import Dispatch
from pengserve.simulator.policies.policy import Facts, Policy, Setup, planner_config


class PengServePolicy(Policy):
    """Merges where `cluster.degrees` allow it, drops where `cluster.max_stages` does, and keeps KV on hosts that have
    `cluster.host_bytes`.

    `merge`, `drop` and `judge` are fields of `planners.types.config.MergeConfig`, `DropConfig` and `JudgeConfig`.
    """

    merge: dict[str, Any] = Field(default_factory=dict)
    drop: dict[str, Any] = Field(default_factory=dict)
    judge: dict[str, Any] = Field(default_factory=dict)
    dispatch: Dispatch = "ttft"
    redirect: bool = True

    def setup(self, facts: Facts) -> Setup:
        """The production planners with these options. Raises ConfigError, which names a wrong option."""
        if facts.has_host and (facts.degrees or facts.max_stages > 1):
            raise ConfigError(
                "cluster.host_bytes gives instances a host tier, which works in dp alone so far: leave out"
                " cluster.degrees and cluster.max_stages"
            )
        drop = planner_config(DropConfig, self.drop, "policy.options.drop", max_stages=facts.max_stages)
        return Setup(
            degrees=facts.degrees,
            max_stages=facts.max_stages,
            merge=planner_config(MergeConfig, self.merge, "policy.options.merge"),
            drop=drop,
            judge=planner_config(JudgeConfig, self.judge, "policy.options.judge"),
            dispatch=self.dispatch,
            host="tiers" if facts.has_host else "unused",
            redirects=self.redirect,
            short_prompts=True,
            late_prompts=True,
            long_answers=None if facts.has_host else GivingWay(),
            short_first_steps=bool(facts.degrees) or facts.max_stages > 1,
        )
