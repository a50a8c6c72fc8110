"""What the judge has measured: how many requests come, how long they are, and what steps take in each shape.

All of it comes from totals that instances count: what an instance that ran one shape at two looks has added in between,
it did in that shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.columns import Ints, Kept, ReadyInstances
from pengserve.planners.judge.arrivals import Arrivals, mates_of
from pengserve.planners.judge.away import Away
from pengserve.planners.judge.cohorts import Lengths, Sizes, ages_of
from pengserve.planners.judge.costs import Costs, Work
from pengserve.planners.types.snapshot import ClusterSnapshot
from pengserve.planners.types.step_cost import TERMS

SHORT_S, LONG_S = 5.0, 40.0  # what counts as now, and as the long run
MOST_FOUND = 0.95  # of a prompt: the last token is always computed
MIN_SEEN_S = 1.0  # of watching; before it nothing is known
STEP_MEMORY_S = 60.0  # what steps took longer ago counts 1/e
GAP_S = 10.0  # without a look: what happened in between is not known
DEFAULT_TOKENS = 512.0, 128.0  # prompt and output, before any request has come and ended

_REQUESTS = (
    "total_requests",
    "total_request_tokens",
    "total_finished",
    "total_finished_tokens",
    "total_generated_tokens",
    "total_prefix_queries",
    "total_prefix_hits",
)
_PAIRS = ("total_step_pairs", "total_step_tokens")
_STEPS = ("total_costed_steps", "total_step_tokens", "total_step_extra_tokens", "total_step_seqs")
_WORK = (*_STEPS, "total_step_context", "total_step_pairs")  # in the order of `TERMS`
_AGAIN = ("total_sent_back", "total_sent_again")
_ALL = tuple(dict.fromkeys((*_REQUESTS, *_WORK, *_AGAIN, "total_step_us")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests that come to the whole cluster."""

    coming: Arrivals
    prompt_tokens: float  # mean
    read_share: float  # of a prompt, that is computed and not found in a prefix cache
    output_tokens: float  # mean
    output_spread: float  # standard deviation of answers, as a share of the mean
    ages: tuple[float, ...]  # tokens that running requests have, in cohorts of as many (`judge.cohorts`)
    away: Away  # sent back by an instance, and not come to another yet
    since_s: float  # seconds for which requests have come, of late
    pairs: float  # by token of a prompt, see `StepCost.pair_s`
    mates: float = 0.0  # requests that come at the same instant as one that comes

    @property
    def is_settled(self) -> bool:
        """Whether requests have come for so long that their rate is known."""
        return self.since_s >= SHORT_S


@dataclass(frozen=True, slots=True)
class _Look:
    time_s: float
    counts: tuple[float, ...]  # `_REQUESTS` since the first look
    running: float  # requests of all instances that hold KV
    waiting: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A value: a look returns the next one."""

    looks: tuple[_Look, ...] = ()
    work: Mapping[str, Work] = field(default_factory=dict, compare=False)
    prompts: Sizes = field(default_factory=Sizes)  # of requests that came
    ends: Sizes = field(default_factory=Sizes)  # ... and of answers that ended
    away: Away = field(default_factory=Away)
    ids: Ints | None = field(default=None, compare=False)  # of the newest look
    shapes: NDArray[np.str_] | None = field(default=None, compare=False)
    totals: Mapping[str, Ints] = field(default_factory=dict, compare=False)

    @property
    def is_known(self) -> bool:
        """Whether enough was seen to predict from."""
        looks = self.looks
        is_long = len(looks) > 1 and looks[-1].time_s - looks[0].time_s >= MIN_SEEN_S
        return is_long and bool(self.totals["total_requests"].any())

    def is_of_late(self, now_s: float) -> bool:
        """Whether the newest look was a moment ago."""
        return bool(self.looks) and now_s - self.looks[-1].time_s <= GAP_S

    def seen(self, snapshot: ClusterSnapshot, instances: ReadyInstances) -> "Watched":
        """With this look."""
        now_s = snapshot.time_s
        before = self if self.is_of_late(now_s) else Watched(work=self.work, prompts=self.prompts, ends=self.ends)
        ids, shapes = instances.ids, np.array([i.stats.shape for i in instances.values()], dtype=np.str_)
        loads = instances.stats((*_ALL, "num_running", "num_waiting", "num_holding"))
        totals = {name: loads[name][ids] for name in _ALL}
        num_holding = float(loads["num_holding"].sum())
        running = float(loads["num_running"].sum()) + num_holding
        waiting = float(loads["num_waiting"].sum()) - num_holding
        if not before.looks:
            first = _Look(now_s, (0.0,) * len(_REQUESTS), running, waiting)
            return replace(before, looks=(first,), ids=ids, shapes=shapes, totals=totals)
        if now_s <= before.looks[-1].time_s:
            return self
        deltas = before._deltas(ids, totals)
        counts = tuple(
            at + float(deltas[name].sum()) for at, name in zip(before.looks[-1].counts, _REQUESTS, strict=True)
        )
        away = before.away.seen(ids, deltas["total_sent_back"], deltas["total_sent_again"], now_s)
        looks = (*before.looks, _Look(now_s, counts, running, waiting + away.count))
        if len(looks) > 2 and looks[1].time_s < now_s - LONG_S:
            looks = looks[1:]
        work = before._worked(shapes, ids, deltas, now_s)
        keep = float(np.exp(-(now_s - before.looks[-1].time_s) / STEP_MEMORY_S))
        prompts = before.prompts.seen(deltas["total_requests"], deltas["total_request_tokens"], keep)
        ends = before.ends.seen(deltas["total_finished"], deltas["total_finished_tokens"], keep)
        return Watched(
            looks=looks, work=work, prompts=prompts, ends=ends, away=away, ids=ids, shapes=shapes, totals=totals
        )

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
        self, shapes: NDArray[np.str_], ids: Ints, deltas: Mapping[str, Ints], now_s: float
    ) -> Mapping[str, Work]:
        assert self.ids is not None and self.shapes is not None
        if len(self.ids) != len(ids) or not (self.ids == ids).all():
            return self.work
        is_same = self.shapes == shapes
        keep = float(np.exp(-(now_s - self.looks[-1].time_s) / STEP_MEMORY_S))  # of shapes that run: no other is newer
        work = dict(self.work)
        for shape in np.unique(shapes[is_same]).tolist():
            same = is_same & (shapes == shape)
            seconds = float(deltas["total_step_us"][same].sum()) * 1e-6
            row = np.array([float(deltas[name][same].sum()) for name in _WORK])
            if seconds <= 0 or row[0] <= 0:
                continue
            old = work.get(shape, Work(np.zeros((len(TERMS),) * 2), np.zeros(len(TERMS)), 0.0))
            # Weighed by time: a look in which little ran says little.
            work[shape] = Work(
                keep * old.gram + np.outer(row, row) / seconds, keep * old.moment + row, keep * old.seconds + seconds
            )
        return work

    # What is known ----------------------------------------------------------------------------------------------------

    def traffic(self) -> Traffic:
        """Requests that come, by the looks of late."""
        looks, now = self.looks, self.looks[-1]
        first = looks[0]
        recent = next((look for look in reversed(looks) if now.time_s - look.time_s >= SHORT_S), first)
        came, came_tokens, ended, ended_tokens, generated, asked, found = (
            b - a for a, b in zip(first.counts, now.counts, strict=True)
        )
        times, counts = np.array([(look.time_s, look.counts[0]) for look in looks]).T
        prompt, output = self._usual_tokens()
        if came:
            prompt = came_tokens / came
        # Answers under way tell of long ones before these end, unless all are of about one length.
        spread = self.ends.spread
        under_way = min(1.0, spread * spread) * max(0.0, generated - ended_tokens)
        output = max(1.0, (ended_tokens + under_way + output) / (ended + 1.0))
        output = min(output, self._most_tokens(output, ended, ended_tokens, recent))
        begun_s = next((look.time_s for look in looks if look.counts[0] > 0), now.time_s)
        return Traffic(
            coming=Arrivals.of(times, counts),
            prompt_tokens=max(1.0, prompt),
            read_share=1.0 - MOST_FOUND * min(1.0, found / asked) if asked > 0 else 1.0,
            output_tokens=output,
            output_spread=spread,
            since_s=now.time_s - begun_s,
            ages=self._ages(output, recent),
            away=self.away,
            pairs=self._pairs(prompt),
            mates=mates_of(times, counts),
        )

    def _usual_tokens(self) -> tuple[float, float]:
        """Means of prompts and answers since the instances began."""
        came, came_tokens, ended, ended_tokens = (float(self.totals[name].sum()) for name in _REQUESTS[:4])
        prompt, output = DEFAULT_TOKENS
        return came_tokens / came if came else prompt, max(1.0, ended_tokens / ended) if ended else output

    def _most_tokens(self, output_tokens: float, ended: float, ended_tokens: float, recent: _Look) -> float:
        """The most that answers may be expected to have: those under way twice what the oldest of them have by now.

        While few have ended, all tokens over the answers that ended say nothing: a hundred answers that began together
        have a hundred times as many tokens as each of them.
        """
        running = self.looks[-1].running
        oldest = self._ages(output_tokens, recent)[-1]
        known = ended_tokens + 2.0 * oldest * running
        return max(known / max(1.0, ended + running), DEFAULT_TOKENS[1] if not ended else 1.0)

    def _ages(self, output_tokens: float, recent: _Look) -> tuple[float, ...]:
        """How many tokens running requests have, from when they began and how fast tokens came since `recent`."""
        times, running, waiting, came = np.array([(k.time_s, k.running, k.waiting, k.counts[0]) for k in self.looks]).T
        token_rate = self._token_rate(recent)
        begun = np.maximum(0.0, np.diff(came) - np.diff(waiting))[::-1]
        ages = token_rate * (times[-1] - 0.5 * (times[1:] + times[:-1]))[::-1]
        lengths = Lengths.of(np.array(output_tokens), np.array(self.ends.spread))
        return tuple(ages_of(begun, ages, float(running[-1]), lengths).tolist())

    def _token_rate(self, recent: _Look) -> float:
        """Tokens that a request that runs has by second, since `recent`."""
        looks = self.looks[self.looks.index(recent) :]
        run_s = sum(look.running * (after.time_s - look.time_s) for look, after in pairwise(looks))
        return (looks[-1].counts[4] - recent.counts[4]) / run_s if run_s > 0 else 0.0

    def _pairs(self, prompt_tokens: float) -> float:
        """Pairs that a token of a prompt adds: long prompts have most of them. As seen in steps; prompts are known to
        be long before they are read, and have at least as many pairs by token as they have tokens.
        """
        pairs = sum(float(w.moment[_WORK.index("total_step_pairs")]) for w in self.work.values())
        tokens = sum(
            float(w.moment[_WORK.index("total_step_tokens")] - w.moment[_WORK.index("total_step_seqs")])
            for w in self.work.values()
        )
        read = pairs / tokens if tokens > 0 and pairs > 0 else prompt_tokens
        return max(read, self.prompts.of_a_token)

    def costs(self, instances: ReadyInstances) -> Costs:
        """What steps cost by shape."""
        profiles = {}
        first = next(iter(instances.values()), None)
        for lane in first.lanes if first is not None else ():
            if lane.step_cost is not None:
                profiles[lane.shape] = lane.step_cost
        return Costs(profiles, self.work)


traffic_of = Kept(Watched.traffic)  # one look is asked several times
