"""Steps that take exactly as long as a known cost model says: what fits and profiles are tested with."""

import random

from pengserve.planners.cost_model import Chunk, CostModel, Sample

TRUE = CostModel(prefix_attention_s=5e-8, self_attention_s=3e-8, kv_read_s=5e-7, ffn_s=7e-5, other_s=8e-5, load_s=4e-3)


def samples(count: int = 60) -> list[Sample]:
    """Decodes, prefill and both, as the true model has them."""
    source, found = random.Random(1), []
    for index in range(count):
        decodes = [(source.randrange(4000), 1) for _ in range(source.randrange(1, 32))]
        prefill = [(source.choice([0, 3000]), source.randrange(2, 900))]
        pairs = (decodes, prefill, decodes + prefill)[index % 3]
        chunks = tuple(Chunk(prefix_tokens=prefix, num_tokens=num) for prefix, num in pairs)
        found.append(Sample(chunks=chunks, seconds=TRUE.batch_s(chunks)))
    return found
