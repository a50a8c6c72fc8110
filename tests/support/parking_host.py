"""`pengserve.replicas.host`, an instance as a process, whose requests are parked, placed and resumed as a file says.

That happens at step boundaries. PENGSERVE_TEST_PARKS names the file; where it holds

    nothing    requests are parked, placed and resumed at random
    hold       the first two requests that decode here are parked
    resume     what orders have parked goes on, and nothing else is parked
    break      the next copy between device and host fails

Where there is no file that is so too: a request may have come here parked, with a change of the layout.
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
MOST_HELD = 2


class Disorder:
    """Orders of one instance, one at a time."""

    def __init__(self, lanes: Any, chance: random.Random) -> None:
        self._lanes, self._chance = lanes, chance
        self._parked: set[str] = set()

    def obey(self, text: str | None) -> None:
        """In the step thread. `text` is what the file holds; None: there is none."""
        if text == "hold":
            self._hold()
        elif text == "break":
            if (tiers := self._lanes.dp.tiers) is not None:
                tiers.engine._move_piece = _fail
        elif text in ("resume", None):
            residencies = self._lanes._residencies()
            self._lanes.resume([request_id for residency in residencies for request_id in sorted(residency._ordered)])
            self._parked.clear()
        else:
            self.order()

    def _hold(self) -> None:
        decoding = [r.request_id for r in self._lanes.current.scheduler.running if r.num_output_tokens > 2]
        new = [request_id for request_id in decoding if request_id not in self._parked]
        self._parked.update(self._lanes.park(new[: MOST_HELD - len(self._parked)]))

    def order(self) -> None:
        """Orders at random."""
        lanes, chance = self._lanes, self._chance
        if self._parked and (len(self._parked) >= MOST_PARKED or chance.random() < 0.4):
            resumed = chance.choice(sorted(self._parked))
            lanes.resume([resumed])
            self._parked.remove(resumed)
            return
        lane = lanes.current
        if not lane.scheduler.running:
            return
        request_id = chance.choice(lane.scheduler.running).request_id
        if chance.random() < 0.6:
            self._parked.update(lanes.park([request_id]))
        else:
            every, num_layers = chance.choice([1, 2, 3]), lanes.dp.tiers.pool.num_layers
            lanes.place(request_id, range(0, num_layers, every))


def _fail(copy: Any) -> None:
    raise OSError("a fault of the test")


def disturb(instance: Any, lanes: Any) -> None:
    """Begins a thread that gives orders, where there is a host tier."""
    file, disorder = Path(os.environ[VARIABLE]), Disorder(lanes, random.Random(os.getpid()))

    def run() -> None:
        while True:
            time.sleep(PERIOD_S)
            text = file.read_text() if file.exists() else None
            instance._loop.submit(lambda text=text: disorder.obey(text))

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
