"""Whether a member can take part in a switch now: the rules that instances and the simulator share. Pure."""

from collections.abc import Callable, Iterable

from pengserve.planners.types.errors import StepError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.plans import SwitchPlan


def require_joining(plan: SwitchPlan, key: InstanceKey, runs: str, *, is_waiting: bool) -> None:
    """A merge or drop: the member runs the part that the plan was made for.

    Args:
        runs: the name of its group, "tp2@(0,1)", or "dp".
        is_waiting: whether something of that group's own switch is still on its way.

    Raises:
        StepError: why it cannot take part.
    """
    part = plan.part_of(key)
    due = "dp" if part.kind is GroupKind.DP else str(part)
    if runs != due:
        raise StepError(f"instance {key} runs {runs}, and the plan is made for {due}; plan again")
    if is_waiting:
        raise StepError(f"{runs} still waits for KV, memory or weights; ask again when they have come")


def require_leaving(
    plan: SwitchPlan,
    key: InstanceKey,
    runs: str,
    *,
    is_waiting: bool,
    requests: Iterable[tuple[str, int]],
    limit: Callable[[], int],
) -> None:
    """A split or restore: the member runs the group, and each request fits where it may go.

    Args:
        runs: as of `require_joining`.
        is_waiting: whether something of the group's drop is still on its way.
        requests: of the group, where this member leads it: ids, and tokens that they may grow to.
        limit: tells how many tokens a request can have in any of the parts that the group ends in.

    Raises:
        StepError: why it cannot take part.
    """
    if runs != str(plan.group):
        raise StepError(f"instance {key} does not run {plan.group}")
    if is_waiting:
        raise StepError(f"{runs} still waits for KV or memory since its drop; restore it when that has come")
    sizes = list(requests)
    most = limit() if sizes else 0
    for request_id, num_tokens in sizes:
        if num_tokens > most:
            narrowest = min(plan.parts, key=lambda part: part.degree)
            raise StepError(
                f"request {request_id} may grow to {num_tokens} tokens and {narrowest} holds {most};"
                " wait until it has ended"
            )
