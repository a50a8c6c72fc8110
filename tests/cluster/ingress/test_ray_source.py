"""What a controller says through Ray reaches the ingress as it was said."""

import asyncio
from typing import Any

import pytest

from pengserve.planners.types.errors import EngineError, PlanError, SupersededError
from pengserve.planners.types.ids import NO_VERSION
from pengserve.planners.types.plans import LayoutTarget


class Handle:
    """An actor's handle whose methods raise what a test says."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *arguments: Any) -> Any:
        async def answer() -> None:
            raise self._error

        return answer()


def source_of(*errors: Exception) -> tuple[Any, list[Handle]]:
    """A source whose controllers raise these, one after the other."""
    pytest.importorskip("ray")
    from pengserve.cluster.ingress.routing.ray_source import RayRoutingSource

    handles = [Handle(error) for error in errors]
    return RayRoutingSource(lambda: handles.pop(0)), handles


def raised(cause: Exception) -> Exception:
    """As Ray raises what an actor's method raised."""
    ray_exceptions = pytest.importorskip("ray.exceptions")
    return ray_exceptions.RayTaskError("set_layout", "traceback", cause).as_instanceof_cause()


async def test_a_refusal_arrives_in_the_controllers_words_and_the_handle_is_kept() -> None:
    source, handles = source_of(raised(PlanError("choose dp")), raised(PlanError("never asked")))
    for _ in range(2):
        with pytest.raises(PlanError, match=r"^choose dp$"):
            await source.set_layout(LayoutTarget(groups=()))
    assert len(handles) == 1


async def test_anything_else_means_that_the_controller_does_not_answer() -> None:
    source, handles = source_of(raised(KeyError("x")), raised(KeyError("x")))
    for _ in range(2):
        with pytest.raises(EngineError, match="does not answer"):
            await source.auto_layout()
    assert handles == []


async def test_a_controller_that_has_given_way_is_looked_for_anew() -> None:
    source, handles = source_of(raised(SupersededError("ask that one")), raised(SupersededError("ask that one")))
    for _ in range(2):
        with pytest.raises(SupersededError):
            await source.routing(NO_VERSION, 1.0)
    assert handles == []


class Deaf:
    """The handle of a controller that was stopped: no call ever ends."""

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *arguments: Any) -> Any:
        return asyncio.sleep(3600)


async def test_a_controller_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from pengserve.cluster.ingress.routing import ray_source

    monkeypatch.setattr(ray_source, "ANSWER_TIMEOUT_S", 0.05)
    asked: list[int] = []

    def resolve() -> Deaf:
        asked.append(1)
        return Deaf()

    source = ray_source.RayRoutingSource(resolve)
    calls = (source.snapshot, lambda: source.routing(NO_VERSION, 0.05), lambda: source.drain(0.05), source.auto_layout)
    async with asyncio.timeout(60):
        for call in calls:
            with pytest.raises(EngineError, match="does not answer"):
                await call()
    assert len(asked) == len(calls), "each call looks for the controller anew"
