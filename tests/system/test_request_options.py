"""A request that wishes for a shape, or is urgent, gets a group without an operator; others lose nothing by it."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pengserve.planners.types.config import JudgeConfig, MergeConfig
from pengserve.planners.types.events import EventKind
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.streams import make_prompts
from tests.support.traffic import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

MAX_TOKENS = 60
# Only wishes and urgency change the layout here: no load is below zero. The judge would form no group for an urgent
# request where it has measured that groups are slower than instances alone, as they are on few cores.
POLICY = MergeConfig(is_auto=True, merge_below=0.0, min_dwell_s=0.5)
JUDGE = JudgeConfig(is_on=False)


@pytest.fixture(scope="module")
def served(model: Any) -> Iterator[tuple[ElasticCluster, str, Traffic]]:
    with (
        elastic_cluster(model, 3, degrees=(2,), merge=POLICY, judge=JUDGE) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):
        yield cluster, url, traffic


def is_all_dp(snapshot: Any) -> bool:
    return all(len(group.members) == 1 for group in snapshot.layout.groups)


def switches(cluster: ElasticCluster, after: int) -> list[str]:
    return [str(e.data.get("what")) for e in cluster.events(EventKind.TRANSITION_END) if e.seq > after]


def test_a_wish_forms_a_group_and_ends_with_it(served: tuple[ElasticCluster, str, Traffic]) -> None:
    cluster, _, traffic = served
    prompt = make_prompts(1, seed=2)[0]
    expected = traffic.start(prompt, MAX_TOKENS).result(60)
    seq = cluster.events()[-1].seq
    found = traffic.start(prompt, 4 * MAX_TOKENS, headers={"x-pengserve-parallelism": "tp2"})
    cluster.wait(lambda s: not is_all_dp(s), 20)
    stream = found.result(60)
    assert not stream.error and stream.token_ids[:MAX_TOKENS] == expected.token_ids
    cluster.wait(is_all_dp, 20)
    assert [what.split()[0] for what in switches(cluster, seq)] == ["merge", "split"]


def test_a_wish_that_no_cluster_of_this_size_can_grant_is_a_clear_400(
    served: tuple[ElasticCluster, str, Traffic],
) -> None:
    _, url, _ = served
    for options in ("tp4", "pp2", "wide"):
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}
        headers = {"x-pengserve-parallelism": options}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30, trust_env=False)
        assert answer.status_code == 400
        assert "x-pengserve-parallelism" in answer.json()["error"]["message"]


def test_an_urgent_request_gets_a_group_while_best_effort_pauses(served: tuple[ElasticCluster, str, Traffic]) -> None:
    cluster, _, traffic = served
    cluster.wait(is_all_dp, 20)
    prompts = make_prompts(9, seed=8)
    expected = [future.result(60) for future in [traffic.start(prompt, 4 * MAX_TOKENS) for prompt in prompts]]
    seq = cluster.events()[-1].seq
    running = [traffic.start(prompt, 4 * MAX_TOKENS) for prompt in prompts]
    time.sleep(0.2)
    urgent = traffic.start(prompts[0], 4 * MAX_TOKENS, priority=-1)
    cluster.wait(lambda s: not is_all_dp(s), 20)
    assert urgent.result(60).token_ids == expected[0].token_ids
    for stream, before in zip([future.result(60) for future in running], expected, strict=True):
        assert not stream.error and stream.token_ids == before.token_ids
    cluster.wait(is_all_dp, 20)
    merges = [e for e in cluster.events(EventKind.TRANSITION_END) if e.seq > seq and "merge" in str(e.data["what"])]
    assert merges and "hard" in str(merges[0].data["what"])
    assert sum(int(e.data["num_paused"]) for e in merges) > 0
