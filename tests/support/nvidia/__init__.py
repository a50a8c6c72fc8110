"""Machines with 1, 2 and 8 GPUs, as NVIDIA's tool describes them: a tool that says what is recorded here."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
COUNTS = (1, 2, 8)  # a GeForce; two L40S over PCIe; eight H100 over NVLink, with network cards


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, count: int) -> None:
    """From here on this machine has so many devices, as far as NVIDIA's tool goes."""
    tool = folder / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        f"--list-gpus) sed 's/^/GPU /' {FOLDER}/{count}-query.csv ;;\n"
        f"--query-gpu=*) cat {FOLDER}/{count}-query.csv ;;\n"
        f"topo) cat {FOLDER}/{count}-topo.txt ;;\n"
        "*) exit 1 ;;\nesac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
