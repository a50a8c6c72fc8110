"""`python -m benchmarks.tiers`, from the root of the repository."""

import sys

from benchmarks.engine_runs import run_engines
from benchmarks.tiers import report
from benchmarks.tiers.measure import Plan, measure

if __name__ == "__main__":
    sys.exit(run_engines("tiers", __doc__, rounds=3, make_plan=Plan, measure=measure, report=report))
