"""How many tokens an answer will have, learned from answers that ended (the multi-class prediction of LayerKV 3.1).

Plain counts: for each kind of request a histogram of lengths in classes that grow by a fixed ratio. A prediction is
made from the answers of that kind that were longer than what the request has made already: a low percentile of them is
the conservative bound, and their median the rough estimate. Old answers are forgotten, so that it follows the traffic.

A kind is the request's class and the size of its prompt. Where too few answers of it are known those of the class
count, and then all. No text is looked at.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

RATIO = 1.25  # of the bounds of two neighbouring classes of length
MAX_LENGTH = 1 << 20
NUM_CLASSES = math.ceil(math.log(MAX_LENGTH, RATIO)) + 1
LOW = 0.25  # share of answers that are shorter than the conservative bound
MIN_ANSWERS = 8  # of a kind, from which it is believed in
MEMORY = 512.0  # answers: the weight of one falls to 1/e after so many more of its kind
MAX_KINDS = 256

Kind = tuple[str, int]  # (service class, size of the prompt); -1: any


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRange:
    """What is predicted for one answer; tokens in all."""

    low: int
    median: int


def length_class(num_tokens: int) -> int:
    """The class of a length: the next one begins `RATIO` times further on."""
    return min(NUM_CLASSES - 1, int(math.log(max(1, num_tokens), RATIO) + 1e-9))


def lower_bound(index: int) -> int:
    """The shortest length of a class."""
    return math.ceil(RATIO**index - 1e-9)


class LengthPredictor:
    """Learns and predicts. A few hundred kinds of requests at most."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Kind, list[float]] = OrderedDict()

    def learn(self, service_class: str, prompt_tokens: int, output_tokens: int) -> None:
        """An answer ended by itself."""
        index = length_class(output_tokens)
        for kind in _kinds(service_class, prompt_tokens):
            counts = self._counts.setdefault(kind, [0.0] * NUM_CLASSES)
            self._counts.move_to_end(kind)
            total = sum(counts)
            if total > MEMORY:
                keep = MEMORY / total
                counts[:] = [count * keep for count in counts]
            counts[index] += 1.0
        while len(self._counts) > MAX_KINDS:
            self._counts.popitem(last=False)

    def predict(self, service_class: str, prompt_tokens: int, past_tokens: int, max_tokens: int) -> LengthRange:
        """How long the answer will be in all, which has `past_tokens` now and may have `max_tokens`.

        Where nothing is known it ends with the next token: that promises least.
        """
        least = past_tokens + 1
        for kind in _kinds(service_class, prompt_tokens):
            counts = self._counts.get(kind)
            if counts is None:
                continue
            first = length_class(least)
            if sum(counts[first:]) >= MIN_ANSWERS:
                low, median = (_quantile(counts, first, share) for share in (LOW, 0.5))
                most = max(least, max_tokens)
                return LengthRange(low=min(most, max(least, low)), median=min(most, max(least, median)))
        return LengthRange(low=least, median=least)


def _kinds(service_class: str, prompt_tokens: int) -> tuple[Kind, ...]:
    """Kinds that a request is of, the narrowest first."""
    return (service_class, length_class(prompt_tokens) // 4), (service_class, -1), ("", -1)


def _quantile(counts: list[float], first: int, share: float) -> int:
    """The lower bound of the class in which so much of what is from class `first` on has been counted."""
    wanted, seen = share * sum(counts[first:]), 0.0
    for index in range(first, NUM_CLASSES):
        seen += counts[index]
        if counts[index] and seen >= wanted:
            return lower_bound(index)
    return lower_bound(NUM_CLASSES - 1)
