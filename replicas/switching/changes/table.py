"""Which class carries out a plan."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.switching.changes.change import Change
from pengserve.replicas.switching.changes.drop import Drop
from pengserve.replicas.switching.changes.merge import Merge
from pengserve.replicas.switching.changes.restore import Restore
from pengserve.replicas.switching.changes.split import Split

CHANGES: Mapping[str, type[Change[Any, Any, Any]]] = MappingProxyType(
    {"merge": Merge, "split": Split, "drop": Drop, "restore": Restore}
)


def change_of(plan: SwitchPlan) -> type[Change[Any, Any, Any]]:
    """The class of the plan's verb."""
    return CHANGES[plan.verb]
