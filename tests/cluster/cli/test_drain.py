"""`pengserve drain` and `undrain` against a real HTTP server."""

import pytest

from pengserve.cluster.cli.main import main
from pengserve.planners.types.drains import DrainPhase
from tests.cluster.client.cluster_server import ADMIN_KEY, ClusterState, cluster_server, some_events


@pytest.fixture
def state(monkeypatch):
    for name in ("PENGSERVE_URL", "PENGSERVE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    with cluster_server(ClusterState(events=some_events(1))) as state:
        yield state


def run(state: ClusterState, *arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--url", state.url, "--admin-key", ADMIN_KEY])
    return end.value.code


def test_drain_waits_until_the_machine_may_go(state, capsys):
    state.drain_phases = [DrainPhase.MOVING, DrainPhase.ENDING, DrainPhase.DONE]
    assert run(state, "drain", "1", "--timeout", "3") == 0
    assert "instance 1.1 may be deleted; `pengserve undrain 1`" in capsys.readouterr().out
    assert state.drained_with_s == [3.0]


def test_drain_may_return_before_it_is_over(state, capsys):
    assert run(state, "drain", "1", "--no-wait") == 0
    assert "drain instance 1: moving, 2 requests left" in capsys.readouterr().out


def test_undrain_starts_the_instance_again(state, capsys):
    assert run(state, "undrain", "1") == 0
    assert "instance 1 starts again" in capsys.readouterr().out and state.undrained == [1]


def test_an_instance_is_a_number(state, capsys):
    assert run(state, "drain", "one") == 2
    assert run(state, "drain", "-1") == 2
