"""What NVIDIA's tool says of the CUDA devices of this machine: memory, driver, and the links between them."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pengserve.cluster.devices import visible
from pengserve.planners.device_links import parse_links
from pengserve.planners.types.units import MIB

_TIMEOUT_S = 30.0
_QUERY = "--query-gpu=index,name,driver_version,memory.total,memory.free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device."""

    index: int
    name: str
    driver: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The devices that a process started here sees, and what connects them."""

    found: tuple[Gpu, ...]
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)  # lower index first: NV18, PIX, PHB, SYS, ...

    def have_nvlink(self, gpus: Sequence[Gpu]) -> bool:
        """Whether each of these has NVLink to each other."""
        indices = sorted(gpu.index for gpu in gpus)
        pairs = [(low, high) for low in indices for high in indices if low < high]
        return all(self.links.get(pair, "").startswith("NV") for pair in pairs)


def look_for_gpus() -> Gpus | None:
    """The visible devices; None where NVIDIA's tool is not there or gives no answer."""
    listed = _ask(_QUERY, "--format=csv,noheader,nounits")
    if listed is None:
        return None
    found = parse_gpus(listed)
    return Gpus(found=_visible(found), links=parse_links(_ask("topo", "-m") or ""))


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Devices of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`. Lines that are none are left out."""
    found = []
    for line in text.splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) == 5 and fields[0].isdecimal() and fields[3].isdecimal() and fields[4].isdecimal():
            index, name, driver, total, free = fields
            sizes = {"total_bytes": int(total) * MIB, "free_bytes": int(free) * MIB}
            found.append(Gpu(index=int(index), name=name, driver=driver, **sizes))
    return tuple(found)


def _visible(found: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves. Where it names them by their ids, the first ones stand for them."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = visible(len(found), variable)
    entries = [entry.strip() for entry in (variable or "").split(",")][:count]
    if variable is None or not all(entry.isdecimal() for entry in entries):
        return found[:count]
    return tuple(gpu for entry in entries for gpu in found if gpu.index == int(entry))


def _ask(*arguments: str) -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
