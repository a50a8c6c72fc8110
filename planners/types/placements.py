"""What an instance tells of its placements of KV: an event for each that a search has changed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementNote:
    """One change. An instance numbers them from 1."""

    number: int
    reason: str  # why a placement was asked for
    why: str  # what was chosen, and why
    shape: str
    num_away: int  # requests with a layer on the host
    # Of a search; zeros where layers leave early, or the search has failed.
    num_stepped: int = 0
    num_paused: int = 0
    step_s: float = 0.0  # predicted
    num_late: int = 0  # requests that miss their SLO in such a step
    moved_bytes: int = 0  # over the link, before it is in force
    solved_s: float = 0.0  # that the search took
