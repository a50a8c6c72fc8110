"""Sessions of several tenants, one of which floods, and priorities that change while they run (docs/workloads.md).

    sessions     come at random (Poisson) for each tenant; a turn's prompt is what was said before, and more
    flood        one tenant's rate is multiplied between two times
    priorities   "fixed": each session draws one and keeps it
    churn        once in `update_s`, every session under way gets another priority: "random" draws it anew, "markov"
                 keeps it with a probability, and prefers sessions that were active lately (FastSwitch section 4.2)

The same plan makes the same workload. Times are in seconds from the start.
"""

import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

Pattern = Literal["none", "fixed", "random", "markov"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to make."""

    seed: int = 1
    duration_s: float = 60.0
    num_tenants: int = 4
    sessions_per_s: float = 0.5  # of each tenant
    flood: float = 10.0  # times the rate of the first tenant, while it floods; 1: no flood
    flood_from: float = 1 / 3  # share of the duration at which the flood begins,
    flood_until: float = 2 / 3  # ... and ends
    turns: float = 3.0  # of a session, on average (geometric)
    think_s: float = 2.0  # between two turns, on average (exponential)
    prompt_tokens: float = 120.0  # that a turn adds, median (log-normal)
    output_tokens: float = 60.0  # of an answer, median
    spread: float = 0.8  # sigma of both
    max_tokens: int = 1900  # of a prompt with its answer; a session ends before it has more
    block_tokens: int = 16  # of a hash id
    pattern: Pattern = "none"
    update_s: float = 1.0  # between two updates; the paper's 0.02 a step is 1 s where a step takes 20 ms
    levels: int = 4  # priorities are 0 to levels - 1, the least the most urgent
    keep: float = 0.8  # "markov": probability that a session keeps its priority

    def __post_init__(self) -> None:
        for name in ("duration_s", "sessions_per_s", "turns", "think_s", "prompt_tokens", "output_tokens", "update_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name):g}")
        if not 0 <= self.flood_from <= self.flood_until <= 1:
            raise ValueError("flood_from and flood_until must be shares of the duration, in this order")
        if self.num_tenants < 1 or self.levels < 1 or self.flood < 1 or self.turns < 1:
            raise ValueError("num_tenants, levels, flood and turns must be at least 1")
        if self.pattern not in get_args(Pattern):
            raise ValueError(f"pattern must be none, fixed, random or markov, got {self.pattern!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request."""

    at_s: float
    tenant: str
    session: str
    turn: int
    input_length: int  # tokens
    output_length: int
    hash_ids: tuple[int, ...]  # of blocks of the prompt: equal ids are equal tokens
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A session's requests have another priority from now on."""

    at_s: float
    session: str
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Both in the order of time."""

    turns: tuple[Turn, ...]
    updates: tuple[Update, ...]


def make(plan: Plan) -> Workload:
    """The workload of a plan."""
    rng = random.Random(plan.seed)
    # A source for each tenant: the others' requests are the same, however much one floods.
    sources = [random.Random(f"{plan.seed}/{number}") for number in range(plan.num_tenants)]
    drafts = [turn for number, source in enumerate(sources) for turn in _tenant(plan, number, source)]
    drafts.sort(key=lambda turn: (turn.at_s, turn.session))
    updates = _churn(plan, drafts, rng)
    by_session: dict[str, list[Update]] = {}
    for update in updates:
        by_session.setdefault(update.session, []).append(update)
    turns = tuple(_with_priority(turn, by_session.get(turn.session, []), plan) for turn in drafts)
    return Workload(turns=turns, updates=tuple(updates))


def tenant_name(number: int) -> str:
    """Of the tenants of a plan; the first one floods."""
    return "flood" if number == 0 else f"tenant-{number}"


def _tenant(plan: Plan, number: int, rng: random.Random) -> list[Turn]:
    start_s, stop_s = plan.flood_from * plan.duration_s, plan.flood_until * plan.duration_s
    most = plan.flood if number == 0 else 1.0
    turns: list[Turn] = []
    at_s, count = 0.0, 0
    while (at_s := at_s + rng.expovariate(plan.sessions_per_s * most)) < plan.duration_s:
        if rng.random() < (1.0 if most == 1 or start_s <= at_s < stop_s else 1 / most):
            turns += _session(plan, number, count, at_s, rng)
            count += 1
    return turns


def _session(plan: Plan, tenant: int, count: int, at_s: float, rng: random.Random) -> list[Turn]:
    name, turns, length = f"{tenant_name(tenant)}.{count}", [], 0
    base = (tenant << 40) + (count << 16)  # hash ids of one session are its own
    while True:
        length += _tokens(plan.prompt_tokens, plan.spread, rng)
        output = _tokens(plan.output_tokens, plan.spread, rng)
        if length + output > plan.max_tokens or at_s >= plan.duration_s:
            return turns
        blocks = -(-length // plan.block_tokens)
        turns.append(
            Turn(
                at_s=round(at_s, 4),
                tenant=tenant_name(tenant),
                session=name,
                turn=len(turns),
                input_length=length,
                output_length=output,
                hash_ids=tuple(base + block for block in range(blocks)),
                priority=0,
            )
        )
        length += output
        if rng.random() < 1 / plan.turns:
            return turns
        at_s += rng.expovariate(1 / plan.think_s)


def _tokens(median: float, spread: float, rng: random.Random) -> int:
    return max(1, round(rng.lognormvariate(0.0, spread) * median))


def _churn(plan: Plan, turns: Sequence[Turn], rng: random.Random) -> list[Update]:
    """Of sessions from their first turn to `think_s` after their last one."""
    if plan.pattern in ("none", "fixed"):
        return []
    spans: dict[str, list[float]] = {}
    for turn in turns:
        spans.setdefault(turn.session, []).append(turn.at_s)
    updates, now, at_s = [], dict.fromkeys(spans, plan.levels // 2), 0.0
    while (at_s := at_s + plan.update_s) < plan.duration_s:
        live = [name for name, times in spans.items() if times[0] <= at_s <= times[-1] + plan.think_s]
        for name in live:
            priority = now[name]
            if plan.pattern == "random":
                priority = rng.randrange(plan.levels)
            elif rng.random() >= plan.keep:
                idle_s = at_s - spans[name][bisect.bisect_right(spans[name], at_s) - 1]
                is_recent = idle_s <= plan.think_s
                priority = max(0, priority - 1) if is_recent else min(plan.levels - 1, priority + 1)
            if priority != now[name]:
                now[name] = priority
                updates.append(Update(at_s=round(at_s, 4), session=name, priority=priority))
    return updates


def _with_priority(turn: Turn, updates: Sequence[Update], plan: Plan) -> Turn:
    """The priority that the session has when the turn comes."""
    if plan.pattern == "none":
        return turn
    if plan.pattern == "fixed":
        return replace(turn, priority=random.Random(f"{plan.seed}/{turn.session}").randrange(plan.levels))
    index = bisect.bisect_right([update.at_s for update in updates], turn.at_s) - 1
    return replace(turn, priority=updates[index].priority if index >= 0 else plan.levels // 2)
