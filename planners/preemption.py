"""Who has a place in an instance's batch, where more urgent requests wait than there are places. Pure.

vLLM preempts a running request only when another one that runs finds no block, and then has all its KV computed again.
Here a request that waits takes the place of one that is strictly less urgent, which is parked with its KV and goes on
later without computing anything again. Urgency is the band: a request's priority, the least first.

    1. who runs keeps its place
    2. free places go to the most urgent; of equally urgent ones those that were parked come before those that wait
    3. who still has none takes the place of the least urgent that runs, if that is strictly less urgent

Of equally urgent ones the one whose tenant is furthest ahead of its share gives way (the greatest tag), then the one
with the least KV to move. No request goes to and fro: one that came back keeps its place until it has made
`QUANTUM_TOKENS` tokens, so that it is parked at most once in so many.

No request starves: one that is parked becomes more urgent by a band in each `AGE_S`, which is looked at once in
`LOOK_S`. So it makes at least `QUANTUM_TOKENS` tokens in each `(n + 1) * AGE_S + LOOK_S`, where the most urgent request
that runs is n bands above it, and in the time that such requests of the same age before it take: turns that age gives
have half of the places and half of the device at most (`plan_turns`), and the rest is the most urgent requests'. So one
that is more urgent than those that run waits for a step, or for `QUANTUM_TOKENS` steps where all of them came back a
moment ago, and not for all that are parked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

QUANTUM_TOKENS = 16
AGE_S = 1.0  # a user who reads bears a pause of a second
LOOK_S = 0.25  # between two looks at ages


def aged_band(priority: int, parked_s: float) -> int:
    """The band of a request that has been parked for so long."""
    return priority - int(parked_s / AGE_S)


class Candidate(NamedTuple):
    """A request that could be in the batch."""

    request_id: str
    band: int  # its priority; of a parked one, see `aged_band`
    tag: float  # among those of its band; the least comes first
    num_blocks: int = 0  # that it holds
    is_running: bool = False
    is_parked: bool = False  # holds KV, and no place; neither: it waits without KV
    is_protected: bool = False  # came back a moment ago

    @property
    def claim(self) -> tuple[int, bool, float, str]:
        """Free places go to the least."""
        return self.band, not self.is_parked, self.tag, self.request_id

    @property
    def standing(self) -> tuple[int, float, int, str]:
        """The greatest gives way."""
        return self.band, self.tag, -self.num_blocks, self.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Who has a place in the next step."""

    placed: frozenset[str]  # running and parked requests
    victims: tuple[str, ...]  # running ones that give way
    num_new: int  # of those that wait, the most urgent


def plan_places(candidates: Sequence[Candidate], num_places: int) -> Places:
    """Gives the places of a batch to candidates. Of those that wait, the first `num_new` by `claim` have one."""
    running = sorted((each for each in candidates if each.is_running), key=lambda each: each.standing)
    others = sorted((each for each in candidates if not each.is_running), key=lambda each: each.claim)
    num_free = max(0, num_places - len(running))
    chosen, rest = others[:num_free], others[num_free:]
    may_give_way = [each for each in running if not each.is_protected]
    victims = []
    for claimant in rest:
        if not may_give_way or may_give_way[-1].band <= claimant.band:
            break
        victims.append(may_give_way.pop().request_id)
        chosen.append(claimant)
    gone = set(victims)
    placed = [each for each in running if each.request_id not in gone] + [each for each in chosen if each.is_parked]
    return Places(
        placed=frozenset(each.request_id for each in placed),
        victims=tuple(victims),
        num_new=sum(not each.is_parked for each in chosen),
    )


class Aged(NamedTuple):
    """A parked request that is more urgent by its age, or one that came back a moment ago."""

    request_id: str
    band: int  # by its age
    tag: float
    num_blocks: int


def plan_turns(aged: Sequence[Aged], under_way: Sequence[Aged], num_places: int, num_blocks: int) -> frozenset[str]:
    """Which parked requests are as urgent as their age makes them; all others are so by their priority alone.

    Args:
        under_way: requests that came back a moment ago, and keep their places.
        num_blocks: of the device.
    """
    places = max(1, num_places // 2) - len(under_way)
    blocks = num_blocks // 2 - sum(each.num_blocks for each in under_way)
    chosen = list[str]()
    for each in sorted(aged, key=lambda each: (each.band, each.tag, each.request_id)):
        blocks -= each.num_blocks
        if places <= len(chosen) or (blocks < 0 and (chosen or under_way)):
            break
        chosen.append(each.request_id)
    return frozenset(chosen)
