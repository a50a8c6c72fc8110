"""Copies go beside the steps, in runs of neighbours, and all of it each time."""

import sys

from benchmarks.fair.hosts.parts import run

if __name__ == "__main__":
    sys.exit(run(is_async=True, runs=True, reuse=False))
