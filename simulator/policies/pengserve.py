"""PengServe: the production controller decides, by load and by memory."""

from typing import Any

from pydantic import Field

from pengserve.planners.types.config import DropConfig, JudgeConfig, MergeConfig
from pengserve.simulator.dispatcher import Dispatch
from pengserve.simulator.policies.policy import Facts, Policy, Setup, planner_config


class PengServePolicy(Policy):
    """Merges where `cluster.degrees` allow it, and drops where `cluster.max_stages` does.

    `merge`, `drop` and `judge` are fields of `planners.types.config.MergeConfig`, `DropConfig` and `JudgeConfig`.
    """

    merge: dict[str, Any] = Field(default_factory=dict)
    drop: dict[str, Any] = Field(default_factory=dict)
    judge: dict[str, Any] = Field(default_factory=dict)
    dispatch: Dispatch = "ttft"

    def setup(self, facts: Facts) -> Setup:
        """The production planners with these options. Raises ConfigError, which names a wrong option."""
        drop = planner_config(DropConfig, self.drop, "policy.options.drop", max_stages=facts.max_stages)
        return Setup(
            degrees=facts.degrees,
            max_stages=facts.max_stages,
            merge=planner_config(MergeConfig, self.merge, "policy.options.merge"),
            drop=drop,
            judge=planner_config(JudgeConfig, self.judge, "policy.options.judge"),
            dispatch=self.dispatch,
        )
