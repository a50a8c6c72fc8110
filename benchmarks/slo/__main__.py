"""`python -m benchmarks.slo`, from the root of the repository."""

import sys

from benchmarks.engine_runs import run_engines
from benchmarks.slo import report
from benchmarks.slo.measure import Plan, measure
from tests.support.models import deep_model

if __name__ == "__main__":
    sys.exit(
        run_engines("slo", __doc__, rounds=2, make_plan=Plan, measure=measure, report=report, make_model=deep_model)
    )
