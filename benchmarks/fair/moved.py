"""What an instance with a host tier moved, and what that took of its steps."""

import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.fair.hosts.times import Times, read

TIER_BYTES = "pengserve_instance_tier_bytes"


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is up."""

    url: str
    times: Path | None = None  # where an instance with a host tier counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Totals."""

    out_bytes: float = 0.0  # to the host
    in_bytes: float = 0.0  # to the device
    reused_bytes: float = 0.0  # left the device without a copy, as the host had one
    times: Times = field(default_factory=Times)

    def since(self, before: "Moved") -> "Moved":
        """What has come since."""
        return Moved(
            out_bytes=self.out_bytes - before.out_bytes,
            in_bytes=self.in_bytes - before.in_bytes,
            reused_bytes=self.reused_bytes - before.reused_bytes,
            times=self.times.since(before.times),
        )


def moved(server: Server) -> Moved | None:
    """What it has moved so far; None where there is no host tier."""
    if server.times is None:
        return None
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = {"to_host": 0.0, "to_device": 0.0, "none": 0.0}
    for family in families:
        for sample in family.samples if family.name == TIER_BYTES else ():
            found[sample.labels["direction"]] += sample.value
    return Moved(
        out_bytes=found["to_host"],
        in_bytes=found["to_device"],
        reused_bytes=found["none"],
        times=read(server.times),
    )
