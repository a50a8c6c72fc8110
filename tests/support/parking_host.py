"""`pengserve.replicas.host`, an instance as a process, whose requests are parked, placed and resumed at random.

That happens at step boundaries while the file exists that PENGSERVE_TEST_PARKS names.
"""

import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pengserve.replicas import host
from pengserve.replicas.instance import Instance

VARIABLE = "PENGSERVE_TEST_PARKS"
PERIOD_S = 0.02
MOST_PARKED = 3


class Disorder:
    """Orders of one instance, one at a time."""

    def __init__(self, lanes: Any, chance: random.Random) -> None:
        self._lanes, self._chance = lanes, chance
        self._parked: set[str] = set()

    def order(self, is_wanted: bool) -> None:
        """In the step thread."""
        lanes, chance = self._lanes, self._chance
        if self._parked and (not is_wanted or len(self._parked) >= MOST_PARKED or chance.random() < 0.4):
            resumed = sorted(self._parked) if not is_wanted else [chance.choice(sorted(self._parked))]
            lanes.resume(resumed)
            self._parked.difference_update(resumed)
            return
        lane = lanes.current
        if not is_wanted or not lane.scheduler.running:
            return
        request_id = chance.choice(lane.scheduler.running).request_id
        if chance.random() < 0.6:
            self._parked.update(lanes.park([request_id]))
        else:
            every, num_layers = chance.choice([1, 2, 3]), lanes.dp.tiers.pool.num_layers
            lanes.place(request_id, range(0, num_layers, every))


def disturb(instance: Any, lanes: Any) -> None:
    """Begins a thread that gives orders, where there is a host tier."""
    file, disorder = Path(os.environ[VARIABLE]), Disorder(lanes, random.Random(os.getpid()))

    def run() -> None:
        while True:
            time.sleep(PERIOD_S)
            is_wanted = file.exists()
            instance._loop.submit(lambda is_wanted=is_wanted: disorder.order(is_wanted))

    if lanes.dp.residency is not None:
        threading.Thread(target=run, daemon=True).start()


if __name__ == "__main__":
    build = Instance._build_lanes

    def build_disturbed(self: Instance) -> Any:
        lanes = build(self)
        disturb(self, lanes)
        return lanes

    Instance._build_lanes = build_disturbed  # type: ignore[method-assign]
    sys.exit(host.main())
