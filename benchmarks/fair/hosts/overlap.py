"""Copies go beside the steps, block by block, and all of it each time."""

import sys

from benchmarks.fair.hosts.parts import run

if __name__ == "__main__":
    sys.exit(run(is_async=True, runs=False, reuse=False))
