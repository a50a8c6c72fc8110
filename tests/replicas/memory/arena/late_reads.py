"""Reads what has no memory, each in a child process, and prints the signals that ended them. Run with `python -m`.

A process of its own, because a child of the test process would have the locks of its threads.
"""

import json
import os
import resource
import sys

import torch

from pengserve.replicas.memory.arena.arena import Arena, Region
from pengserve.replicas.memory.arena.open import open_arena

CHUNK = 64 << 10


def never_mapped(arena: Arena, region: Region) -> None:
    pass


def mapped(arena: Arena, region: Region) -> None:
    arena.map(region, 0, 2)


def unmapped(arena: Arena, region: Region) -> None:
    arena.map(region, 0, 2)
    arena.unmap(region, 1, 2)


def moved_away(arena: Arena, region: Region) -> None:
    arena.map(region, 0, 2)
    arena.move(region, (1, 2), region, 3)


def moved_back(arena: Arena, region: Region) -> None:
    moved_away(arena, region)
    arena.move(region, (3, 4), region, 1)


def closed(arena: Arena, region: Region) -> None:
    arena.map(region, 0, 2)
    arena.close()


def main() -> None:
    """Prints `{case: signal}`; 0 where the read went well."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signals: dict[str, int] = {}
    for prepare in (never_mapped, mapped, unmapped, moved_away, moved_back, closed):
        arena = open_arena(torch.device("cpu"), 4 * CHUNK, CHUNK)
        region = arena.reserve(4 * CHUNK, "r")
        tensor = region.tensor(torch.uint8)
        prepare(arena, region)
        child = os.fork()
        if child == 0:
            tensor[CHUNK].item()
            os._exit(0)
        signals[prepare.__name__] = os.WTERMSIG(os.waitpid(child, 0)[1])
    sys.stdout.write(json.dumps(signals))


if __name__ == "__main__":
    main()
