"""Every vLLM name that replicas stand on exists. A failure here names what an upgrade moved."""

import inspect

import pytest

pytest.importorskip("vllm")
from pengserve.planners.stages import stage_layers
from pengserve.replicas.engine import vllm_seam

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", vllm_seam.__all__)
def test_name_exists(name: str) -> None:
    assert hasattr(vllm_seam, name), f"vLLM moved {name}; update replicas/engine/vllm_seam.py"


@pytest.mark.parametrize(
    ("owner", "attribute"), [(owner, name) for owner, names in vllm_seam.ATTRIBUTES.items() for name in names]
)
def test_attribute_exists(owner: type, attribute: str) -> None:
    assert hasattr(owner, attribute), f"vLLM renamed {owner.__name__}.{attribute}; see replicas/engine/vllm_seam.py"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_layers", [5, 8, 13, 28])
def test_stages_have_the_layers_that_vllm_builds_for_them(num_layers: int, num_stages: int) -> None:
    own = vllm_seam.get_pp_indices(num_layers, 0, 3)
    ranges = stage_layers(num_layers, num_stages)
    with vllm_seam.layer_partition([stop - first for first, stop in ranges]):
        found = [vllm_seam.get_pp_indices(num_layers, stage, num_stages) for stage in range(num_stages)]
    assert ranges == tuple(found)
    assert vllm_seam.get_pp_indices(num_layers, 0, 3) == own, "nothing of it stays"


def test_coordinators_keep_their_groups_where_lane_groups_looks() -> None:
    assert {"_TP", "_PP", "_groups"} <= set(vars(vllm_seam.parallel_state))
    assert {"cpu_group", "device_group"} <= set(vllm_seam.parallel_state.GroupCoordinator.__annotations__)


def test_a_request_can_be_passed_over_by_the_scheduler() -> None:
    """`Microbatches` leaves requests out of a step by what vLLM keeps for pipelines."""
    source = inspect.getsource(vllm_seam.Scheduler.schedule)
    assert "self.current_step += 1" in source
    assert "if self.current_step < request.next_decode_eligible_step:" in source
    assert "token_budget = self.max_num_scheduled_tokens" in source


def test_a_rejected_request_ends_with_the_stop_reason_that_it_has_then() -> None:
    """`explaining_rejections` sets it while the tokens are rejected."""
    source = inspect.getsource(vllm_seam.Scheduler.update_from_output)
    assert source.index("structured_output_manager.accept_tokens(") < source.index("stop_reason=request.stop_reason")


def test_the_table_of_blocks_is_committed_before_all_that_reads_it() -> None:
    """`ShownTable` writes it then, for kernels and for the mapping of slots."""
    source = inspect.getsource(vllm_seam.GPUModelRunner._prepare_inputs)
    committed = source.index("self.input_batch.block_table.commit_block_table(num_reqs)")
    assert committed < source.index("self.input_batch.block_table.compute_slot_mapping(")
    assert "self.block_table.gpu" in inspect.getsource(vllm_seam.BlockTable.compute_slot_mapping)
    assert "self.block_table.gpu[:num_reqs]" in inspect.getsource(vllm_seam.BlockTable.get_device_tensor)
    assert "get_device_tensor(" in inspect.getsource(vllm_seam.GPUModelRunner._build_attention_metadata)


def test_vllm_is_the_pinned_one() -> None:
    import vllm

    assert vllm.__version__.startswith("0.32."), f"written for vLLM 0.32, found {vllm.__version__}"
