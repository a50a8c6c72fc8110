"""PengServe as it is: its times are counted."""

import sys

from benchmarks.fair.hosts.parts import run

if __name__ == "__main__":
    sys.exit(run(is_async=True, runs=True, reuse=True))
