"""Which devices of this node have the best links to each other."""

import shutil
import subprocess

from pengserve.planners.device_links import domains_of, parse_links

_TIMEOUT_S = 10.0


def node_domains() -> tuple[str, ...]:
    """The domain of each device of this node, by its number, as `DeviceInfo.domain` has it; empty where not known.

    Asks NVIDIA's tool, which takes about a second. A device without links to others is not known.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        asked = [tool, "topo", "-m"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    domains = domains_of(parse_links(found))
    numbers = range(len(domains))
    return tuple(str(domains[number]) for number in numbers) if set(domains) == set(numbers) else ()


def device_index(device: str) -> int | None:
    """`"cuda:3" -> 3`; None where `device` is no CUDA device with a number."""
    kind, _, index = device.partition(":")
    return int(index) if kind == "cuda" and index.isdecimal() else None


def domain_of(device: str, domains: tuple[str, ...]) -> str:
    """The domain of `device` among those of its node; empty where it is not known."""
    index = device_index(device)
    return domains[index] if index is not None and index < len(domains) else ""


def domains_by_slot(device: str, slot: int, domains: tuple[str, ...]) -> tuple[str, ...]:
    """`domains` where slots seem to be numbered as devices are, node by node, as `device` in `slot` is; else empty."""
    return domains if domains and device_index(device) == slot % len(domains) else ()
