"""The generator of hostile requests is deterministic; what the ingress's own checks do with its requests is cheap."""

import pytest

from tests.support.hostile import KINDS, hostile_request, hostile_requests
from tests.support.hostile_sending import to_bytes


def test_a_seed_and_an_index_give_the_same_request_again() -> None:
    first = list(hostile_requests(seed=3, count=60))
    assert first == [hostile_request(3, index) for index in range(60)]
    assert first != list(hostile_requests(seed=4, count=60))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_asked_for_and_is_one_http_request(kind: str) -> None:
    for request in hostile_requests(seed=5, count=20, kinds=(kind,)):
        assert request.kind == kind
        head, _, body = to_bytes(request).partition(b"\r\n\r\n")
        assert head.startswith(request.method.encode() + b" ") and body == request.body
