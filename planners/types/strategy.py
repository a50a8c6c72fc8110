"""How a switch treats running requests. `pengserve --help` names the strategies, so this imports nothing else."""

from enum import StrEnum


class SwitchStrategy(StrEnum):
    """What becomes of the requests that run while a switch happens (Flying Serving section 5.2; `carry` is ours).

    On a merge they are in `dp` lanes, on a split in the `tp` lane.
    """

    SEQUENTIAL = "sequential"  # they finish first; new ones wait for the new shape
    SOFT = "soft"  # as sequential, but idle members run the waiting ones in dp meanwhile, and recompute them in tp
    HARD = "hard"  # a merge pauses them in their dp lanes, KV in place; a split hands them on as carry does
    CARRY = "carry"  # their KV is re-sharded by head, and they go on in the new shape
