"""What was predicted, beside what became of it: so that people can judge the judge, and systematic errors correct it.

A forecast is made of groups when a change leads to them, and now and then of the layout as it is. After the horizon it
is held against what was measured there, where the groups still stand. The load that came is known then: the model
predicts again with it, so that what is left between the two is the model's own error, by shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log

import numpy as np

from pengserve.planners.columns import Floats, ReadyInstances, group_table
from pengserve.planners.judge.fluid import predict
from pengserve.planners.judge.prediction import Prediction
from pengserve.planners.judge.rows import Rows, RowSets
from pengserve.planners.judge.watch import Traffic
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import ClusterSnapshot

KEEP = "keep"  # the action of a forecast of the layout as it is
STANDING = KEEP, "migrate"  # actions whose groups stand already
MOST_GROUPS = 16  # of one forecast
MOST_FOLLOWED = 24  # at a time: what a thousand instances change tells as much as that
MOST_TOLD = 4  # forecasts that one look tells the outcome of; the others wait for the next looks
LEARN, LEARN_OWN = 0.3, 0.1  # weights of the newest error in what all shapes are wrong by, and in what one is beside
MOST_CORRECTION = log(1.5)
MIN_REQUEST_S = 5.0  # request-seconds that were measured; fewer say little
LATE_S = 5.0  # a change that does not stand after so long has failed
_COUNTED = (
    "total_requests", "total_finished", "total_generated_tokens",
    "num_waiting", "num_running", "num_holding", "num_preempted",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What became of some groups within the horizon."""

    seconds: float = 0.0
    request_s: float = 0.0  # request-seconds, running and waiting
    run_s: float = 0.0
    wait_s: float = 0.0
    requests: int = 0  # that came
    finished: int = 0
    generated_tokens: int = 0
    queue: int = 0  # at the end

    @property
    def ttft_s(self) -> float:
        """Mean wait for the first token, by Little's law."""
        return self.wait_s / max(1, self.requests)

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a token."""
        return self.run_s / max(1, self.generated_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A forecast whose time is over."""

    action: str
    groups: tuple[Group, ...]
    made_s: float  # seconds since the Unix epoch
    predicted: Prediction
    measured: Measured
    error: float  # request-seconds measured over those that the model gives for the requests that came


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What should become of `groups`, counted from when they stand."""

    action: str
    groups: tuple[Group, ...]
    rows: Rows = field(compare=False)
    predicted: Prediction
    made_s: float
    horizon_s: float
    begun_s: float | None = None  # since when the groups stand
    seen_s: float = 0.0
    first: tuple[int, ...] = (0, 0, 0)  # requests, finished, generated
    measured: Measured = field(default_factory=Measured)

    @property
    def leaders(self) -> list[InstanceId]:
        """Of its groups."""
        return [group.leader for group in self.groups]

    def stands(self, instances: ReadyInstances, group_of: Mapping[InstanceId, Group]) -> bool:
        """Whether its groups are in the layout, and run. `group_of`: the group of each member, in the layout."""
        return all(
            group_of.get(leader) == group and leader in instances and instances.shapes[leader] == group.shape
            for leader, group in zip(self.leaders, self.groups, strict=True)
        )

    def seen(self, counts: Sequence[int], now_s: float) -> "Forecast":
        """With this look, in which its groups stand. `counts`: what their leaders count together (`_COUNTED`)."""
        *totals, waiting, running, holding, preempted = counts
        if self.begun_s is None:
            return replace(self, begun_s=now_s, seen_s=now_s, first=tuple(totals))
        begun = holding + preempted
        waiting, running = waiting - begun, running + begun
        gap_s, before = now_s - self.seen_s, self.measured
        measured = Measured(
            seconds=now_s - self.begun_s,
            request_s=before.request_s + gap_s * (waiting + running),
            run_s=before.run_s + gap_s * running,
            wait_s=before.wait_s + gap_s * waiting,
            requests=totals[0] - self.first[0],
            finished=totals[1] - self.first[1],
            generated_tokens=totals[2] - self.first[2],
            queue=waiting,
        )
        return replace(self, seen_s=now_s, measured=measured)

    def may_come(self, now_s: float) -> bool:
        """Whether its groups may still come to stand; else they ended, or never stood."""
        return self.begun_s is None and now_s - self.made_s < LATE_S

    def again(self, traffic: Traffic) -> Rows:
        """What the model predicts from, with the requests that really came."""
        rows, measured = self.rows, self.measured
        share = rows.later_rate / max(1e-9, float(rows.later_rate.sum()))
        ones = np.ones_like(share)
        rate = share * measured.requests / max(1e-9, measured.seconds)
        return replace(
            rows,
            rate=rate,
            later_rate=rate,
            prompt_tokens=traffic.prompt_tokens * ones,
            output_tokens=traffic.output_tokens * ones,
        )

    def outcome(self, expected_s: float) -> Outcome:
        """What became of it. `expected_s`: request-seconds that the model gives for the requests that really came."""
        return Outcome(
            action=self.action,
            groups=self.groups,
            made_s=self.made_s,
            predicted=self.predicted,
            measured=self.measured,
            error=(self.measured.request_s + MIN_REQUEST_S) / (expected_s + MIN_REQUEST_S),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasts:
    """Those under way, and what errors have taught. A value: a look returns the next one."""

    open: tuple[Forecast, ...] = ()
    over: tuple[Forecast, ...] = ()  # whose time is over, and that were not held against the model yet
    log_error: float = 0.0  # of the newest ones, of all shapes alike,
    log_errors: Mapping[str, float] = field(default_factory=dict)  # ... and by shape, beside it

    def seen(self, snapshot: ClusterSnapshot, instances: ReadyInstances) -> "Forecasts":
        """With this look."""
        if not self.open:
            return self
        group_of, now_s = group_table(snapshot.layout.groups).group_of, snapshot.time_s
        standing = [forecast.stands(instances, group_of) for forecast in self.open]
        counts = iter(_counts([f.leaders for f, stands in zip(self.open, standing, strict=True) if stands], instances))
        num_begun = sum(forecast.begun_s is not None for forecast in self.open)
        left, over = list[Forecast](), list[Forecast]()
        for forecast, stands in zip(self.open, standing, strict=True):
            if stands:
                if forecast.begun_s is None:
                    if num_begun >= MOST_FOLLOWED:
                        continue
                    num_begun += 1
                found = forecast.seen(next(counts), now_s)
                (left if found.measured.seconds < found.horizon_s else over).append(found)
            elif forecast.may_come(now_s):
                left.append(forecast)
        return replace(self, open=tuple(left), over=(*self.over, *over))

    def again(self, traffic: Traffic) -> tuple[Rows, Floats] | None:
        """What the model must predict once more, to tell what became of the first of those that are `over`: their
        groups with the requests that really came, and the horizon of each, in seconds. None where none is over.
        """
        if not self.over:
            return None
        told = self.over[:MOST_TOLD]
        horizons_s = np.repeat([max(1e-3, forecast.measured.seconds) for forecast in told], self._sizes)
        return Rows.joined([forecast.again(traffic) for forecast in told]), horizons_s

    def told(self, request_s: Floats) -> "tuple[Forecasts, tuple[Outcome, ...]]":
        """With what became of the first that are `over`. `request_s`: request-seconds of each row of `again`."""
        parts = np.split(request_s, np.cumsum(self._sizes)[:-1])
        told, later = self.over[:MOST_TOLD], self.over[MOST_TOLD:]
        outcomes = tuple(f.outcome(float(found.sum())) for f, found in zip(told, parts, strict=True))
        return replace(self, over=later).learned(outcomes), outcomes

    def settled(self, traffic: Traffic) -> "tuple[Forecasts, tuple[Outcome, ...]]":
        """As `told`, where nothing else is predicted in this look."""
        again = self.again(traffic)
        return self.told(predict(*again).request_s) if again is not None else (self, ())

    @property
    def _sizes(self) -> list[int]:
        """Rows of the first of those that are `over`."""
        return [len(forecast.rows.servers) for forecast in self.over[:MOST_TOLD]]

    def learned(self, outcomes: Sequence[Outcome]) -> "Forecasts":
        """With what these were wrong by, where they were of one shape and many requests."""
        common, errors = self.log_error, dict(self.log_errors)
        for outcome in outcomes:
            shapes = {group.shape for group in outcome.groups}
            if len(shapes) == 1 and outcome.measured.request_s >= MIN_REQUEST_S:
                (shape,) = shapes
                own = errors.get(shape, 0.0)
                rest = log(outcome.error) - common - own
                common, errors[shape] = common + LEARN * rest, own + LEARN_OWN * rest
        return replace(self, log_error=common, log_errors=errors)

    def correction(self, shape: str) -> float:
        """Factor on the request-seconds that the model gives for `shape`.

        Most of what the model is wrong by, such as bursts within the horizon, is alike for all shapes: one shape alone
        is held to be wrong by a quarter of it at most, until others were measured too.
        """
        error = self.log_error + self.log_errors.get(shape, 0.0)
        return exp(max(-MOST_CORRECTION, min(MOST_CORRECTION, error)))

    def goals(self) -> tuple[Group, ...]:
        """Groups that a change has begun to lead to, and that do not stand yet."""
        waiting = (f.groups for f in self.open if f.begun_s is None and f.action not in STANDING)
        return tuple(group for groups in waiting for group in groups if group.kind is not GroupKind.DP)


def _counts(leaders: Sequence[Sequence[InstanceId]], instances: ReadyInstances) -> list[list[int]]:
    """What each of some sets of leaders counts together, in the order of `_COUNTED`."""
    if not leaders:
        return []
    sets, by_leader = RowSets(leaders), np.stack([instances.stat(name) for name in _COUNTED])
    found: list[list[int]] = sets.sum(by_leader).T.tolist()
    return found
