"""How CUDA devices are counted: as CUDA_VISIBLE_DEVICES is read, over what the driver's tool lists."""

from pathlib import Path

import pytest

from pengserve.cluster import devices


@pytest.mark.parametrize(
    ("variable", "count"),
    [
        (None, 4),
        ("", 0),
        ("0", 1),
        ("2,3", 2),
        ("0, 1", 2),
        ("-1", 0),
        ("0,-1,1", 1),  # CUDA stops at the first entry that names no device
        ("1,7,2", 1),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 1),
        ("MIG-GPU-1/0/0,MIG-GPU-1/1/0", 2),
        ("NoDevFiles", 0),
        ("0,1,2,3,0", 4),
    ],
)
def test_the_variable_leaves_so_many_of_four(variable: str | None, count: int) -> None:
    assert devices.visible(4, variable) == count


def test_the_drivers_tool_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --list-gpus ] || exit 1\n'
        "echo 'GPU 0: NVIDIA H100 (UUID: GPU-a)'\n"
        "echo '  MIG 1g.10gb Device 0: (UUID: MIG-b)'\n"
        "echo 'GPU 1: NVIDIA H100 (UUID: GPU-c)'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.has_cuda_driver()
    assert devices.count_cuda_devices() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices.count_cuda_devices() == 1


def test_a_tool_that_fails_leaves_the_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_DRIVER_FILES", tmp_path)
    assert devices.count_cuda_devices() == 3
