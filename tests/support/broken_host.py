"""`pengserve.replicas.host`, an instance as a process, in which functions raise what a test asks for.

PENGSERVE_TEST_FAULTS names them, by semicolons:
"pengserve.replicas.engine.groups.tp_lane:TpLane.__init__=RuntimeError@0": the first call raises, and each
after it; with "@2" the third and each after it.
"""

import builtins
import importlib
import itertools
import os
import sys
from typing import Any

from pengserve.replicas import host
from pengserve.replicas.instance import Instance

VARIABLE = "PENGSERVE_TEST_FAULTS"
MESSAGE = "a fault of the test\nwith a second line"


def break_functions(faults: str) -> None:
    """Puts functions that raise in place of those named."""
    for fault in faults.split(";"):
        where, _, what = fault.partition("=")
        module_name, _, path = where.partition(":")
        name, _, after = what.partition("@")
        owner: Any = importlib.import_module(module_name)
        *owners, attribute = path.split(".")
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, attribute, _raising(getattr(owner, attribute), getattr(builtins, name), int(after or 0)))


def _raising(function: Any, error: type[Exception], after: int) -> Any:
    calls = itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= after:
            raise error(MESSAGE)
        return function(*args, **kwargs)

    return call


if __name__ == "__main__":
    build = Instance._build_lanes

    def build_broken(self: Instance) -> Any:
        break_functions(os.environ[VARIABLE])  # here, and not before: vLLM is imported with the instance's variables
        return build(self)

    Instance._build_lanes = build_broken
    sys.exit(host.main())
