"""Laws of a lane's configuration: its graphs hold no sum over the group, and what is compiled for it is its own."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from pengserve.replicas.engine.lanes.lane_build import _capture_between_sums
from pengserve.replicas.engine.lanes.lane_groups import SUM_IN_PLACE
from pengserve.replicas.engine.lanes.warm_up import marked_as_lane
from pengserve.replicas.engine.vllm_seam import CUDAGraphMode

pytestmark = pytest.mark.slow  # it imports vLLM
ATTENTION = "vllm::unified_attention_with_output"


def config(mode: CUDAGraphMode | None) -> Any:
    fusions = SimpleNamespace(fuse_allreduce_rms=True)
    compilation = SimpleNamespace(cudagraph_mode=mode, splitting_ops=[ATTENTION], pass_config=fusions)
    return SimpleNamespace(compilation_config=compilation)


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_pieces_end_at_attention_and_at_sums(mode: CUDAGraphMode) -> None:
    found = config(mode)
    _capture_between_sums(found)
    compilation = found.compilation_config
    assert compilation.cudagraph_mode is CUDAGraphMode.PIECEWISE
    assert compilation.splitting_ops == [ATTENTION, SUM_IN_PLACE]
    assert not compilation.pass_config.fuse_allreduce_rms


@pytest.mark.parametrize("mode", [None, CUDAGraphMode.NONE, CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY])
def test_without_pieces_a_lane_has_no_graphs(mode: CUDAGraphMode | None) -> None:
    found = config(mode)
    _capture_between_sums(found)
    compilation = found.compilation_config
    assert compilation.cudagraph_mode in (None, CUDAGraphMode.NONE)
    assert compilation.splitting_ops == [ATTENTION], "nothing else has changed"


def test_what_is_compiled_for_one_shape_is_found_for_no_other_and_the_users_own_keys_stay() -> None:
    given = {"mine": 1}
    shapes = [marked_as_lane(given, shape) for shape in ("dp", "tp2", "pp2")]
    assert len({tuple(sorted(shape.items())) for shape in shapes}) == 3
    assert all(shape["mine"] == 1 for shape in shapes) and given == {"mine": 1}
    assert marked_as_lane(None, "dp").keys() == {"pengserve_lane"}
