"""The ingress in front of a benchmark's instances: in this process, and settled as a deployed one is."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.elastic import ElasticCluster


@contextmanager
def settled_ingress(cluster: ElasticCluster) -> Iterator[str]:
    """A real ingress, whose URL this yields. Without this, a full collection stops all streams for up to a second.

    vLLM's variables are read for the last time until it ends.
    """
    with cluster.ingress() as url:
        from vllm.envs import disable_envs_cache  # imported late, as all of vLLM in benchmarks: `--help` is quick

        from pengserve.cluster.ingress.process import settle

        settle()
        try:
            yield url
        finally:
            gc.unfreeze()
            disable_envs_cache()
