"""Laws of the handshake: the token never crosses the wire, and a session begins only where both ends have proven it."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.types.errors import LinkLostError
from pengserve.replicas.channel import handshake
from pengserve.replicas.channel.handshake import Answer, Challenge, Credentials, Hello

OWN = Credentials(protocol="test channel", version=3, token="a-secret-token", fingerprint="model-a")
CLAIM = b"ingress-1"


def shake(connector: Credentials, listener: Credentials) -> tuple[Challenge, Hello, Answer]:
    """The three messages of a handshake."""
    asked = handshake.challenge(listener)
    hello = handshake.respond(connector, asked, CLAIM)
    refusal = handshake.refusal_of(listener, asked, hello)
    answer = Answer(refusal=refusal) if refusal else handshake.accept(listener, asked, hello)
    return asked, hello, answer


def test_two_that_know_the_token_meet_and_it_never_crosses_the_wire() -> None:
    asked, hello, answer = shake(OWN, OWN)
    handshake.verify(OWN, asked, hello, answer)
    for message in (asked, hello, answer):
        assert OWN.token.encode() not in handshake.pack(message)
    assert OWN.token not in repr(OWN), "what a traceback or a log might show"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(OWN, token="a guess"), "wrong channel token"),
        (replace(OWN, token=""), "wrong channel token"),
        (replace(OWN, protocol="another channel"), "wrong channel token"),
        (replace(OWN, fingerprint="model-b"), "model, configuration or version is another one"),
    ],
)
def test_others_are_refused(other: Credentials, why: str) -> None:
    asked, hello, answer = shake(other, OWN)
    assert why in answer.refusal
    with pytest.raises(LinkLostError, match=why):
        handshake.verify(other, asked, hello, answer)


def test_another_version_is_named() -> None:
    with pytest.raises(LinkLostError, match="run the same PengServe everywhere"):
        shake(replace(OWN, version=4), OWN)
    asked = handshake.challenge(OWN)
    hello = handshake.respond(OWN, asked, CLAIM)
    hello.version = 4
    assert "run the same PengServe everywhere" in handshake.refusal_of(OWN, asked, hello)


def test_a_listener_without_the_token_gets_no_session() -> None:
    asked, hello, _ = shake(OWN, OWN)
    impostor = replace(OWN, token="a guess")
    echo = Answer(proof=hello.proof)  # the connector's own proof, sent back
    for answer in (handshake.accept(impostor, asked, hello), echo, Answer()):
        with pytest.raises(LinkLostError, match="does not know the channel token"):
            handshake.verify(OWN, asked, hello, answer)


def test_a_recorded_hello_is_worth_nothing_in_another_connection() -> None:
    _, hello, _ = shake(OWN, OWN)
    assert handshake.refusal_of(OWN, handshake.challenge(OWN), hello) == "wrong channel token"


@pytest.mark.parametrize("name", ["nonce", "fingerprint", "claim"])
def test_no_field_can_be_changed_on_the_way(name: str) -> None:
    asked = handshake.challenge(OWN)
    hello = handshake.respond(OWN, asked, CLAIM)
    value = getattr(hello, name)
    setattr(hello, name, "model-b" if isinstance(value, str) else bytes(len(value)))
    assert handshake.refusal_of(OWN, asked, hello) == "wrong channel token"


def test_a_short_nonce_is_refused_on_both_sides() -> None:
    with pytest.raises(LinkLostError, match="another length"):
        handshake.respond(OWN, Challenge(OWN.version, b""), CLAIM)
    asked = handshake.challenge(OWN)
    hello = handshake.respond(OWN, asked, CLAIM)
    hello.nonce = b""
    hello.proof = handshake._proof(OWN, b"connector", asked, hello)
    assert handshake.refusal_of(OWN, asked, hello)


@given(st.binary(max_size=300), st.sampled_from([Challenge, Hello, Answer]))
def test_noise_is_a_lost_link_or_a_message_that_is_refused(noise: bytes, kind: type[msgspec.Struct]) -> None:
    try:
        message = handshake.unpack(noise, kind)
    except LinkLostError:
        return
    if isinstance(message, Hello):
        assert handshake.refusal_of(OWN, handshake.challenge(OWN), message)


@given(st.binary(min_size=4, max_size=4))
def test_no_length_beyond_the_limit_is_believed(head: bytes) -> None:
    size = int.from_bytes(head, "little")
    if 0 < size <= handshake.MAX_HANDSHAKE_BYTES:
        assert handshake.size_of(head) == size
    else:
        with pytest.raises(LinkLostError):
            handshake.size_of(head)
