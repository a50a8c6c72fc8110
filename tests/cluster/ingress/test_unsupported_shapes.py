"""An engine argument that does not go with groups turns them off, says so, and costs nothing else."""

import time
from typing import Any

import httpx
import pytest

from pengserve.client import PengServe, PengServeAPIError
from pengserve.planners.types.snapshot import InstanceState
from tests.support.elastic import START_TIMEOUT_S, ElasticCluster
from tests.support.models import tiny_model

pytestmark = pytest.mark.slow


class _AloneCluster(ElasticCluster):
    """Waits for its instances, and not for groups, which never form."""

    def wait_formable(self, timeout_s: float = START_TIMEOUT_S) -> Any:
        def is_told(snapshot: Any) -> bool:
            return all(i.state is InstanceState.READY and len(i.lanes) == 2 for i in snapshot.instances)

        return self.wait(is_told, timeout_s)


SPECULATIVE = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}}
WHY = "speculative decoding works in dp alone"


def test_it_serves_alone_and_the_layout_says_why() -> None:
    cluster = _AloneCluster(tiny_model(), 2, engine=SPECULATIVE)
    try:
        cluster.start()
        with cluster.ingress() as url, PengServe(url) as client:
            body = {"model": "tiny", "prompt": "one two", "max_tokens": 8, "temperature": 0}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).status_code == 200
            view = client.layout()
            assert view.formable == ()
            assert [lane.shape for lane in view.cannot] == ["tp2"] and WHY in view.cannot[0].why_not
            with pytest.raises(PengServeAPIError, match=r"cannot run tp2: .*" + WHY):
                client.set_layout("tp2")
            time.sleep(1)
            assert client.layout().last_switch is None
    finally:
        cluster.stop()
