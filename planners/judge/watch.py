"""What the judge has measured: how many requests come, how long they are, and what steps take in each shape.

All of it comes from totals that instances count: what an instance that ran one shape at two looks has added in between,
it did in that shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import ne

import numpy as np

from pengserve.planners.columns import Floats, Ints, Kept, ReadyInstances, ints
from pengserve.planners.judge.arrivals import Arrivals, mates_of, phase_of
from pengserve.planners.judge.away import Away
from pengserve.planners.judge.bursts import Bursts, Phase
from pengserve.planners.judge.cohorts import COHORTS, Sizes, ages_of
from pengserve.planners.judge.costs import Costs, Work
from pengserve.planners.types.ages import AGES
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
_STEPS = ("total_costed_steps", "total_step_tokens", "total_step_extra_tokens", "total_step_seqs")
_WORK = (*_STEPS, "total_step_context", "total_step_pairs")  # in the order of `TERMS`
_ALL = (*_REQUESTS, "total_step_us", *_WORK, "total_sent_back", "total_sent_again")
_CAME, _CAME_TOKENS, _ENDED, _ENDED_TOKENS = range(4)  # places in `_ALL`
_SENT_BACK, _SENT_AGAIN = -2, -1
_OF_REQUESTS, _OF_STEPS = slice(0, len(_REQUESTS)), slice(len(_REQUESTS), _SENT_BACK)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A value: a look returns the next one."""

    looks: tuple[_Look, ...] = ()
    phase: Phase | None = None  # None: of the first look
    bursts: Bursts = field(default_factory=Bursts)
    work: Mapping[str, Work] = field(default_factory=dict, compare=False)
    prompts: Sizes = field(default_factory=Sizes)  # of requests that came
    ends: Sizes = field(default_factory=Sizes)  # ... and of answers that ended
    away: Away = field(default_factory=Away)
    running: float = 0.0  # requests of all instances that hold KV
    ages: tuple[float, ...] = (0.0,) * COHORTS  # tokens that running requests have, when some last ran
    ids: Ints | None = field(default=None, compare=False)  # of the newest look
    shapes: Sequence[str] = field(default=(), compare=False)  # ... and what each of these ran
    totals: Ints | None = field(default=None, compare=False)  # `[one of _ALL, one of ids]`

    @property
    def is_known(self) -> bool:
        """Whether enough was seen to predict from."""
        looks = self.looks
        is_long = len(looks) > 1 and looks[-1].time_s - looks[0].time_s >= MIN_SEEN_S
        return is_long and self.totals is not None and bool(self.totals[_CAME].any())

    def is_of_late(self, now_s: float) -> bool:
        """Whether the newest look was a moment ago."""
        return bool(self.looks) and now_s - self.looks[-1].time_s <= GAP_S

    def seen(self, snapshot: ClusterSnapshot, instances: ReadyInstances) -> "Watched":
        """With this look."""
        now_s = snapshot.time_s
        before = self if self.is_of_late(now_s) else self._long_ago()
        ids, shapes, totals = instances.ids, instances.run, instances.stats(_ALL)
        batches, holding, *ages = instances.stats(("num_running", "num_holding", *AGES))
        running = float(batches.sum() + holding.sum())
        if not before.looks:
            first = _Look(now_s, (0.0,) * len(_REQUESTS))
            return replace(before, looks=(first,), running=running, ids=ids, shapes=shapes, totals=totals)
        if now_s <= before.looks[-1].time_s:
            return self
        deltas = before._deltas(ids, totals)
        added = deltas[_OF_REQUESTS].sum(axis=1).tolist()
        counts = tuple(at + float(more) for at, more in zip(before.looks[-1].counts, added, strict=True))
        away = before.away.seen(ids, deltas[_SENT_BACK], deltas[_SENT_AGAIN], now_s)
        looks = (*before.looks, _Look(now_s, counts))
        if len(looks) > 2 and looks[1].time_s < now_s - LONG_S:
            looks = looks[1:]
        phase = phase_of(*_came_of(looks))
        work = before._worked(shapes, ids, deltas, now_s)
        keep = float(np.exp(-(now_s - before.looks[-1].time_s) / STEP_MEMORY_S))
        prompts = before.prompts.seen(deltas[_CAME], deltas[_CAME_TOKENS], keep)
        ends = before.ends.seen(deltas[_ENDED], deltas[_ENDED_TOKENS], keep)
        return Watched(
            looks=looks,
            phase=phase,
            bursts=before.bursts.seen(phase, now_s),
            work=work,
            prompts=prompts,
            ends=ends,
            away=away,
            running=running,
            ages=ages_of(batches, np.stack(ages)) if batches.any() else before.ages,
            ids=ids,
            shapes=shapes,
            totals=totals,
        )

    def _long_ago(self) -> "Watched":
        """What is known after a time without looks."""
        return Watched(work=self.work, prompts=self.prompts, ends=self.ends, bursts=self.bursts)

    def _deltas(self, ids: Ints, totals: Ints) -> Ints:
        """What each instance has added, as `totals`; 0 where it is new, or counts anew."""
        assert self.ids is not None and self.totals is not None
        if np.array_equal(self.ids, ids):
            added: Ints = np.maximum(0, totals - self.totals)
            return added
        size = int(max(ids.max(initial=0), self.ids.max(initial=0))) + 1
        is_old, old = np.zeros(size, dtype=np.bool_), np.zeros((len(_ALL), size), dtype=np.int64)
        is_old[self.ids] = True
        old[:, self.ids] = self.totals
        return np.where(is_old[ids], np.maximum(0, totals - old[:, ids]), 0)

    def _worked(self, shapes: Sequence[str], ids: Ints, deltas: Ints, now_s: float) -> Mapping[str, Work]:
        assert self.ids is not None
        if not np.array_equal(self.ids, ids):
            return self.work
        keep = float(np.exp(-(now_s - self.looks[-1].time_s) / STEP_MEMORY_S))  # of shapes that run: no other is newer
        work = dict(self.work)
        place_of = {shape: place for place, shape in enumerate(sorted(set(shapes)))}
        places = ints(map(place_of.__getitem__, shapes))
        changed = len(place_of)  # where the instances are that ran another shape before
        places[np.fromiter(map(ne, self.shapes, shapes), dtype=np.bool_, count=len(shapes))] = changed
        microseconds, *figures = (
            np.bincount(places, weights=counts, minlength=changed + 1) for counts in deltas[_OF_STEPS]
        )
        rows = np.stack(figures, axis=1)
        for shape, place in place_of.items():
            seconds, row = float(microseconds[place]) * 1e-6, rows[place]
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
        came, came_tokens, ended, ended_tokens, generated, asked, found = (
            b - a for a, b in zip(first.counts, now.counts, strict=True)
        )
        times, counts = _came_of(looks)
        prompt, output = self._usual_tokens()
        if came:
            prompt = came_tokens / came
        # Answers under way tell of long ones before these end, unless all are of about one length.
        spread = self.ends.spread
        under_way = min(1.0, spread * spread) * max(0.0, generated - ended_tokens)
        output = max(1.0, (ended_tokens + under_way + output) / (ended + 1.0))
        output = min(output, self._most_tokens(ended, ended_tokens))
        begun_s = next((look.time_s for look in looks if look.counts[0] > 0), now.time_s)
        return Traffic(
            coming=Arrivals.of(times, counts, self.phase or phase_of(times, counts), self.bursts),
            prompt_tokens=max(1.0, prompt),
            read_share=1.0 - MOST_FOUND * min(1.0, found / asked) if asked > 0 else 1.0,
            output_tokens=output,
            output_spread=spread,
            since_s=now.time_s - begun_s,
            ages=self.ages,
            away=self.away,
            pairs=self._pairs(prompt),
            mates=mates_of(times, counts),
        )

    def _usual_tokens(self) -> tuple[float, float]:
        """Means of prompts and answers since the instances began."""
        assert self.totals is not None
        came, came_tokens, ended, ended_tokens = self.totals[_OF_REQUESTS].sum(axis=1).astype(float).tolist()[:4]
        prompt, output = DEFAULT_TOKENS
        return came_tokens / came if came else prompt, max(1.0, ended_tokens / ended) if ended else output

    def _most_tokens(self, ended: float, ended_tokens: float) -> float:
        """The most that answers may be expected to have: those under way twice what the oldest of them have by now, and
        no less than those that ended.

        While few have ended, all tokens over the answers that ended say nothing: a hundred answers that began together
        have a hundred times as many tokens as each of them.
        """
        known = ended_tokens + 2.0 * self.ages[-1] * self.running
        least = ended_tokens / ended if ended else DEFAULT_TOKENS[1]
        return max(known / max(1.0, ended + self.running), least)

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


def _came_of(looks: Sequence[_Look]) -> tuple[Floats, Floats]:
    """Times of looks, and how many requests had come by then."""
    times, came = np.array([(look.time_s, look.counts[_CAME]) for look in looks]).T
    return times, came


traffic_of, costs_of = Kept(Watched.traffic), Kept(Watched.costs)  # one look is asked several times
