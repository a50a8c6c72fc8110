"""vLLM 0.x, FastSwitch's baseline: block by block, while a step waits, and all of it each time."""

import sys

from benchmarks.fair.hosts.parts import run

if __name__ == "__main__":
    sys.exit(run(is_async=False, runs=False, reuse=False))
