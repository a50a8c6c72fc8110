"""Laws of the load client's choice among several servers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.client import _Server, least_loaded

prompts = st.lists(st.integers(1, 1000), min_size=1, max_size=20)


@given(prompts=prompts, num_servers=st.integers(1, 4))
def test_servers_never_differ_by_more_than_one_request(prompts: list[int], num_servers: int) -> None:
    servers = [_Server(f"http://127.0.0.1:{port}") for port in range(1, num_servers + 1)]
    for prompt_tokens in prompts:
        least_loaded(servers).open(prompt_tokens)
        counts = [server.load[0] for server in servers]
        assert max(counts) - min(counts) <= 1
    assert sum(server.load[1] for server in servers) == sum(prompts)


@pytest.mark.parametrize("first", [0, 1])
def test_of_servers_with_as_many_requests_the_one_with_fewer_tokens_is_next(first: int) -> None:
    servers = [_Server("http://127.0.0.1:1"), _Server("http://127.0.0.1:2")]
    servers[first].open(500)
    servers[1 - first].open(20)
    assert least_loaded(servers) is servers[1 - first]


def test_an_ended_request_no_longer_counts() -> None:
    servers = [_Server("http://127.0.0.1:1"), _Server("http://127.0.0.1:2")]
    long, _ = servers[0].open(500), servers[1].open(20)
    servers[0].close(long)
    assert servers[0].load == (0, 0)
    assert least_loaded(servers) is servers[0]
