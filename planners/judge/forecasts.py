"""What was predicted, beside what became of it: so that people can judge the judge, and systematic errors correct it.

A forecast is made of groups when a change leads to them, and now and then of the layout as it is. After the horizon it
is held against what was measured there, where the groups still stand. The load that came is known then: the model
predicts again with it, so that what is left between the two is the model's own error, by shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log

import numpy as np

from pengserve.planners.columns import ReadyInstances, group_table
from pengserve.planners.judge.fluid import predict
from pengserve.planners.judge.prediction import Prediction
from pengserve.planners.judge.rows import Rows
from pengserve.planners.judge.watch import Traffic
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceStats

KEEP = "keep"  # the action of a forecast of the layout as it is
STANDING = KEEP, "migrate"  # actions whose groups stand already
MOST_GROUPS = 16  # of one forecast
LEARN, LEARN_OWN = 0.3, 0.1  # weights of the newest error in what all shapes are wrong by, and in what one is beside
MOST_CORRECTION = log(1.5)
MIN_REQUEST_S = 5.0  # request-seconds that were measured; fewer say little
LATE_S = 5.0  # a change that does not stand after so long has failed


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
    first: tuple[int, int, int] = (0, 0, 0)  # requests, finished, generated
    measured: Measured = field(default_factory=Measured)

    def seen(
        self, snapshot: ClusterSnapshot, instances: ReadyInstances, group_of: Mapping[InstanceId, Group]
    ) -> "Forecast | None":
        """With this look; None where its groups do not stand any more, or never came to stand.

        `group_of`: the group of each member, in the layout.
        """
        now_s, stats = snapshot.time_s, list[InstanceStats]()
        for group in self.groups:
            leader = instances.get(group.leader)
            if leader is None or group_of.get(group.leader) != group or leader.stats.shape != group.shape:
                return self if self.begun_s is None and now_s - self.made_s < LATE_S else None
            stats.append(leader.stats)
        counts = (
            sum(s.total_requests for s in stats),
            sum(s.total_finished for s in stats),
            sum(s.total_generated_tokens for s in stats),
        )
        if self.begun_s is None:
            return replace(self, begun_s=now_s, seen_s=now_s, first=counts)
        waiting = sum(s.num_waiting - s.num_holding for s in stats)
        running = sum(s.num_running + s.num_holding for s in stats)
        gap_s, before = now_s - self.seen_s, self.measured
        measured = Measured(
            seconds=now_s - self.begun_s,
            request_s=before.request_s + gap_s * (waiting + running),
            run_s=before.run_s + gap_s * running,
            wait_s=before.wait_s + gap_s * waiting,
            requests=counts[0] - self.first[0],
            finished=counts[1] - self.first[1],
            generated_tokens=counts[2] - self.first[2],
            queue=waiting,
        )
        return replace(self, seen_s=now_s, measured=measured)

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


def outcomes_of(over: Sequence[Forecast], traffic: Traffic) -> tuple[Outcome, ...]:
    """What became of forecasts whose time is over. A tick in which ten end predicts once, and not ten times."""
    if not over:
        return ()
    parts = [forecast.again(traffic) for forecast in over]
    sizes = [len(rows.servers) for rows in parts]
    horizons_s = np.repeat([max(1e-3, forecast.measured.seconds) for forecast in over], sizes)
    request_s = np.split(predict(Rows.joined(parts), horizons_s).request_s, np.cumsum(sizes)[:-1])
    return tuple(forecast.outcome(float(found.sum())) for forecast, found in zip(over, request_s, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasts:
    """Those under way, and what errors have taught. A value: a look returns the next one."""

    open: tuple[Forecast, ...] = ()
    log_error: float = 0.0  # of the newest ones, of all shapes alike,
    log_errors: Mapping[str, float] = field(default_factory=dict)  # ... and by shape, beside it

    def seen(
        self, snapshot: ClusterSnapshot, instances: ReadyInstances, traffic: Traffic
    ) -> "tuple[Forecasts, tuple[Outcome, ...]]":
        """With this look; and the outcomes of those whose time is over."""
        if not self.open:
            return self, ()
        group_of = group_table(snapshot.layout.groups).group_of
        left, over = list[Forecast](), list[Forecast]()
        for forecast in self.open:
            found = forecast.seen(snapshot, instances, group_of)
            if found is not None:
                (left if found.measured.seconds < found.horizon_s else over).append(found)
        outcomes = outcomes_of(over, traffic)
        return replace(self, open=tuple(left)).learned(outcomes), outcomes

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
