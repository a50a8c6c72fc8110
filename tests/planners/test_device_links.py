"""Laws of domains: every device is in one, and all of a domain are linked by the machine's fastest kind of link."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.device_links import domains_of, parse_links
from tests.support.nvidia import FOLDER

FOUR_WITH_BRIDGES = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tSYS\tSYS\tNV4\t0-31\t0
GPU1\tSYS\t X \tNV4\tPHB\t32-63\t1
GPU2\tSYS\tNV4\t X \tPHB\t32-63\t1
GPU3\tNV4\tPHB\tPHB\t X \t0-31\t0
"""


@pytest.mark.parametrize(
    ("count", "domains"),
    [(1, {}), (2, {0: 0, 1: 0}), (8, dict.fromkeys(range(8), 0))],
    ids=["one has no link", "nothing better than the way between sockets", "all have NVLink"],
)
def test_recorded_machines(count: int, domains: dict[int, int]) -> None:
    assert domains_of(parse_links((FOLDER / f"{count}-topo.txt").read_text())) == domains


def test_devices_with_a_bridge_are_a_domain() -> None:
    assert domains_of(parse_links(FOUR_WITH_BRIDGES)) == {0: 0, 3: 0, 1: 1, 2: 1}


def test_a_cube_mesh_has_two_domains() -> None:
    """DGX-1: each device has NVLink to the three others of its half, and to one of the other half."""
    cross = {(low, low + 4) for low in range(4)}
    links = {
        (low, high): "NV1" if (low < 4) == (high < 4) or (low, high) in cross else "SYS"
        for low in range(8)
        for high in range(low + 1, 8)
    }
    assert domains_of(links) == {index: 4 * (index // 4) for index in range(8)}


def test_without_nvlink_switches_count_and_then_sockets() -> None:
    pairs = [(low, high) for low in range(4) for high in range(low + 1, 4)]
    sockets = {(low, high): "NODE" if low // 2 == high // 2 else "SYS" for low, high in pairs}
    assert domains_of(sockets) == {0: 0, 1: 0, 2: 2, 3: 2}
    assert domains_of({**dict.fromkeys(pairs, "NODE"), (0, 3): "PIX"}) == {0: 0, 1: 1, 2: 2, 3: 0}


@given(st.dictionaries(st.tuples(st.integers(0, 7), st.integers(8, 15)), st.sampled_from(["NV2", "PIX", "SYS", "X"])))
def test_a_domain_is_named_after_its_first_device(links: dict[tuple[int, int], str]) -> None:
    found = domains_of(links)
    assert set(found) == {index for pair in links for index in pair}
    assert all(found[name] == name <= index for index, name in found.items())


def test_what_is_no_table_has_no_links() -> None:
    assert domains_of(parse_links("")) == domains_of(parse_links("No devices were found")) == {}
