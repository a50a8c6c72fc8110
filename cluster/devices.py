"""How many CUDA devices a machine has. Looks at the driver's files and tools: importing torch would cost seconds."""

import os
import shutil
import subprocess
from pathlib import Path

_NVIDIA_SMI_TIMEOUT_S = 30.0
_DRIVER_FILES = Path("/proc/driver/nvidia")


def has_cuda_driver() -> bool:
    """Whether this machine has an NVIDIA driver."""
    return (_DRIVER_FILES / "version").exists() or shutil.which("nvidia-smi") is not None


def count_cuda_devices() -> int:
    """CUDA devices that a process started here sees: those of the machine that CUDA_VISIBLE_DEVICES leaves."""
    return visible(_count_all(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(num_devices: int, variable: str | None) -> int:
    """How many of `num_devices` are left by a value of CUDA_VISIBLE_DEVICES; None: it is not set.

    As CUDA reads it: the first entry that names no device ends the list.
    """
    if variable is None:
        return num_devices
    count = 0
    for entry in (entry.strip() for entry in variable.split(",")):
        is_device = int(entry) < num_devices if entry.isdecimal() else entry.startswith(("GPU-", "MIG-"))
        if not is_device:
            break
        count += 1
    return min(count, num_devices)


def _count_all() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            found = subprocess.run(
                [tool, "--list-gpus"], capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True
            )
            return sum(line.startswith("GPU ") for line in found.stdout.splitlines())
        except (OSError, subprocess.SubprocessError):
            pass  # nvidia-smi may belong to another driver; the driver's files give the number too
    directory = _DRIVER_FILES / "gpus"
    return sum(1 for _ in directory.iterdir()) if directory.is_dir() else 0
