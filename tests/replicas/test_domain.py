"""Laws of the question which devices are close to each other."""

from pathlib import Path

import pytest

from pengserve.replicas.domain import domain_of, domains_by_slot, node_domains
from tests.support.nvidia import pretend


@pytest.mark.parametrize(("count", "domains"), [(1, ()), (2, ("0", "0")), (8, ("0",) * 8)])
def test_all_devices_of_a_node_have_a_domain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int, domains: tuple[str, ...]
) -> None:
    pretend(monkeypatch, tmp_path, count)
    assert node_domains() == domains


def test_the_domain_is_that_of_the_device() -> None:
    domains = ("0", "1", "1", "0")
    assert [domain_of(f"cuda:{number}", domains) for number in range(4)] == list(domains)
    for unknown in ("cpu", "cuda", "cuda:GPU-1", "cuda:4"):
        assert domain_of(unknown, domains) == ""


def test_without_an_answer_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert node_domains() == ()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    assert node_domains() == ()


def test_domains_tell_of_slots_where_slots_follow_devices() -> None:
    domains = ("0", "1", "1", "0")
    assert domains_by_slot("cuda:2", 2, domains) == domains_by_slot("cuda:2", 6, domains) == domains
    assert domains_by_slot("cuda:3", 2, domains) == domains_by_slot("cpu", 0, domains) == ()
    assert domains_by_slot("cuda:0", 0, ()) == ()
