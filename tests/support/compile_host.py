"""`pengserve.replicas.host`, an instance as a process that notes how much has been compiled by when.

Each note is a JSON line in a file of this process in the folder that PENGSERVE_TEST_COMPILED names.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pengserve.replicas import host
from pengserve.replicas.instance import Instance

VARIABLE = "PENGSERVE_TEST_COMPILED"


def num_compiled() -> int:
    """Graphs that were compiled in this process, or loaded from vLLM's cache of compiled graphs."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]) + num_loaded()


def num_loaded() -> int:
    """Compiled models that were loaded from vLLM's cache."""
    from vllm.compilation.counter import compilation_counter

    return int(compilation_counter.num_aot_artifacts_loaded)


def note(what: str, lane: str = "", num_replayed: int = 0) -> None:
    """Adds a line to this process's file."""
    found = {
        "what": what,
        "lane": lane,
        "count": num_compiled(),
        "num_loaded": num_loaded(),
        "num_replayed": num_replayed,
    }
    with (Path(os.environ[VARIABLE]) / str(os.getpid())).open("a") as file:
        file.write(json.dumps(found) + "\n")


def notes_of(folder: Path, pid: int) -> list[dict[str, Any]]:
    """What a process has noted."""
    return [json.loads(line) for line in (folder / str(pid)).read_text().splitlines()]


def install(num_replayed: Callable[[], int] = lambda: 0) -> None:
    """Begins to take notes: when the instance is ready, when a lane was left, and when it was built again."""
    build, ready = Instance._build_lanes, Instance._ready

    def build_noting(self: Instance) -> Any:
        from pengserve.replicas.engine.groups.group_lane import GroupLane
        from pengserve.replicas.engine.lane_registry import LaneRegistry

        leave, rebuild = GroupLane.leave, LaneRegistry.rebuild

        def leave_noting(lane: GroupLane) -> None:
            note("left", lane.shape, num_replayed())
            leave(lane)

        def rebuild_noting(registry: LaneRegistry, lane: GroupLane) -> None:
            rebuild(registry, lane)
            note("rebuilt", lane.shape, num_replayed())

        GroupLane.leave, LaneRegistry.rebuild = leave_noting, rebuild_noting  # type: ignore[method-assign]
        return build(self)

    def ready_noting(self: Instance, lanes: Any) -> None:
        note("ready", num_replayed=num_replayed())
        ready(self, lanes)

    Instance._build_lanes, Instance._ready = build_noting, ready_noting  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    sys.exit(host.main())
