"""Each request of a run as its client saw it: what a simulation of the run replays, and is compared with."""

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.figures import complete, longest_gap_s
from benchmarks.sse import Answer

SIMULATED = ("vllm-dp", "dp", "drop")  # systems whose runs are compared with simulations of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One complete answer. Times are seconds since the load began."""

    at_s: float  # when it was sent
    prompt_tokens: int
    output_tokens: int
    first_s: float  # when its first text came
    end_s: float
    longest_gap_s: float = 0.0  # between two of its texts; 0 also in results from before 2026-11-23


def records(answers: Iterable[Answer], start_s: float) -> tuple[Record, ...]:
    """By the time they were sent."""
    found = [
        Record(
            at_s=round(answer.sent_s - start_s, 6),
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            first_s=round(answer.first_text_s - start_s, 6),
            end_s=round(answer.event_times_s[-1] - start_s, 6),
            longest_gap_s=round(longest_gap_s(answer), 6),
        )
        for answer in complete(answers)
    ]
    return tuple(sorted(found, key=lambda record: record.at_s))
