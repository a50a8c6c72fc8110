"""What the judge has measured: how many requests come, how long they are, and what steps take in each shape.

All of it comes from totals that instances count: what an instance that ran one shape at two looks has added in between,
it did in that shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pengserve.planners.columns import Floats, Ints, ReadyInstances
from pengserve.planners.types.layout import GroupKind, degree_of
from pengserve.planners.types.snapshot import ClusterSnapshot
from pengserve.planners.types.step_cost import TERMS, StepCost

SHORT_S, LONG_S = 5.0, 40.0  # windows of the rate of requests
MIN_SEEN_S = 1.0  # of watching; before it nothing is known
STEP_MEMORY_S = 60.0  # what steps took longer ago counts 1/e
BELIEF_S = 2.0  # seconds of steps that a profile counts as
GAP_S = 10.0  # without a look: what happened in between is not known
DEFAULT_TOKENS = 512.0, 128.0  # prompt and output, before any request has come and ended
TP_EFFICIENCY, PP_EFFICIENCY = 0.85, 0.92  # of shapes that were neither profiled nor run, of what dp does

_REQUESTS = ("total_requests", "total_request_tokens", "total_finished", "total_finished_tokens")
_PAIRS = ("total_step_pairs", "total_step_tokens")
_STEPS = ("total_costed_steps", "total_step_tokens", "total_step_extra_tokens", "total_step_seqs")
_WORK = (*_STEPS, "total_step_context", "total_step_pairs")  # in the order of `TERMS`
_ALL = tuple(dict.fromkeys((*_REQUESTS, *_WORK, "total_step_us")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests that come to the whole cluster."""

    rates: tuple[float, float, float]  # by second: few, as expected, many
    prompt_tokens: float  # mean
    output_tokens: float  # mean
    pairs: float  # by token of a prompt, see `StepCost.pair_s`


@dataclass(frozen=True, slots=True)
class _Look:
    time_s: float
    counts: tuple[float, ...]  # `_REQUESTS` since the first look


@dataclass(frozen=True, slots=True)
class _Work:
    """Steps of one shape, of late: the sums of squares that a fit needs, and those that a speed needs."""

    gram: Floats
    moment: Floats
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A value: a look returns the next one."""

    looks: tuple[_Look, ...] = ()
    work: Mapping[str, _Work] = field(default_factory=dict, compare=False)
    ids: Ints | None = field(default=None, compare=False)  # of the newest look
    shapes: tuple[str, ...] = field(default=(), compare=False)
    totals: Mapping[str, Ints] = field(default_factory=dict, compare=False)

    @property
    def is_known(self) -> bool:
        """Whether enough was seen to predict from."""
        looks = self.looks
        return len(looks) > 1 and looks[-1].time_s - looks[0].time_s >= MIN_SEEN_S and looks[-1].counts[0] > 0

    def seen(self, snapshot: ClusterSnapshot, instances: ReadyInstances) -> "Watched":
        """With this look."""
        now_s = snapshot.time_s
        before = self if self.looks and now_s - self.looks[-1].time_s <= GAP_S else Watched(work=self.work)
        ids, shapes = instances.ids, tuple([i.stats.shape for i in instances.values()])
        totals = {name: instances.stat(name)[ids] for name in _ALL}
        if not before.looks:
            return replace(before, looks=(_Look(now_s, (0.0,) * 4),), ids=ids, shapes=shapes, totals=totals)
        if now_s <= before.looks[-1].time_s:
            return self
        deltas = before._deltas(ids, totals)
        counts = tuple(
            at + float(deltas[name].sum()) for at, name in zip(before.looks[-1].counts, _REQUESTS, strict=True)
        )
        looks = (*before.looks, _Look(now_s, counts))
        if len(looks) > 2 and looks[1].time_s < now_s - LONG_S:
            looks = looks[1:]
        work = before._worked(shapes, ids, deltas, now_s)
        return Watched(looks=looks, work=work, ids=ids, shapes=shapes, totals=totals)

    def _deltas(self, ids: Ints, totals: Mapping[str, Ints]) -> dict[str, Ints]:
        """What each instance has added; 0 where it is new, or counts anew."""
        assert self.ids is not None
        if len(self.ids) == len(ids) and (self.ids == ids).all():
            return {name: np.maximum(0, totals[name] - self.totals[name]) for name in _ALL}
        size = int(max(ids.max(initial=0), self.ids.max(initial=0))) + 1
        is_old, old = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.int64)
        is_old[self.ids] = True
        found = {}
        for name in _ALL:
            old[self.ids] = self.totals[name]
            found[name] = np.where(is_old[ids], np.maximum(0, totals[name] - old[ids]), 0)
        return found

    def _worked(
        self, shapes: tuple[str, ...], ids: Ints, deltas: Mapping[str, Ints], now_s: float
    ) -> Mapping[str, _Work]:
        assert self.ids is not None
        before = self.shapes
        if len(before) != len(shapes) or not (self.ids == ids).all():
            return self.work
        keep = float(np.exp(-(now_s - self.looks[-1].time_s) / STEP_MEMORY_S))  # of shapes that run: no other is newer
        work = dict(self.work)
        for shape in sorted(set(shapes)):
            same = np.fromiter(
                (a == b == shape for a, b in zip(before, shapes, strict=True)), dtype=np.bool_, count=len(shapes)
            )
            seconds = float(deltas["total_step_us"][same].sum()) * 1e-6
            row = np.array([float(deltas[name][same].sum()) for name in _WORK])
            if seconds <= 0 or row[0] <= 0:
                continue
            old = work.get(shape, _Work(np.zeros((len(TERMS),) * 2), np.zeros(len(TERMS)), 0.0))
            # Weighed by time: a look in which little ran says little.
            work[shape] = _Work(
                keep * old.gram + np.outer(row, row) / seconds, keep * old.moment + row, keep * old.seconds + seconds
            )
        return work

    # What is known ----------------------------------------------------------------------------------------------------

    def traffic(self) -> Traffic:
        """Requests that come, by the looks of late."""
        looks, now = self.looks, self.looks[-1]
        first = looks[0]
        recent = next((look for look in reversed(looks) if now.time_s - look.time_s >= SHORT_S), first)
        long_s, short_s = now.time_s - first.time_s, now.time_s - recent.time_s
        came, came_tokens, ended, ended_tokens = (b - a for a, b in zip(first.counts, now.counts, strict=True))
        newest = now.counts[0] - recent.counts[0]
        long_rate, short_rate = came / max(1e-9, long_s), newest / max(1e-9, short_s)
        spread = np.sqrt(newest + 1.0) / max(1.0, short_s)
        few = max(0.0, min(long_rate, short_rate - spread))
        many = max(long_rate, short_rate + spread)
        prompt, output = DEFAULT_TOKENS
        if came:
            prompt = came_tokens / came
        if ended:
            output = max(1.0, (ended_tokens + output) / (ended + 1.0))
        return Traffic(
            rates=(few, 0.5 * (long_rate + short_rate), many),
            prompt_tokens=max(1.0, prompt),
            output_tokens=output,
            pairs=self._pairs(prompt),
        )

    def _pairs(self, prompt_tokens: float) -> float:
        """Pairs that a token of a prompt adds, as seen: long prompts have most of them."""
        pairs = sum(float(w.moment[_WORK.index("total_step_pairs")]) for w in self.work.values())
        tokens = sum(
            float(w.moment[_WORK.index("total_step_tokens")] - w.moment[_WORK.index("total_step_seqs")])
            for w in self.work.values()
        )
        return pairs / tokens if tokens > 0 and pairs > 0 else prompt_tokens

    def costs(self, instances: ReadyInstances) -> "Costs":
        """What steps cost by shape."""
        profiles = {}
        first = next(iter(instances.values()), None)
        for lane in first.lanes if first is not None else ():
            if lane.step_cost is not None:
                profiles[lane.shape] = lane.step_cost
        return Costs(profiles, self.work)


class Costs:
    """A `StepCost` for each shape: as profiled, at the speed that was measured; or as measured alone."""

    def __init__(self, profiles: Mapping[str, StepCost], work: Mapping[str, _Work]) -> None:
        self._profiles, self._work = profiles, work
        self._found: dict[str, StepCost | None] = {}

    def of(self, shape: str) -> StepCost | None:
        """Of one shape; None where nothing is known of it."""
        if shape not in self._found:
            self._found[shape] = self._make(shape)
        return self._found[shape]

    def _make(self, shape: str) -> StepCost | None:
        first = self._profiles.get(shape) or (None if shape == GroupKind.DP else self._by_law(shape))
        work = self._work.get(shape)
        if work is None or work.seconds < BELIEF_S:
            return first
        if first is None:
            return _fitted(work)
        terms = np.array(first.terms)
        expected_s = float(terms @ work.moment)
        speed = (work.seconds + BELIEF_S) / (expected_s + BELIEF_S)
        return StepCost(**dict(zip(TERMS, (terms * speed).tolist(), strict=True)))

    def _by_law(self, shape: str) -> StepCost | None:
        """Of a shape that was never profiled nor run: a share of what dp does."""
        alone = self.of(GroupKind.DP)
        if alone is None:
            return None
        degree = degree_of(shape)
        if shape.startswith(GroupKind.PP):
            factors = (1.0 / PP_EFFICIENCY,) * len(TERMS)
        else:
            shared = 1.0 / (degree * TP_EFFICIENCY)
            factors = (shared, shared, shared, 1.0, shared, shared)  # each member samples for all sequences
        values = [value * factor for value, factor in zip(alone.terms, factors, strict=True)]
        return StepCost(**dict(zip(TERMS, values, strict=True)))


def _fitted(work: _Work) -> StepCost:
    """Least squares over the looks; a term that would be negative is left out, and terms alike share what they cost."""
    scale = np.sqrt(np.maximum(np.diag(work.gram), 1e-30))
    gram, moment = work.gram / np.outer(scale, scale), work.moment / scale
    used = [at for at in range(len(TERMS)) if work.moment[at] > 0]
    while used:
        ridge = gram[np.ix_(used, used)] + 1e-4 * np.eye(len(used))
        found = np.linalg.solve(ridge, moment[used])
        if found.min() >= 0:
            break
        del used[int(np.argmin(found))]
    terms = dict.fromkeys(TERMS, 0.0)
    terms.update({TERMS[at]: float(value / scale[at]) for at, value in zip(used, found, strict=True)})
    return StepCost(**terms)
