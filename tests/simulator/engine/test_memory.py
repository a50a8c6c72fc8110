"""What an instance holds in each shape: weights and KV fit its memory, and nothing more would."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.stages import Parts
from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.engine.memory import Sizes, lane_infos, require_room


@st.composite
def some_sizes(draw: st.DrawFn) -> Sizes:
    """Any instance that holds its model and at least a block."""
    num_layers, layer_bytes = draw(st.integers(8, 96)), draw(st.integers(1 << 20, 1 << 30))
    weights = num_layers * layer_bytes + draw(st.integers(0, 1 << 31))
    token_bytes = num_layers * 4 * draw(st.sampled_from([256, 1024, 4096]))
    return Sizes(
        memory_bytes=weights + draw(st.integers(32, 200_000)) * token_bytes,
        weight_bytes=weights,
        num_layers=num_layers,
        layer_bytes=layer_bytes,
        token_bytes=token_bytes,
        num_kv_heads=8,
        block_size=draw(st.sampled_from([16, 32])),
    )


@given(some_sizes())
def test_alone_an_instance_is_full_to_the_block(sizes: Sizes) -> None:
    left = sizes.memory_bytes - sizes.weight_bytes - sizes.dp.num_blocks * sizes.dp_block_bytes
    assert 0 <= left < sizes.dp_block_bytes


@given(some_sizes(), st.sampled_from([2, 4, 8]))
def test_a_group_holds_the_tokens_of_all_its_members(sizes: Sizes, degree: int) -> None:
    assert sizes.tp(degree).num_tokens == degree * sizes.dp.num_tokens


@given(some_sizes(), st.sampled_from([2, 4, 8]))
def test_each_stage_holds_its_layers_weights_and_kv_and_the_fullest_no_block_more(sizes: Sizes, stages: int) -> None:
    blocks = sizes.pp(stages).num_blocks

    def used(num_layers: int, num_blocks: int) -> int:
        weights = sizes.weight_bytes - (sizes.num_layers - num_layers) * sizes.layer_bytes
        return weights + num_blocks * sizes.dp_block_bytes * num_layers // sizes.num_layers

    assert all(used(num_layers, blocks) <= sizes.memory_bytes for num_layers in sizes.stage_sizes(stages))
    assert any(used(num_layers, blocks + 1) > sizes.memory_bytes for num_layers in sizes.stage_sizes(stages))


@given(some_sizes(), st.sampled_from([2, 4, 8]))
def test_stages_have_every_layer_once(sizes: Sizes, stages: int) -> None:
    assert sum(sizes.stage_sizes(stages)) == sizes.num_layers and len(sizes.stage_sizes(stages)) == stages


@given(some_sizes(), st.sampled_from([2, 4, 8]))
def test_a_drop_has_memory_at_once_and_more_when_kv_has_moved(sizes: Sizes, stages: int) -> None:
    assert (
        sizes.dp.num_blocks <= sizes.first_blocks(Parts(sizes.num_layers, (1,) * stages)) <= sizes.pp(stages).num_blocks
    )


@given(some_sizes(), st.sampled_from([2, 4, 8]))
def test_a_pipeline_that_gets_its_weights_back_still_holds_what_its_members_do(sizes: Sizes, stages: int) -> None:
    assert (
        sizes.dp.num_blocks
        <= sizes.layers.num_blocks_left(Parts(sizes.num_layers, (1,) * stages))
        <= sizes.pp(stages).num_blocks
    )


@given(some_sizes())
def test_more_gpus_than_kv_heads_keep_copies(sizes: Sizes) -> None:
    wide = replace(sizes, base_degree=16, memory_bytes=16 * sizes.memory_bytes)
    assert wide.dp_token_bytes == 2 * sizes.token_bytes


def test_static_groups_hold_their_share_of_the_weights_alone() -> None:
    sizes = Sizes(
        memory_bytes=24 << 30,
        weight_bytes=16 << 30,
        num_layers=32,
        layer_bytes=1 << 28,
        token_bytes=1 << 17,
        num_kv_heads=8,
    )
    assert replace(sizes, is_static=True).tp(2).num_tokens == 2 * sizes.dp.num_tokens * 2


def test_a_model_that_does_not_fit_is_told_in_one_sentence() -> None:
    sizes = Sizes(
        memory_bytes=1 << 30,
        weight_bytes=2 << 30,
        num_layers=32,
        layer_bytes=1 << 26,
        token_bytes=1 << 17,
        num_kv_heads=8,
    )
    with pytest.raises(ConfigError, match="small on tiny does not fit in dp"):
        require_room(sizes, "dp", "small on tiny")


def test_an_instance_lists_dp_and_what_it_was_asked_for() -> None:
    sizes = Sizes(
        memory_bytes=24 << 30,
        weight_bytes=8 << 30,
        num_layers=32,
        layer_bytes=1 << 27,
        token_bytes=1 << 17,
        num_kv_heads=8,
    )
    assert [info.shape for info in lane_infos(sizes, ["tp2", "pp2"])] == ["dp", "pp2", "tp2"]
