"""A step while it is being put together."""

from collections.abc import Collection

from pengserve.simulator.engine.queues import Entry


class Draft:
    """Who computes how much in the next step, and what was done to make room for it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # new tokens that it may still take
        self.passed: Collection[Entry] = ()  # running requests that are not in it
        self.tokens: dict[Entry, int] = {}  # new ones, in the order in which they were scheduled
        self.admitted: list[Entry] = []
        self.preempted: list[Entry] = []
        self.swapped_out = self.swapped_in = 0  # blocks

    def follow(self, before: "Draft") -> None:
        """Takes over what a draft did that had nothing to compute."""
        self.preempted = before.preempted + self.preempted
        self.swapped_out += before.swapped_out
        self.swapped_in += before.swapped_in
