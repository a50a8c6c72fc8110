"""A small machine for tests: round figures, no catalog."""

from collections.abc import Sequence
from typing import Any

from pengserve.planners.cost_model import CostModel
from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.engine.cluster import ClusterShape
from pengserve.simulator.engine.memory import Sizes
from pengserve.simulator.engine.network import PlainNetwork
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.machine import Machine
from pengserve.simulator.policies.policy import Facts, Setup
from pengserve.simulator.policies.registry import policy_named
from pengserve.simulator.requests import Arrival
from pengserve.simulator.result import Result
from pengserve.simulator.run import run
