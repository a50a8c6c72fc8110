"""Places in a switch or a migration where a test makes this process die or fall silent. Elsewhere they do nothing.

PENGSERVE_TEST_FAILPOINT names a file. While it holds "wave:kill", the process ends with SIGKILL where it comes to
`reached("wave")`; with "wave:stall:2" it sleeps there for two seconds. The file is removed first: each fires once.

    prepared    a member has taken note of a plan
    begun       the leader has been told to commit
    draining    a member waits for running requests to end
    returning   weights are about to come back beside the steps (restore)
    meeting     the leader has asked the others to stop; another one is about to
    met         a follower has said what it brings
    wave        KV is about to move
    waved       KV has moved; no ingress and no scheduler has been told
    committing  the leader is about to say Commit
    committed   the leader has said it, or a follower has heard it; the shape has not changed

Places in a migration:

    offered     the source has offered a request
    reserved    the target has room for it, and has not said so
    copying     the source has begun to send its blocks
    tail        the source is about to send the last ones
    held        the source has told the target to go on with the request
    tail-came   the target has heard that
    taken       the target has said that it goes on with the request

Where source or target is a group, at its members that do not lead:

    sharing       a member of the source is about to send its share of a copy
    sharing-last  ... of the last one
    expecting     a member of the target has heard of a copy
"""

import os
import signal
import time
from pathlib import Path

_PATH = os.environ.get("PENGSERVE_TEST_FAILPOINT", "")


def reached(name: str) -> None:
    """Does what a test asks for at this place. Only switches and migrations call this; ordinary steps do not."""
    if _PATH:
        _obey(name, Path(_PATH))


def _obey(name: str, path: Path) -> None:
    try:
        where, _, what = path.read_text().partition(":")
    except FileNotFoundError:
        return
    if where != name:
        return
    path.unlink()
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(what.removeprefix("stall:")))
