"""Which route gets the next request: of those where it fits and that have the wished shape, the soonest to answer.

How long a request waits for its first token grows with the prompt tokens that must be computed before it and for it,
and a little with the KV that is resident: it makes steps slower, and where memory is full nothing begins. A route's
pressure is both, as a share of what it holds:

    pressure = (resident + pending + (weight - 1) * wait) / capacity + (weight - 1) * beyond / slots
    pending  = queued + unseen + prefilling tokens
    wait     = what of `pending` exceeds `MIN_WAIT_TOKENS`
    beyond   = requests, with this one, that find no slot: each waits until another one ends
    credit   = weight * hit * share / capacity                   hit: tokens of the prompt whose KV is there
    share    = 1 - ahead / MOST_AHEAD                            ahead: requests beyond those of the least pressure

The least pressure less credit wins. So a hit is worth a queue of as many tokens and one step, no more, and less where
many more requests are: they share the KV of their prefix, but each reads it in each step. Small hits and short queues
do not count: a request decodes for a hundred steps or more beside its neighbours, so that an even spread of requests is
worth more than one small prompt's compute. Without hits, requests spread by load. Capacity stands for speed too: a
tensor-parallel group has that of its members, and more.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.layout import tensor_degree_of
from pengserve.planners.types.snapshot import InstanceStats, KvCapacity

FULL = 1.0  # virtual load from which requests wait
PREFILL_WEIGHT = 8.0  # tokens of resident KV that delay a request as much as one token that is to be computed
MIN_HIT_TOKENS = 128  # smaller hits save less than an even spread of requests, which grow while they decode
MIN_WAIT_TOKENS = 2048  # vLLM computes a shorter queue in one step: it delays less than an uneven spread does
MOST_AHEAD = 32  # requests that a route may have beyond the least loaded one's before hits there count nothing
SESSION_SHARE = 0.5  # of its prompt that a session's last instance is taken to hold, where nothing more is known
NO_HITS: Mapping[InstanceKey, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOptions:
    """What one request asks of the route that it is sent to."""

    degree: int | None = None  # 1 is dp, 2 and more tensor-parallel; None: any
    total_tokens: int = 0  # prompt and the most output it asked for: what it may grow to
    is_priority: bool = False  # above normal priority: latency counts most

    @classmethod
    def parse(cls, text: str, degrees: Iterable[int]) -> "DispatchOptions":
        """The options of a request for a shape: "auto", "dp", "tp" (the widest of `degrees`) or "tp<degree>".

        `degrees` are those that this cluster can form, above 1.

        Raises:
            ValueError: none of these; the sentence lists the accepted values.
        """
        possible = sorted({degree for degree in degrees if degree > 1})
        accepted: dict[str, int | None] = {"auto": None, "dp": 1}
        if possible:
            accepted |= {"tp": possible[-1]} | {f"tp{degree}": degree for degree in possible}
        word = text.strip().lower()
        if word not in accepted:
            raise ValueError(f'"{text}" is no parallelism that this cluster can form: choose {", ".join(accepted)}')
        return cls(degree=accepted[word])


ANY = DispatchOptions()  # what a request asks that asks for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A route as the dispatcher sees it. All loads are in tokens of KV."""

    key: InstanceKey
    resident_tokens: int  # KV of running requests, from the newest stats
    queued_tokens: int  # waiting requests, from the newest stats
    unseen_tokens: int  # sent by this dispatcher since those stats
    capacity_tokens: int
    num_requests: int  # running, waiting and unseen
    shape: str = "dp"  # what it runs now
    max_tokens: int | None = None  # most tokens that one request may ever have there; None: the capacity
    num_priority: int = 0  # priority requests of this dispatcher that are there
    prefilling_tokens: int = 0  # of running requests, that are not computed yet
    unseen_hit_tokens: int = 0  # of those unseen: in the prefix cache there, so that they take memory and no computing
    num_slots: int = 0  # requests that may run at once; 0: as many as memory holds
    weight: float = PREFILL_WEIGHT  # tokens of resident KV that delay a request as much as one that is to be computed

    @classmethod
    def of(
        cls,
        key: InstanceKey,
        stats: InstanceStats,
        capacity: KvCapacity,
        *,
        num_unseen: int = 0,
        unseen_tokens: int = 0,
        unseen_hit_tokens: int = 0,
        num_priority: int = 0,
    ) -> "Candidate":
        """The route to a leader with these stats; `capacity` is of its dp lane, and counts until stats have come."""
        return cls(
            key=key,
            resident_tokens=stats.kv_blocks_used * (stats.block_size or capacity.block_size),
            queued_tokens=stats.queued_tokens,
            unseen_tokens=unseen_tokens,
            unseen_hit_tokens=unseen_hit_tokens,
            capacity_tokens=kv_tokens(stats, capacity),
            num_requests=stats.num_running + stats.num_waiting + num_unseen,
            shape=stats.shape,
            max_tokens=stats.max_model_len or capacity.max_model_len,
            num_priority=num_priority,
            prefilling_tokens=stats.prefilling_tokens,
            num_slots=capacity.max_num_seqs,
        )

    @property
    def pressure(self) -> float:
        """How long a request waits there before its own prompt's turn, as a share of the capacity."""
        pending = self.queued_tokens + self.unseen_tokens - self.unseen_hit_tokens + self.prefilling_tokens
        resident = self.resident_tokens + self.unseen_hit_tokens
        wait = max(0, pending - MIN_WAIT_TOKENS)
        beyond = max(0, self.num_requests + 1 - self.num_slots) / self.num_slots if self.num_slots else 0.0
        return (resident + pending + (self.weight - 1) * wait) / max(1, self.capacity_tokens) + (
            self.weight - 1
        ) * beyond

    def credit(self, hit_tokens: int, num_least: int) -> float:
        """What so many tokens of a prompt whose KV is there take from the pressure.

        `num_least`: requests of the route that would be chosen without hits.
        """
        if hit_tokens < MIN_HIT_TOKENS:
            return 0.0
        share = 1.0 - min(1.0, max(0, self.num_requests - num_least) / MOST_AHEAD)
        return self.weight * hit_tokens * share / max(1, self.capacity_tokens)

    @property
    def virtual_load(self) -> float:
        """Resident plus queued demand as a share of the capacity; above 1 it queues or preempts."""
        return (self.resident_tokens + self.queued_tokens + self.unseen_tokens) / max(1, self.capacity_tokens)

    @property
    def degree(self) -> int:
        """How many instances compute a layer together: a pipeline computes what dp does, on more memory."""
        return tensor_degree_of(self.shape)

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request that could ever be there, with nothing else running."""
        return self.capacity_tokens if self.max_tokens is None else min(self.capacity_tokens, self.max_tokens)

    def holds(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` could ever be there, with nothing else running."""
        return num_tokens <= self.most_tokens


def kv_tokens(stats: InstanceStats, capacity: KvCapacity) -> int:
    """Tokens of KV in the shape that an instance runs now; `capacity` as in `Candidate.of`."""
    if not stats.kv_blocks_total:
        return capacity.num_tokens
    return stats.kv_blocks_total * (stats.block_size or capacity.block_size)


def choose(
    candidates: Sequence[Candidate],
    num_tokens: int,
    options: DispatchOptions = ANY,
    hits: Mapping[InstanceKey, int] = NO_HITS,
) -> InstanceKey | None:
    """The best candidate that can ever hold the request, with `num_tokens` now (prompt and what it generated).

    A wished degree is kept exactly. A priority request goes to the widest shape that is not full. Any other goes where
    the pressure is least, less the credit for `hits` (tokens of its prompt whose KV is probably there), and leaves
    groups that serve priority requests alone while the others' queues are short. Ties go to the fewest requests, then
    to the lowest key, so that the same view gives the same answer. None where no candidate holds it, or none has the
    wished degree.
    """
    needed = max(num_tokens, options.total_tokens)
    able = [c for c in candidates if c.holds(needed) and (options.degree is None or c.degree == options.degree)]
    if not able:
        return None
    best = min(able, key=lambda c: rank(c, is_priority=options.is_priority))
    return best_with_hits(best, (c for c in able if c.key in hits), hits, is_priority=options.is_priority).key


def best_with_hits(
    best: Candidate, able: Iterable[Candidate], hits: Mapping[InstanceKey, int], *, is_priority: bool
) -> Candidate:
    """The best of `able`, which hold a part of the prompt, and of the `best` of all without hits."""

    def credited(c: Candidate) -> tuple[float | int | InstanceKey, ...]:
        return rank(c, c.credit(hits.get(c.key, 0), best.num_requests), is_priority=is_priority)

    return min((best, *able), key=credited)


def rank(candidate: Candidate, credit: float = 0.0, *, is_priority: bool) -> tuple[float | int | InstanceKey, ...]:
    """What candidates are compared by: the least is chosen."""
    c, cost = candidate, candidate.pressure - credit
    if is_priority:
        return (c.virtual_load >= FULL, -c.degree, cost, c.num_requests, c.key)
    return (cost + reserve(c), c.num_requests, c.key)


def expected_hits(
    hits: Mapping[InstanceKey, int],
    session_at: InstanceKey | None,
    num_tokens: int,
    home_tokens: Mapping[InstanceKey, int] = NO_HITS,
) -> Mapping[InstanceKey, int]:
    """`hits` of a prompt of `num_tokens`, and what else may be there.

    The instance that served its session last is taken to hold a share of it, and homes what `home_tokens` says, as far
    as no instance is known to hold more.
    """
    most = max(hits.values(), default=0)
    found = {**hits, **{key: count for key, count in home_tokens.items() if count > most}}
    if session_at is not None:
        found[session_at] = max(found.get(session_at, 0), int(SESSION_SHARE * num_tokens))
    return found


def reserve(candidate: Candidate) -> float:
    """Pressure that a group with priority requests pretends to have: as much as an instance with a queue of its size,
    in tokens and in requests.

    So best effort comes there only where the others are full.
    """
    is_reserved = candidate.num_priority and candidate.degree > 1
    return candidate.weight * FULL + (candidate.weight - 1) if is_reserved else 0.0
