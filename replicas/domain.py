"""Which devices of this node have the best links to the device of this instance."""

import shutil
import subprocess

from pengserve.planners.device_links import domains_of, parse_links

_TIMEOUT_S = 10.0


def domain_of(device: str) -> str:
    """The domain of `device` ("cuda:3"), as `DeviceInfo.domain` has it; empty where it is not known.

    Asks NVIDIA's tool, which takes about a second, and nothing where `device` is no CUDA device with a number.
    """
    kind, _, index = device.partition(":")
    tool = shutil.which("nvidia-smi")
    if kind != "cuda" or not index.isdecimal() or tool is None:
        return ""
    try:
        asked = [tool, "topo", "-m"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    domain = domains_of(parse_links(found)).get(int(index))
    return "" if domain is None else str(domain)
