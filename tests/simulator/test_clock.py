"""Virtual time: nothing waits, everything happens in its order, and a run that would never end says so."""

import asyncio
import time

import pytest

from pengserve.simulator.clock import DeadlockError, run_virtual


def test_sleeps_cost_no_time_and_end_in_their_order() -> None:
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(sleeper("late", 3600.0), sleeper("early", 0.25), sleeper("same", 0.25))

    started_s = time.monotonic()
    run_virtual(main())
    assert time.monotonic() - started_s < 5.0
    assert [name for name, _ in seen] == ["early", "same", "late"]
    assert [at_s for _, at_s in seen] == pytest.approx([0.25, 0.25, 3600.0])


def test_time_outs_work() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(5.0)


def test_a_run_that_would_never_end_says_so() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="nothing is due"):
        run_virtual(main())
