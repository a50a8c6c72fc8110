"""Which empty slots to fill now."""

from collections.abc import Sequence
from dataclasses import dataclass

from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.plans import ReplacePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacancy:
    """A slot without a living instance, whose earlier lives are known to have ended."""

    last_key: InstanceKey  # its newest life; incarnation 0 before the first
    retry_at_s: float  # end of the back-off after its failures in a row
    why: str  # how its newest life ended


def plan_replacements(
    vacancies: Sequence[Vacancy], *, epoch: Epoch, now_s: float, num_starts: int | None = None
) -> ReplacePlan | None:
    """Fills the vacancies whose back-off has ended, lowest slot first, `num_starts` at most; None where there is none.

    Instances that share processors start sooner one after the other: the first one serves while the next one loads.
    """
    due = sorted((v for v in vacancies if v.retry_at_s <= now_s), key=lambda v: v.last_key)[:num_starts]
    if not due:
        return None
    return ReplacePlan(
        plan_id="replace:" + ",".join(map(str, (v.last_key for v in due))),
        epoch=epoch,
        slots=tuple(v.last_key.instance_id for v in due),
        why="; ".join(f"slot {v.last_key.instance_id}: {v.why or 'never filled'}" for v in due[:8]),
    )
