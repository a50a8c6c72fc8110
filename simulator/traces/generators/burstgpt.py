"""Traffic like that of KunServe's evaluation (§2.2, §5), which replays a scaled part of BurstGPT."""

from dataclasses import dataclass
from typing import ClassVar

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces import checks
from pengserve.simulator.traces.generators.base import trace_of
from pengserve.simulator.traces.generators.lengths import Lengths, LognormalLengths
from pengserve.simulator.traces.generators.rates import RateCurve
from pengserve.simulator.traces.kv_demand import StayModel
from pengserve.simulator.traces.randomness import streams
from pengserve.simulator.traces.transforms import repeat

# The means are the paper's (§5.1). Outputs spread as stays do: the paper's 14.9 read as their standard deviation gives
# 14.9 / 11 for the lognormal outputs too, hence their p99; the longest stay of 150 s gives the longest output. The
# spread of prompts is not in the paper: BurstGPT's models took 4,096 tokens, and that is the longest one here.
BURSTGPT_LENGTHS = LognormalLengths(
    prompt_mean=642, prompt_p99=3000, prompt_max=4096, output_mean=262, output_p99=1666, output_max=3572
)
BURSTGPT_STAY = StayModel(prefill_s_per_token=0.0, tpot_s=11.0 / 262.0)  # 11 s on average


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstGpt:
    """Two bursts in 640 s. In each the rate is `burst_factor` times the rate of the `lead_s` before.

    A cluster with room for 2.1 times the mean demand overloads only where demand exceeds that, so the rate must rise
    further above its mean than above what it was just before: bursts are at `burst_over_mean` times the mean rate,
    their leads at `burst_over_mean / burst_factor`, and the rest is as low as makes `rate_per_s` the mean of all.
    """

    default_lengths: ClassVar[Lengths | None] = BURSTGPT_LENGTHS

    rate_per_s: float
    duration_s: float = 640.0
    burst_starts_s: tuple[float, ...] = (45.0, 440.0)  # Fig. 2 and Fig. 16
    burst_s: float = 40.0  # a few mean stays, so that demand follows the rate
    lead_s: float = 45.0
    burst_factor: float = 2.0
    burst_over_mean: float = 2.8
    cv: float = 1.0  # of the gaps, beside the change of the rate

    def __post_init__(self) -> None:
        checks.above_zero(
            rate_per_s=self.rate_per_s,
            duration_s=self.duration_s,
            burst_s=self.burst_s,
            burst_factor=self.burst_factor,
            burst_over_mean=self.burst_over_mean,
            cv=self.cv,
        )
        checks.not_negative(lead_s=self.lead_s)
        edges = [edge for start_s in self.burst_starts_s for edge in (start_s - self.lead_s, start_s + self.burst_s)]
        if not edges or [0.0, *edges, self.duration_s] != sorted([0.0, *edges, self.duration_s]):
            raise ConfigError(
                "burst_starts_s must be in order and leave room for each burst and its lead within duration_s,"
                f" got {list(self.burst_starts_s)!r}"
            )
        if self._rest_over_mean < 0:
            raise ConfigError(
                f"burst_over_mean must be lower, or bursts shorter: at {self.burst_over_mean!r} the bursts alone exceed"
                " the mean rate"
            )

    @property
    def curve(self) -> RateCurve:
        """The rate over time."""
        levels = []
        at_s = 0.0
        burst = self.burst_over_mean * self.rate_per_s
        for start_s in self.burst_starts_s:
            levels.append((start_s - self.lead_s - at_s, self._rest_over_mean * self.rate_per_s))
            levels += [(self.lead_s, burst / self.burst_factor), (self.burst_s, burst)]
            at_s = start_s + self.burst_s
        return RateCurve.of_levels([*levels, (self.duration_s - at_s, self._rest_over_mean * self.rate_per_s)])

    def generate(self, lengths: Lengths, seed: int) -> tuple[Arrival, ...]:
        """As `Generator`."""
        times, sizes = streams(seed, "burstgpt", 2)
        return trace_of(self.curve.arrivals(times, self.cv), lengths, sizes)

    @property
    def _rest_over_mean(self) -> float:
        count = len(self.burst_starts_s)
        busy = count * self.burst_over_mean * (self.burst_s + self.lead_s / self.burst_factor)
        rest_s = self.duration_s - count * (self.burst_s + self.lead_s)
        return (self.duration_s - busy) / rest_s if rest_s > 0 else -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtremeBurst:
    """The first burst of `BurstGpt`, replayed without a pause until `duration_s` (KunServe §5.6, Fig. 17)."""

    default_lengths: ClassVar[Lengths | None] = BURSTGPT_LENGTHS

    rate_per_s: float  # mean of the trace that the burst is taken from
    duration_s: float = 200.0
    burst_start_s: float = 45.0
    burst_s: float = 40.0
    burst_factor: float = 2.0
    burst_over_mean: float = 2.8
    cv: float = 1.0

    def __post_init__(self) -> None:
        self._source()  # refuses what makes no burst
        if not self.duration_s > self.burst_start_s + self.burst_s:
            raise ConfigError(f"duration_s must be above the end of the first burst, got {self.duration_s!r}")

    def generate(self, lengths: Lengths, seed: int) -> tuple[Arrival, ...]:
        """As `Generator`."""
        stop_s = self.burst_start_s + self.burst_s
        return repeat(self._source().generate(lengths, seed), self.burst_start_s, stop_s, self.duration_s)

    def _source(self) -> BurstGpt:
        return BurstGpt(
            rate_per_s=self.rate_per_s,
            burst_starts_s=(self.burst_start_s,),
            burst_s=self.burst_s,
            lead_s=self.burst_start_s,
            burst_factor=self.burst_factor,
            burst_over_mean=self.burst_over_mean,
            cv=self.cv,
        )
