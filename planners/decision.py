"""What is done about the layout, and what else was possible: what the arbiter answers, and events tell."""

from dataclasses import dataclass
from enum import StrEnum

from pengserve.planners.judge.forecasts import Outcome
from pengserve.planners.judge.prediction import Prediction
from pengserve.planners.types.layout import Group


class Action(StrEnum):
    """What can be done: nothing, what `SwitchPlan.verb` says about the layout, or that requests move within it."""

    KEEP = "keep"
    MERGE = "merge"
    SPLIT = "split"
    DROP = "drop"
    RESTORE = "restore"
    MIGRATE = "migrate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One thing that could be done now."""

    action: Action
    group: Group | None = None  # None: nothing is done
    target: Group | None = None  # of requests that move from `group`
    price_s: float = 0.0  # seconds that requests stall, over all requests
    gain_s: float = 0.0  # request-seconds that are saved within the horizon, less the price
    prediction: Prediction | None = None  # of its groups with it; None: nothing was predicted
    why: str = ""  # one sentence for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is done, and what else was possible."""

    chosen: Option
    options: tuple[Option, ...] = ()  # all that were considered, the chosen one among them
    needs_instances: bool = False  # memory is short, and dropping parameters does not help, or not enough
    is_short: bool = False  # memory is short, and dropping parameters would help, whether or not it pays
    is_judged: bool = False  # options were compared by what they will gain, and not by the order of the rules
    outcomes: tuple[Outcome, ...] = ()  # of earlier decisions, whose horizon is over

    def is_same(self, other: "Decision") -> bool:
        """Whether both say to do the same. Prices differ from look to look."""
        mine, its = self.chosen, other.chosen
        is_alike = (mine.action, mine.group, mine.target) == (its.action, its.group, its.target)
        return is_alike and (self.needs_instances, self.is_short) == (other.needs_instances, other.is_short)

    @property
    def is_rest(self) -> bool:
        """Whether nothing is to be done, nothing is missing, and no memory that is short could be had."""
        return self.chosen.action is Action.KEEP and not self.needs_instances and not self.is_short


AT_REST = Decision(chosen=Option(action=Action.KEEP, why="nothing is due"))
