"""How queued and running work becomes microbatches that take equally long (KunServe section 4.3, Figs. 10 and 11).

All work lies in one line, in the order in which it is to be served, token after token; positions count tokens:

    work    |-- a: decode --|---- b: prefill ----|-- c: prefill --|
    starts  0               1                    401              651
    parts   [0, 230)                 [230, 470)            [470, 651)

Prefill may be cut at any token, a decode only at its ends. A part is a range of the line, so chunks of one request stay
in order. A range is cut where its two sides, priced *after* the cut, cost what they should, and each side is cut again.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil

from pengserve.planners.cost_model import Chunk, CostModel
from pengserve.planners.types.errors import PlanError

SNAP = 0.01  # a cut between two requests is taken if it is off by no more than this share of the smaller side
REST = 0.1  # what would be left behind goes along if it is no more than this share of a microbatch
CLIMB = 1.02  # from one microbatch to the next; less loses more to loading weights than it saves in bubbles
FLOOR = 3.0  # microbatches that cost no more than so many times what any one costs may differ: they are small anyway
WINDOW = 16  # microbatches that a plan for the next one looks ahead
MAX_MORE = 2.0  # balance makes at most so many times the microbatches that the limits make anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Tokens of one request that could be computed now, or the part of them that a microbatch takes."""

    request_id: str
    prefix_tokens: int
    num_tokens: int
    is_prefill: bool  # may be cut; a decode may not, and needs the token before it
    since: float = 0.0  # when it became ready: its last step came back, or it arrived. Any clock or counter

    @property
    def chunk(self) -> Chunk:
        """What a cost model prices."""
        return Chunk(prefix_tokens=self.prefix_tokens, num_tokens=self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchLimits:
    """What a microbatch can hold. A decode of more than `max_tokens` is alone in its own."""

    max_tokens: int
    max_requests: int
    min_tokens: int = 1  # no microbatch is made smaller than this for the sake of balance (Fig. 11, lines 4-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Work that enters the pipeline together."""

    work: tuple[Work, ...]
    cost_s: float  # of the whole model, with loading its weights

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return sum(work.num_tokens for work in self.work)


def form_microbatches(
    work: Sequence[Work], model: CostModel, limits: MicrobatchLimits, num_microbatches: int | None = None
) -> tuple[Microbatch, ...]:
    """All of `work` as microbatches of about equal cost, in the order of `work`.

    Args:
        num_microbatches: at least so many, as far as each can have `limits.min_tokens`; None: as many as can.
    """
    line = _Line(work, model)
    most = max(1, line.stop // limits.min_tokens)
    wished = most if num_microbatches is None else min(num_microbatches, most)
    return line.microbatches(list(_parts(line, limits, wished)))


def form_by_tokens(work: Sequence[Work], model: CostModel, limits: MicrobatchLimits) -> tuple[Microbatch, ...]:
    """The baseline: each microbatch takes tokens up to the limit, as Sarathi-Serve and vLLM do. `model` only prices."""
    line = _Line(work, model)
    parts = []
    start = 0
    while start < line.stop:
        stop = line.fill(start, limits)
        parts.append((start, stop))
        start = stop
    return line.microbatches(parts)


def next_budget(
    ready: Sequence[Work],
    in_flight_s: Sequence[float],
    model: CostModel,
    limits: MicrobatchLimits,
    *,
    max_in_flight: int,
) -> Mapping[str, int]:
    """What enters a pipeline next: `{request id: new tokens}`, decodes first, the longest ready before all.

    It costs the mean of all that is ready and in flight, over as many microbatches as the limits ask for and at least
    `max_in_flight`; but where it is not small, hardly more than the dearest in flight: every jump costs a bubble. So a
    long queue gives microbatches alike, what is left of it is shared out among the stages, and prompts that come while
    all decode are computed bit by bit beside them.

    Args:
        ready: work of requests that run or may begin, without those of which a token is on its way. The rest of a
            prompt is ready while its first chunks are in flight.
        in_flight_s: `Microbatch.cost_s` of those that have not come back.
        max_in_flight: how many may be in the pipeline at once (`stages.microbatches_in_flight`).
    """
    if not ready:
        return {}
    line = _Line(_window(sorted(ready, key=lambda work: (work.is_prefill, work.since)), limits), model)
    # A stage without work is worse than a small microbatch of decodes, which come back again and again.
    most = max(sum(not work.is_prefill for work in ready), line.stop // limits.min_tokens)
    num_parts = len(_equal_parts(line, limits, min(max_in_flight - len(in_flight_s), most))) - 1
    ready_s, flight_s = line.cost_s(0, line.stop), [cost_s - model.load_s for cost_s in in_flight_s]
    target_s = (ready_s + sum(flight_s)) / (num_parts + len(flight_s))
    if flight_s:
        target_s = min(target_s, max(CLIMB * max(flight_s), FLOOR * model.load_s))
    stop = line.stop if ready_s <= (1.0 + REST) * target_s else line.reach(target_s)
    return {part.request_id: part.num_tokens for part in line.work(0, min(stop, line.fill(0, limits)))}


def chunks_within(work: Iterable[Work], budget: Mapping[str, int]) -> list[Chunk]:
    """What `budget` has of `work`, as a cost model prices it."""
    return [
        Chunk(prefix_tokens=item.prefix_tokens, num_tokens=budget[item.request_id])
        for item in work
        if item.request_id in budget
    ]


def next_by_tokens(ready: Sequence[Work], model: CostModel, limits: MicrobatchLimits) -> Mapping[str, int]:
    """The baseline of `next_budget`: all that is ready, up to the limit."""
    line = _Line(sorted(ready, key=lambda work: (work.is_prefill, work.since)), model)
    return {part.request_id: part.num_tokens for part in line.work(0, line.fill(0, limits))} if ready else {}


class _Line:
    """All work, token after token; `[start, stop)` are positions. Costs leave out what a batch costs by itself."""

    def __init__(self, work: Sequence[Work], model: CostModel) -> None:
        if any(item.num_tokens < 1 or item.prefix_tokens < 0 for item in work):
            raise PlanError("work without a token cannot be put into a microbatch: leave it out")
        self._items, self._model = work, model
        self._starts = list(accumulate((item.num_tokens for item in work), initial=0))
        costs_s = (model.tokens_s(item.prefix_tokens, item.num_tokens) for item in work)
        self._costs_s = list(accumulate(costs_s, initial=0.0))  # of all items before

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self._starts[-1]

    def cost_s(self, start: int, stop: int) -> float:
        """Seconds of the chunks in `[start, stop)`."""
        if start >= stop:
            return 0.0
        first, last = self._item(start), self._item(stop - 1)
        if first == last:
            return self._chunk_s(first, start, stop)
        head_s = self._chunk_s(first, start, self._starts[first + 1])
        tail_s = self._chunk_s(last, self._starts[last], stop)
        return head_s + self._costs_s[last] - self._costs_s[first + 1] + tail_s

    def num_requests(self, start: int, stop: int) -> int:
        """Requests that have a token in `[start, stop)`."""
        return self._item(stop - 1) - self._item(start) + 1

    def work(self, start: int, stop: int) -> Iterator[Work]:
        """What lies in `[start, stop)`."""
        for index in range(self._item(start), self._item(stop - 1) + 1):
            item, begin, end = self._items[index], self._starts[index], self._starts[index + 1]
            if start <= begin and end <= stop:
                yield item
                continue
            begin, end = max(start, begin), min(stop, end)
            prefix = item.prefix_tokens + begin - self._starts[index]
            yield replace(item, prefix_tokens=prefix, num_tokens=end - begin)

    def microbatches(self, parts: Sequence[tuple[int, int]]) -> tuple[Microbatch, ...]:
        """The microbatches of these ranges."""
        return tuple(
            Microbatch(work=tuple(self.work(start, stop)), cost_s=self._model.load_s + self.cost_s(start, stop))
            for start, stop in parts
        )

    def fill(self, start: int, limits: MicrobatchLimits) -> int:
        """The longest range from `start` that the limits allow; its stop. At least one token, or one decode."""
        first = self._item(start)
        after = min(first + limits.max_requests, len(self._items))
        stop = min(start + limits.max_tokens, self._starts[after])
        last = self._item(stop - 1)
        if stop < self._starts[last + 1] and not self._items[last].is_prefill:
            return self._starts[last] if last > first else self._starts[last + 1]
        return stop

    def reach(self, target_s: float) -> int:
        """The first position before which work costs `target_s`, or all."""
        index = bisect_left(self._costs_s, (1.0 - SNAP) * target_s)
        if index == len(self._costs_s):
            return self.stop
        left, right = self._starts[index - 1], self._starts[index]
        if not self._items[index - 1].is_prefill or self._costs_s[index] <= (1.0 + SNAP) * target_s:
            return right
        exact = left + 1 + bisect_left(range(left + 1, right), target_s, key=lambda position: self.cost_s(0, position))
        return min(
            self._tile_ends(left, exact, right),
            key=lambda position: (
                abs(self.cost_s(0, position) - target_s) + self._cut_s(index - 1, left, position, right)
            ),
        )

    def cut(self, start: int, stop: int, share: float) -> int | None:
        """Where `[start, stop)` falls into two whose costs are as `share` to `1 - share`; None: nowhere inside."""

        # Between items it is `costs_s[i]` less a constant, so that the item in which it passes 0 is found at once.
        first, last, costs_s = self._item(start), self._item(stop - 1), self._costs_s
        before_s = costs_s[first + 1] - self._chunk_s(first, start, min(stop, self._starts[first + 1]))
        after_s = costs_s[last] + self._chunk_s(last, max(start, self._starts[last]), stop)
        index = bisect_left(costs_s, (1.0 - share) * before_s + share * after_s, first + 1, last + 1) - 1
        left, right = max(start, self._starts[index]), min(stop, self._starts[index + 1])  # of the item that is cut
        left_s, right_s = self.cost_s(start, left), self.cost_s(right, stop)  # of what lies on its sides
        prefix, tokens_s = self._items[index].prefix_tokens - self._starts[index], self._model.tokens_s

        def excess_s(position: int) -> float:
            inner_s = tokens_s(prefix + left, position - left) if position > left else 0.0
            outer_s = tokens_s(prefix + position, right - position) if position < right else 0.0
            return (1.0 - share) * (left_s + inner_s) - share * (outer_s + right_s)

        found = [position for position in (left, right) if start < position < stop]
        near_s = SNAP * min(share, 1.0 - share) * (after_s - before_s)
        if self._items[index].is_prefill and all(abs(excess_s(position)) > near_s for position in found):
            inner = left + 1 + bisect_left(range(left + 1, right), 0.0, key=excess_s)
            inside = [position for position in (inner - 1, inner) if left < position < right]
            found += {end: None for position in inside for end in self._tile_ends(left, position, right)}  # each once

        def loss_s(position: int) -> float:
            more_s = self._cut_s(index, left, position, right) if left < position < right else 0.0
            return abs(excess_s(position)) + min(share, 1.0 - share) * more_s

        return min(found, key=loss_s, default=None)

    def _tile_ends(self, left: int, position: int, right: int) -> list[int]:
        """`position` and those next to it, inside of `(left, right)`, where a chunk from `left` fills its tiles."""
        tile = self._model.tile_tokens
        filled = left + (position - left) // tile * tile
        return [position, *(end for end in (filled, filled + tile) if left < end < right and end != position)]

    def _cut_s(self, index: int, left: int, position: int, right: int) -> float:
        """What it costs that the tokens `[left, right)` of an item are cut at `position`."""
        inner_s, outer_s = self._chunk_s(index, left, position), self._chunk_s(index, position, right)
        return inner_s + outer_s - self._chunk_s(index, left, right)

    def _item(self, position: int) -> int:
        return bisect_right(self._starts, position) - 1

    def _chunk_s(self, index: int, start: int, stop: int) -> float:
        skipped = start - self._starts[index]
        return self._model.tokens_s(self._items[index].prefix_tokens + skipped, stop - start)


def _window(work: Sequence[Work], limits: MicrobatchLimits) -> Sequence[Work]:
    """The first of `work`: what fills `WINDOW` microbatches, or all. Plans change before more of it is reached."""
    tokens = accumulate(item.num_tokens for item in work)
    enough = bisect_left(list(tokens), WINDOW * limits.max_tokens) + 1
    return work[: min(enough, WINDOW * limits.max_requests)]


def _parts(line: _Line, limits: MicrobatchLimits, wished: int) -> Iterator[tuple[int, int]]:
    """The line as ranges of about equal cost, `wished` or more. What is beyond the limits all the same is halved until
    it is within them, or cannot be cut."""
    ranges = list(pairwise(_equal_parts(line, limits, wished)))[::-1] if line.stop else []
    while ranges:
        start, stop = ranges.pop()
        cut = line.cut(start, stop, 0.5) if _fullness(line, limits, start, stop) > 1.0 else None
        if cut is None:
            yield start, stop
        else:
            ranges += [(cut, stop), (start, cut)]


def _equal_parts(line: _Line, limits: MicrobatchLimits, wished: int) -> list[int]:
    """The ends of parts of equal cost: the least number that is at least `wished` and keeps each within the limits.

    Where requests differ much, cheap tokens fill a microbatch up to its limit before it costs its share. Then all are
    made smaller, though not beyond `MAX_MORE` and `min_tokens`.
    """
    num_parts = max(1, wished, ceil(_fullness(line, limits, 0, line.stop)))
    most = max(num_parts, min(int(MAX_MORE * num_parts), line.stop // limits.min_tokens))
    while True:
        ends = [0, *_cuts(line, 0, line.stop, num_parts), line.stop]
        fullest = max(_fullness(line, limits, start, stop) for start, stop in pairwise(ends))
        if fullest <= 1.0 or num_parts == most:
            return ends
        num_parts = min(most, max(num_parts + 1, ceil(num_parts * fullest)))


def _fullness(line: _Line, limits: MicrobatchLimits, start: int, stop: int) -> float:
    """How many times as much as a microbatch can hold lies in `[start, stop)`."""
    return max((stop - start) / limits.max_tokens, line.num_requests(start, stop) / limits.max_requests)


def _cuts(line: _Line, start: int, stop: int, num_parts: int) -> Iterator[int]:
    """Where `[start, stop)` is cut into at most `num_parts` of equal cost: divide and conquer (Fig. 11)."""
    left = num_parts // 2
    cut = line.cut(start, stop, left / num_parts) if left else None
    if cut is not None:
        yield from _cuts(line, start, cut, left)
        yield cut
        yield from _cuts(line, cut, stop, num_parts - left)
