"""The one right answer of each request, which every instance of one configuration gives."""

from collections import Counter
from collections.abc import Callable, Sequence

from pengserve.planners.types.ids import InstanceKey


def number_of(wire_id: str) -> int:
    """The request that a wire id is a copy of."""
    return int(wire_id[1:].split("~")[0])


class Answers:
    """What instances compute."""

    def __init__(self, lengths: Sequence[int], poison: Sequence[int], broken: Callable[[str], None]) -> None:
        """`broken` is called with the sentence of a law that does not hold."""
        self._lengths, self._poison, self.broken = tuple(lengths), frozenset(poison), broken
        self.deaths: dict[int, list[InstanceKey]] = {}  # by poisonous request
        self.company: Counter[int] = Counter()  # requests that died with it, by poisonous request
        self.num_other_deaths = 0  # of instances that served

    def length(self, number: int) -> int:
        """Tokens of an answer."""
        return self._lengths[number]

    def next(self, number: int, num_tokens: int) -> tuple[int, bool]:
        """The token after `num_tokens`, and whether it is the last."""
        length = self._lengths[number]
        if num_tokens >= length:
            self.broken(f"request {number} was sent again when its answer was whole")
        return 1000 * number + num_tokens, num_tokens + 1 >= length

    def check(self, number: int, tokens: Sequence[int], where: str) -> None:
        """The tokens of a stream are a prefix of the right answer."""
        if len(tokens) > self._lengths[number] or list(tokens) != [1000 * number + i for i in range(len(tokens))]:
            self.broken(f"{where}: {list(tokens)} is no prefix of the answer of request {number}")

    def is_poison(self, number: int) -> bool:
        """Whether the request kills its instances."""
        return number in self._poison

    def killed(self, number: int, key: InstanceKey, num_others: int) -> None:
        """A poisonous request has ended an instance that ran so many others."""
        self.deaths.setdefault(number, []).append(key)
        self.company[number] += num_others
