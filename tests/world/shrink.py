"""Delta debugging: the few faults of a failing world that it takes to break a law."""

from collections.abc import Callable, Sequence


def shrink(items: Sequence[int], fails: Callable[[list[int]], bool]) -> list[int]:
    """A part of `items` with which `fails` still holds, and without any one of which it does not (Zeller's ddmin)."""
    kept, num_parts = list(items), 2
    while len(kept) > 1:
        size = -(-len(kept) // num_parts)
        parts = [kept[start : start + size] for start in range(0, len(kept), size)]
        smaller = next((rest for part in parts if fails(rest := [i for i in kept if i not in part])), None)
        if smaller is not None:
            kept, num_parts = smaller, max(num_parts - 1, 2)
        elif size == 1:
            return kept
        else:
            num_parts = min(2 * num_parts, len(kept))
    return [] if kept and fails([]) else kept
