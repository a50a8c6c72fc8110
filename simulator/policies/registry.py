"""All policies by name."""

import difflib

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.policies.migration import Migration
from pengserve.simulator.policies.offload.deepspeed import DeepSpeed
from pengserve.simulator.policies.offload.flexgen import FlexGen
from pengserve.simulator.policies.offload.heuristic import DynamicHeuristic
from pengserve.simulator.policies.offload.orbitflow import OrbitFlow
from pengserve.simulator.policies.offload.slo_aware import SloAware
from pengserve.simulator.policies.pengserve import PengServePolicy
from pengserve.simulator.policies.policy import Policy
from pengserve.simulator.policies.swap import Swap
from pengserve.simulator.policies.swapping import FastSwitch, VllmPriority
from pengserve.simulator.policies.vllm_dp import VllmDp
from pengserve.simulator.policies.vllm_pp import VllmPp
from pengserve.simulator.policies.vllm_tp import VllmTp

POLICIES: dict[str, type[Policy]] = {
    "pengserve": PengServePolicy,
    "vllm_dp": VllmDp,
    "vllm_tp": VllmTp,
    "vllm_pp": VllmPp,
    "swap": Swap,
    "migration": Migration,
    "deepspeed": DeepSpeed,
    "flexgen": FlexGen,
    "slo_aware": SloAware,
    "dynamic_heuristic": DynamicHeuristic,
    "orbitflow": OrbitFlow,
    "vllm_priority": VllmPriority,
    "fastswitch": FastSwitch,
}


def policy_named(name: str) -> type[Policy]:
    """The policy of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose among {', '.join(POLICIES)}"
        raise ConfigError(f'there is no policy "{name}": {hint}')
    return POLICIES[name]
