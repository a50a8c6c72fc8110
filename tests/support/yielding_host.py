"""`pengserve.replicas.host` in which answers of some tokens are long ones, which give way to prompts.

Where PENGSERVE_TEST_AHEAD is set, steps are scheduled ahead as well: see `tests/support/ahead_host.py`.
"""

import os
import sys
from functools import partial

from pengserve.planners.long_answers import GivingWay

RULES = GivingWay(min_tokens=10, worth=1.0, again=100.0, wait_s=0.02)


if __name__ == "__main__":
    from pengserve.replicas import host
    from pengserve.replicas.engine.lanes import lane
    from tests.support import ahead_host

    lane.LongAnswers = partial(lane.LongAnswers, rules=RULES)  # type: ignore[attr-defined,misc]
    found = ahead_host.install() if ahead_host.VARIABLE in os.environ else None
    status = host.main()
    if found is not None:
        ahead_host.write_notes(found)
    sys.exit(status)
