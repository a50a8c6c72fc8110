"""Laws of what NVIDIA's tool is read for: devices with their memory, links between them, and those that are visible."""

from pathlib import Path

import pytest

from pengserve.cluster.devices import count_cuda_devices
from pengserve.cluster.gpus import Gpus, look_for_gpus, parse_gpus
from pengserve.planners.device_links import parse_links
from tests.support.nvidia import COUNTS, FOLDER, pretend


def looked(monkeypatch: pytest.MonkeyPatch, folder: Path, count: int) -> Gpus:
    pretend(monkeypatch, folder, count)
    found = look_for_gpus()
    assert found is not None
    return found


@pytest.mark.parametrize("count", COUNTS)
def test_all_devices_are_found_with_their_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int) -> None:
    gpus = looked(monkeypatch, tmp_path, count)
    assert [gpu.index for gpu in gpus.found] == list(range(count_cuda_devices())) == list(range(count))
    assert all(20 << 30 < gpu.free_bytes < gpu.total_bytes for gpu in gpus.found)
    assert len(gpus.links) == count * (count - 1) // 2


def test_nvlink_is_told_from_pcie() -> None:
    eight, two = (
        Gpus(
            found=parse_gpus((FOLDER / f"{count}-query.csv").read_text()),
            links=parse_links((FOLDER / f"{count}-topo.txt").read_text()),
        )
        for count in (8, 2)
    )
    assert eight.have_nvlink(eight.found) and eight.links[2, 7] == "NV18"
    assert not two.have_nvlink(two.found) and two.links == {(0, 1): "SYS"}
    assert two.have_nvlink(two.found[:1]), "one device needs no link"


@pytest.mark.parametrize(("variable", "indices"), [("3,1", [3, 1]), ("0,9,2", [0]), ("", []), ("GPU-a,GPU-b", [0, 1])])
def test_those_that_are_visible_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, indices: list[int]
) -> None:
    pretend(monkeypatch, tmp_path, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    gpus = look_for_gpus()
    assert gpus is not None and [gpu.index for gpu in gpus.found] == indices


@pytest.mark.parametrize("text", ["", "No devices were found", "0, A, 1, [N/A], [N/A]", "a, b, c"])
def test_what_is_no_device_is_left_out(text: str) -> None:
    assert parse_gpus(text) == () and parse_links(text) == {}


def test_without_the_tool_there_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look_for_gpus() is None
