"""The table of what dies names constants with their values, and tests that exist."""

import re
from pathlib import Path

from pengserve.cluster.app import HEALTH_TIMEOUT_S
from pengserve.cluster.ingress.in_flight.records import SUPERSEDED_WAIT_S
from pengserve.cluster.ingress.routing.ray_source import ANSWER_TIMEOUT_S
from pengserve.cluster.settings import Settings
from pengserve.controller.rollover import HANDOVER_S
from pengserve.planners.types.snapshot import STEP_GRACE_S
from pengserve.replicas.channel.door import MAX_PAUSE_S, MAX_WAITING, MAX_WAITING_PER_SOURCE
from pengserve.replicas.channel.handshake import HANDSHAKE_TIMEOUT_S
from pengserve.replicas.channel.server import SILENT_S
from pengserve.replicas.ending import EXIT_MARGIN_S
from pengserve.replicas.instance import SEND_AGAIN_S
from pengserve.replicas.lease import MAX_UNANSWERED
from pengserve.replicas.step_watch import FIRST_S, LEAST_S

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "what-dies.md").read_text()

SETTINGS = Settings(model="m")
SECONDS = {
    "ANSWER_TIMEOUT_S": ANSWER_TIMEOUT_S,
    "EXIT_MARGIN_S": EXIT_MARGIN_S,
    "FIRST_S": FIRST_S,
    "HANDSHAKE_TIMEOUT_S": HANDSHAKE_TIMEOUT_S,
    "HEALTH_TIMEOUT_S": HEALTH_TIMEOUT_S,
    "LEAST_S": LEAST_S,
    "MAX_PAUSE_S": MAX_PAUSE_S,
    "SEND_AGAIN_S": SEND_AGAIN_S,
    "SILENT_S": SILENT_S,
    "STEP_GRACE_S": STEP_GRACE_S,
    "SUPERSEDED_WAIT_S": SUPERSEDED_WAIT_S,
}
BRACKETED = re.compile(r"(\d+) s[^|;()]* \(`([A-Z_]+)`\)")  # "after 10 s (`SILENT_S`)"
NAMED_FIRST = re.compile(r"`(?:[a-z]+\.)?([a-z_]+)` \((\d+) s\)")  # "`lost_after_s` (10 s)"


def test_constants_have_the_values_that_it_says() -> None:
    said = {(name, float(value)) for value, name in BRACKETED.findall(TEXT)}
    assert said == set(SECONDS.items())
    assert f"{HANDOVER_S + SETTINGS.controller.drain_timeout_s:.0f} s at most (`HANDOVER_S` {HANDOVER_S:.0f} s" in TEXT
    assert f"{MAX_WAITING} in all (`MAX_WAITING`) and {MAX_WAITING_PER_SOURCE} an address" in TEXT
    assert MAX_UNANSWERED == 10 and "ten leases in a row (`MAX_UNANSWERED`)" in TEXT


def test_settings_have_the_defaults_that_it_says() -> None:
    defaults = SETTINGS.controller.model_dump() | SETTINGS.instances.model_dump() | SETTINGS.shape.model_dump()
    found = NAMED_FIRST.findall(TEXT)
    assert {name for name, _ in found} >= {"lost_after_s", "lease_s", "peer_timeout_s", "drain_timeout_s"}
    assert [(name, value) for name, value in found if defaults[name] != float(value)] == []


def test_the_tests_that_it_names_exist() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", TEXT))
    assert named and [name for name in sorted(named) if not (ROOT / name).is_file()] == []
