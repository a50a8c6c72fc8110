"""A load that stays below what memory holds, but for bursts that are above what data parallel holds.

How many requests that takes depends on how long they live, and so on the machine. Two levels are measured first, at a
few and at as many requests as memory holds; between them, a life is taken to be linear in the number of requests in
flight. From that follow, without a limit of memory (`demand`):

    low rate    demand is `low_share` of what dp holds
    burst       begins and ends within a part of a life (`burst_lives`); so many requests that the demand is to be
                `peak_share` of what dp holds. A short burst depends least on how fast the machine is just then
    calm        between bursts, at the low rate, for as long as makes the mean demand 1/`headroom` of what dp holds

Demand is what all requests in flight would hold, in tokens: prompts, and what has been generated of the answers.

At a level as many prompts come as answers end; in a burst prompts come first, and then all decode. So demand comes to
two thirds to four fifths of this, which overloads nothing: rehearsals say to how much (`calibrate.py`).
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.client import Request
from benchmarks.harness import MIB, engine_flags, text

STEP_S = 0.05  # of the model
PEAK_SHARE = 1.16  # of what dp holds; in pipelines, where lives are longer, it must come to less than they hold
MAX_CALM_LIVES = 30.0
MAX_BURST = 512  # requests


class Phase(StrEnum):
    """What a request was sent in."""

    LOW = "low"
    BURST = "burst"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One benchmark run. Shares are of the tokens that the dp lanes of all instances hold."""

    model: Path
    rounds: int = 2
    num_bursts: int = 2  # in a run
    rehearsals: int = 3  # of one burst, before each round
    rehearsal_share: float = 0.9  # of what dp holds: what these are to come to
    stages: int = 2  # of a pipeline: static, or at most where drops form it; the paper's has two
    restore_below: float = 0.9  # of what dp holds; the paper's 0.5 is for pipelines that cost less beside dp
    memory_bytes: int = 194 * MIB  # of an instance, for weights and KV: of its chunks none is left over
    chunk_bytes: int = 2 * MIB  # as in a deployment, where pages can be huge; 64 KiB make steps 15 % slower
    low_share: float = 0.3
    peak_share: float = PEAK_SHARE
    headroom: float = 2.1
    burst_lives: float = 0.4  # in longer ones more comes while the first are under way, the slower the machine the more
    least_calm_s: float = 14.0  # so that the layout can come back
    min_words: int = 36  # lengths of so few requests must be alike, or chance decides how much is overloaded
    max_words: int = 44
    output_tokens: tuple[int, int] = (180, 220)  # least and most, until it is known how fast the machine is
    life_s: float = 5.6  # of a request among many: `calibrate.py` makes answers as long as that takes
    least_answer: float = 2.0  # prompts, that an answer is as long as: or a slow machine would do little but prompts
    calibrate_s: float = 8.0  # about, at each level
    start_timeout_s: float = 240.0
    answer_timeout_s: float = 600.0  # of a whole run: what is overloaded may take long to come back
    seed: int = 7
    is_compute_bound: bool = False  # bursts come faster than they can be read, see `compute.py`
    has_profiles: bool = True  # steps are timed, for simulations of the runs
    engine: Mapping[str, Any] = field(
        # Memory must be what runs out, not slots.
        default_factory=partial(engine_flags, max_num_seqs=128)
    )

    @property
    def mean_output(self) -> float:
        """Output tokens of a request, on average."""
        return sum(self.output_tokens) / 2

    def on_shared_cores(self, model: Path) -> "Plan":
        """The same for instances that share cores, with a model of half the layers.

        Memory is half as well, so that a life takes about as long. Answers are a little shorter, and more is sent
        between bursts: without that, seen before this was chosen, more than half of all requests met a pipeline, whose
        tokens take longer on half a core (P50 x1.38), and the layout was back after 10.2 s.
        """
        return replace(self, model=model, memory_bytes=98 * MIB, least_answer=1.75, low_share=0.35)

    def tiny(self) -> "Plan":
        """One round of short requests: to see that it works."""
        return replace(
            self,
            rounds=1,
            num_bursts=1,
            rehearsals=1,
            output_tokens=(60, 90),
            life_s=1.5,
            least_answer=0.5,
            calibrate_s=2.0,
            least_calm_s=4.0,
        )

    def scaled(self, factor: float, prompt_tokens: float) -> "Plan":
        """The same with answers so many times as long, if a prompt of twice `prompt_tokens` leaves room for them."""
        factor = max(factor, self.least_answer * prompt_tokens / self.mean_output)
        room = int(int(self.engine["max_model_len"]) - 2 * prompt_tokens)
        least, most = (max(1, min(room, round(factor * tokens))) for tokens in self.output_tokens)
        return replace(self, output_tokens=(least, most))

    def calibration(self, num_requests: int, name: str) -> list[Request]:
        """Requests to measure a level with."""
        sizes, texts = random.Random(f"{self.seed}/calibration"), random.Random(f"{self.seed}/calibration/{name}")
        return [self._request(sizes, texts, 0.0) for _ in range(num_requests)]

    def requests(
        self, num_instances: int, course: "Course", system: str, round_index: int
    ) -> list[tuple[Phase, Request]]:
        """The load of one run, by time. Every system of a round gets the same but for the words."""
        name = f"{self.seed}/{num_instances}/{round_index}"
        sizes, texts = random.Random(name), random.Random(f"{name}/{system}")
        times = [(at_s, Phase.LOW) for at_s in spread(sizes, course.low_per_s, 0.0, course.end_s)]
        for start_s, stop_s in course.bursts:
            per_s = course.burst_requests / (stop_s - start_s)
            times += [(at_s, Phase.BURST) for at_s in spread(sizes, per_s, start_s, stop_s)]
        return [(phase, self._request(sizes, texts, at_s)) for at_s, phase in sorted(times)]

    def _request(self, sizes: random.Random, texts: random.Random, at_s: float) -> Request:
        num_words = sizes.randint(self.min_words, self.max_words)
        max_tokens = sizes.randint(*self.output_tokens)
        return Request(prompt=text(texts, num_words), max_tokens=max_tokens, at_s=at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """So many requests in flight all the time, each followed by the next."""

    in_flight: int
    requests_per_s: float  # completed

    @property
    def life_s(self) -> float:
        """From sending a request to the end of its answer (Little's law)."""
        return self.in_flight / self.requests_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured of static dp before the load was made."""

    prompt_tokens: float  # of a request, on average
    dp_tokens: int  # that all instances hold
    pp_tokens: int  # ... in pipelines
    few: Level
    full: Level
    came: float = 1.0  # share of the demand that the levels predict: what bursts came to

    @property
    def gain(self) -> float:
        """What all instances hold more in pipelines, as a share."""
        return self.pp_tokens / self.dp_tokens - 1

    def life_s(self, in_flight: float) -> float:
        """How long a request lives among so many; never less than a tenth of a life among few."""
        few, full = self.few, self.full
        slope = (full.life_s - few.life_s) / max(1, full.in_flight - few.in_flight)
        return max(few.life_s + slope * (in_flight - few.in_flight), few.life_s / 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """When what is sent."""

    low_per_s: float
    burst_requests: int  # of each burst, on top of the low rate
    lead_s: float  # before the first burst
    burst_s: float
    calm_s: float  # after each burst
    num_bursts: int

    @property
    def end_s(self) -> float:
        """When the last request has been sent."""
        return self.lead_s + self.num_bursts * (self.burst_s + self.calm_s)

    @property
    def bursts(self) -> tuple[tuple[float, float], ...]:
        """(start, end) of each."""
        starts = [self.lead_s + i * (self.burst_s + self.calm_s) for i in range(self.num_bursts)]
        return tuple((start_s, start_s + self.burst_s) for start_s in starts)


def make_course(plan: Plan, found: Calibration) -> Course:
    """The course that the plan's shares call for on this machine.

    Raises:
        ValueError: demand cannot be as the plan says, e.g. a low load that is above the wanted mean.
    """
    low = plan.low_share * found.dp_tokens / resident_tokens(plan, found.prompt_tokens)
    course = Course(
        low_per_s=low / found.life_s(low),
        burst_requests=0,
        lead_s=1.5 * found.life_s(low),
        burst_s=plan.burst_lives * found.full.life_s,
        calm_s=MAX_CALM_LIVES * found.full.life_s,
        num_bursts=1,
    )
    peak = plan.peak_share * found.dp_tokens
    least, most = 0, MAX_BURST
    while least < most:
        middle = (least + most) // 2
        is_enough = predicted_peak(plan, found, replace(course, burst_requests=middle)) >= peak
        least, most = (least, middle) if is_enough else (middle + 1, most)
    if least == MAX_BURST:
        raise ValueError(f"{MAX_BURST} requests in {course.burst_s:.1f} s do not fill the memory: let them be longer")
    course = replace(course, burst_requests=least)
    trace = predicted(plan, found, course)
    least_s = course.lead_s + course.burst_s + plan.least_calm_s
    period_s = _period_s(trace, course.lead_s, least_s, found.dp_tokens / plan.headroom)
    return replace(course, calm_s=period_s - course.burst_s, num_bursts=plan.num_bursts)


def predicted_peak(plan: Plan, found: Calibration, course: Course) -> float:
    """The most tokens that the first burst of a course is to come to; two lives after it, it is over."""
    brief = replace(course, num_bursts=1, calm_s=2.0 * found.full.life_s)
    return max(tokens for _, tokens in predicted(plan, found, brief))


def predicted(plan: Plan, found: Calibration, course: Course) -> list[tuple[float, float]]:
    """`demand` of a course, as far as it comes."""
    arrivals = _even(course.low_per_s, 0.0, course.end_s)
    for start_s, stop_s in course.bursts:
        arrivals += _even(course.burst_requests / (stop_s - start_s), start_s, stop_s)
    prompt_tokens = found.prompt_tokens + int(plan.engine["block_size"]) / 2
    output_tokens = plan.mean_output
    trace = demand(found, arrivals, prompt_tokens=prompt_tokens, output_tokens=output_tokens, end_s=course.end_s)
    return [(time_s, found.came * tokens) for time_s, tokens in trace]


def resident_tokens(plan: Plan, prompt_tokens: float) -> float:
    """Tokens that a request holds on average while it lives, in whole blocks."""
    return prompt_tokens + plan.mean_output / 2 + int(plan.engine["block_size"]) / 2


def demand(
    found: Calibration, arrivals: Sequence[float], *, prompt_tokens: float, output_tokens: float, end_s: float
) -> list[tuple[float, float]]:
    """(time, tokens) of equal requests where memory is no limit: all live as long as their number lets them."""
    waiting, lives, trace = sorted(arrivals, reverse=True), [], []
    time_s = 0.0
    while time_s < end_s:
        while waiting and waiting[-1] <= time_s:
            waiting.pop()
            lives.append(0.0)
        trace.append((time_s, sum(prompt_tokens + output_tokens * done for done in lives)))
        step = STEP_S / found.life_s(len(lives))
        lives = [done + step for done in lives if done + step < 1.0]
        time_s += STEP_S
    return trace


def spread(source: random.Random, per_s: float, start_s: float, stop_s: float) -> Iterator[float]:
    """Times in `[start_s, stop_s)`: one at random within each of the equal spans that the rate makes."""
    count = round(per_s * (stop_s - start_s))
    for index in range(count):
        yield start_s + (index + source.random()) * (stop_s - start_s) / count


def with_tokens(requests: Sequence[tuple[Phase, Request]], tokens_per_word: float) -> list[Request]:
    """The requests alone, with the tokens of their prompts."""
    return [replace(r, prompt_tokens=round(tokens_per_word * len(r.prompt.split()))) for _, r in requests]


def _even(per_s: float, start_s: float, stop_s: float) -> list[float]:
    count = round(per_s * (stop_s - start_s))
    return [start_s + (index + 0.5) * (stop_s - start_s) / count for index in range(count)]


def _period_s(trace: Sequence[tuple[float, float]], start_s: float, least_s: float, mean: float) -> float:
    """How long after `start_s` the mean demand since then has come down to `mean`."""
    area = 0.0
    for (time_s, tokens), (next_s, _) in pairwise(trace):
        if time_s < start_s:
            continue
        area += tokens * (next_s - time_s)
        if next_s >= least_s and area <= mean * (next_s - start_s):
            return next_s - start_s
    raise ValueError("the mean demand does not come down as far as wanted: lower low_share, or headroom")
