"""Members of a switch stand still at the end of a step; none of them waits there for a long step of the leader's."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from pengserve.planners.cost_model import Chunk
from pengserve.simulator.clock import run_virtual
from pengserve.simulator.engine.fast_scheduler import FastScheduler
from pengserve.simulator.engine.lane import SimLane
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.switches.switch import SimSwitch
from pengserve.simulator.timing.steps import Batch
from tests.simulator.engine.loads import LinearTimes, capacity, live

TIMES = LinearTimes()
STEP_TOKENS = 512
ROOM = capacity(num_blocks=1000, block_size=16, max_num_seqs=8)


def step_s(num_tokens: int) -> float:
    """Seconds of a step that reads so much of a prompt's beginning."""
    return TIMES.step_s(Batch(0, 0, (Chunk(prefix_tokens=0, num_tokens=num_tokens),)))


SHORT_S, WHOLE_S = step_s(STEP_TOKENS // 16), step_s(STEP_TOKENS)


def lane_with(name: str, num_tokens: int) -> SimLane:
    """A lane that has begun to read a prompt."""
    lane = SimLane(FastScheduler(ROOM, SchedulerOptions(max_num_batched_tokens=STEP_TOKENS)), TIMES, on_end=list)
    lane.add(live(name, num_tokens, 1))
    return lane


def switch_of(*lanes: SimLane) -> SimSwitch:
    members = tuple(SimpleNamespace(current=lane, held=None) for lane in lanes)
    return SimSwitch(plan=cast(Any, None), members=cast(Any, members), around=cast(Any, None))


def test_the_leader_begins_no_long_step_while_the_others_come_to_the_end_of_theirs() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        leader = lane_with("leads", 10 * STEP_TOKENS)
        await asyncio.sleep(0.5 * WHOLE_S)
        follower = lane_with("follows", 10 * STEP_TOKENS)
        begun_s = loop.time()
        assert await switch_of(leader, follower).meet() == loop.time() - begun_s
        # The leader's step under way ends half-way through the follower's: from then on its steps are short.
        assert WHOLE_S <= loop.time() - begun_s <= WHOLE_S + SHORT_S
        assert leader.is_idle and follower.is_idle

    run_virtual(main())


def test_steps_are_whole_again_when_all_have_met() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        leader, follower = lane_with("leads", 10 * STEP_TOKENS), lane_with("follows", 10 * STEP_TOKENS)
        await switch_of(leader, follower).meet()
        leader.resume()
        before, begun_s = leader.scheduler.prefilling_tokens, loop.time()
        await leader.pause()
        assert before - leader.scheduler.prefilling_tokens == STEP_TOKENS
        assert loop.time() - begun_s > SHORT_S

    run_virtual(main())
