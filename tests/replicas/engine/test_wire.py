"""What a BATCH says of an instance's load: all of it, or only which step it was."""

import pytest

from pengserve.planners.types.snapshot import InstanceStats
from pengserve.replicas.engine.vllm_seam import EngineCoreOutput, EngineCoreOutputs
from pengserve.replicas.engine.wire import Codec, Stepped


@pytest.mark.parametrize("load", [InstanceStats(step=7, num_running=3, last_step_s=0.25), Stepped(8, 0.5)])
def test_a_batch_comes_as_it_was_sent(load: InstanceStats | Stepped) -> None:
    codec = Codec()
    outputs = EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="a", new_token_ids=[1, 2])])
    batch = codec.decode_batch([codec.encode_stats(load), *codec.encode_outputs(outputs)])
    assert batch.stats == load
    assert [(o.request_id, o.new_token_ids) for o in batch.outputs.outputs] == [("a", [1, 2])]


def test_a_step_alone_takes_a_hundredth_of_the_bytes() -> None:
    codec = Codec()
    assert 50 * len(codec.encode_stats(Stepped(10**6, 0.0026))) < len(codec.encode_stats(InstanceStats(step=10**6)))
