"""LayerKV's early offloading, worked out by hand."""

from dataclasses import replace

from pengserve.planners.early_offload import missing_blocks, spreads_of_decodes, spreads_of_prompts
from pengserve.planners.kv_forecast import Holding
from pengserve.planners.placement.spread import RESIDENT, Spread, evenly
from pengserve.planners.placement.values import Decode, Machine

# 8 layers; a step of 80 ms copies 80 cells at 1,000 cells a second.
MACHINE = Machine(num_layers=8, block_size=16, num_cells=8 * 100, step_s=0.08, context_s=0.0, cells_per_s=1000.0)


def test_a_prompt_gives_up_as_many_layers_as_leave_while_it_is_computed() -> None:
    """A layer of 160 tokens is 10 cells, which take 10 ms: in 45 ms four of them leave, in a second all."""
    prompts, takes_s = {"a": 160, "b": 160, "c": 160}, {"a": 0.045, "b": 1.0, "c": 0.005}
    fast = replace(MACHINE, cells_per_s=2000.0)
    found = spreads_of_prompts(prompts, {name: seconds / 2 for name, seconds in takes_s.items()}, [], fast, 0.02)
    assert found == {"a": Spread(2, 1)}, "b would wait for its first layer in each step"
    assert spreads_of_prompts(prompts, takes_s, [], MACHINE, 0.2) == {"a": Spread(2, 1), "b": Spread(1, 0)}


def test_no_layer_of_a_prompt_leaves_where_steps_would_wait_for_it() -> None:
    """Five that decode have half of their layers away already: 4 layers of 50 cells and 40 ms each take 80 ms."""
    requests = [Decode(request_id=str(i), num_tokens=160, spread=Spread(2, 1)) for i in range(5)]
    assert spreads_of_prompts({"a": 160}, {"a": 0.045}, requests, MACHINE, 0.02) == {}
    dear = replace(MACHINE, staged_s=0.01)
    assert spreads_of_prompts({"a": 160}, {"a": 0.045}, [], dear, 0.02) == {}


def test_blocks_are_missing_where_the_forecast_says_so_also_for_the_next_prompt() -> None:
    running = [Holding(request_id="a", num_blocks=10, left_tokens=1000)] * 2
    assert missing_blocks(14, running, 16, 0) == 0
    assert missing_blocks(14, running, 16, 5) == 5, "two blocks in each of the next seven stages"
    ending = [Holding(request_id="a", num_blocks=10, left_tokens=16), running[0]]
    assert missing_blocks(7, ending, 16, 5) == 0, "one ends in the first stage"


def test_the_newest_gives_up_half_of_its_layers_unless_steps_would_wait() -> None:
    running = [
        Holding(request_id=name, num_blocks=10, left_tokens=99, kept_layers=8, started_s=start)
        for name, start in (("old", 1.0), ("new", 2.0))
    ]
    requests = [Decode(request_id=name, num_tokens=160) for name in ("old", "new")]
    assert spreads_of_decodes(4, running, requests, MACHINE, 0.02) == {"new": Spread(2, 1)}
    slow = Machine(num_layers=8, block_size=16, num_cells=800, step_s=0.08, context_s=0.0, cells_per_s=100.0)
    assert spreads_of_decodes(4, running, requests, slow, 0.02) == {}


def test_spreads_of_about_so_many_layers() -> None:
    """Of 8 layers 8, 4, 2 or 1 can be away evenly."""
    assert [evenly(count, 8).distance for count in range(9)] == [0, 8, 4, 2, 2, 1, 1, 1, 1]
    assert [evenly(count, 8, at_most=True).distance for count in range(9)] == [0, 8, 4, 4, 2, 2, 2, 2, 1]
    assert evenly(0, 8) == RESIDENT
