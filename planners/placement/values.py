"""What the placement planner is told, and what it answers."""

from dataclasses import dataclass

from pengserve.planners.placement.spread import RESIDENT, Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """A request that decodes, or is paused and could."""

    request_id: str
    num_tokens: int  # whose KV there is
    slo_s: float | None = None  # between two tokens
    deposit_tokens: int = 0  # that its client has not been sent yet
    paused_s: float | None = None  # for so long; None: it runs
    spread: Spread = RESIDENT  # how its layers are now
    is_on_host: bool = True  # the host has a copy of its full blocks
    may_pause: bool = True  # False: it came back a moment ago
    is_coming: bool = False  # it is paused still, and goes on as soon as its KV has come back
    rank: tuple[int, float] = (0, 0.0)  # the least urgent has the greatest: its priority, and when it arrived

    @property
    def is_stepped(self) -> bool:
        """Whether it runs, or will as soon as its KV has come back."""
        return self.paused_s is None or self.is_coming

    def will_notice(self, lead_s: float) -> bool:
        """Whether its client notices a pause within so many seconds. One that has noticed already does not again."""
        if self.slo_s is None or (lead_s and self.paused_s is not None and not self.deposit_tokens):
            return False
        return self.deposit_tokens * self.slo_s <= lead_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One instance, or one member of a tensor-parallel group: all have the same placement (OrbitFlow section 3.5)."""

    num_layers: int
    block_size: int  # tokens
    num_cells: int  # of the device, for the KV of these requests: one block in one layer each
    step_s: float  # computing a step, without attention
    context_s: float  # more for each token of KV that it reads
    cells_per_s: float  # from the host
    staged_s: float = 0.0  # more for a step in which any layer is staged: tables of its own, copies that begin


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """What the solver may do.

    Raises:
        ValueError: names the field.
    """

    max_late: int = 1  # alpha: requests of a step that may miss their SLO; a paused one counts
    min_window: int = 8  # steps
    max_window: int = 128
    min_gain: float = (
        0.02  # tokens a second that pausing must win over not pausing, and layers away beside it over none
    )
    may_pause: bool = True
    lead_steps: int = 0  # so long before its deposit is spent a paused request counts as late; 0: once it is
    max_paused_s: float = 10.0  # nothing is paused longer for the sake of others
    drift: float = 0.25  # of the predicted time of a step, beyond which the figures are measured anew

    def lead_s(self, machine: Machine) -> float:
        """`lead_steps` in seconds."""
        return self.lead_steps * machine.step_s

    def __post_init__(self) -> None:
        if self.max_late < 0:
            raise ValueError(f"max_late is {self.max_late}: give 0 or more")
        if not 1 <= self.min_window <= self.max_window:
            raise ValueError(f"min_window is {self.min_window} and max_window {self.max_window}: 1 <= min <= max")
        if not 0 <= self.min_gain < 1 or self.max_paused_s <= 0 or self.drift <= 0:
            raise ValueError("min_gain is at least 0 and below 1; max_paused_s and drift are above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What is to be where."""

    spreads: tuple[tuple[str, Spread], ...]  # of all requests that are stepped
    paused: tuple[str, ...]  # the first one goes on first
    step_s: float  # predicted, at the end of the window
    num_late: int  # requests that miss their SLO in such a step
    is_feasible: bool  # `num_late` is within the cap
    window: int  # steps that it is made for
    expires_in: int  # steps for which it fits and stays within the cap; at least `window`
    moved_cells: int  # over the link
    why: str

    @property
    def num_away(self) -> int:
        """Requests with a layer on the host."""
        return sum(spread.distance > 0 for _, spread in self.spreads)
