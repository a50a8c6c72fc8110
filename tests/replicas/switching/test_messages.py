"""Laws of the words that members say during a switch."""

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")
from vllm import SamplingParams

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.engine.lanes.handoff import Handoff
from pengserve.replicas.engine.movers.reshard import Traveller
from pengserve.replicas.switching import messages
from pengserve.replicas.switching.messages import MergeWave, SwitchCodec, SwitchMessage, Word
from tests.replicas.switching.members import plan
from tests.support.vllm_requests import sent_request

WORDS = typing.get_args(Word)
PLAN = plan(1)


def traveller() -> Traveller:
    """A half-decoded request."""
    request = sent_request("r", [1, 2, 3], SamplingParams(max_tokens=7))
    return Traveller("r", 1, [4, 5], Handoff(request, "client", [6, 7], 4), [8], 2, [9])


VALUES: dict[object, object] = {int: 3, str: "no room", list[int]: [1, 2], list[str]: ["a"], list[list[int]]: [[], [7]]}


def word_of(kind: type) -> Word:
    """A word with something in every field."""
    hints = typing.get_type_hints(kind)
    given_fields = {f.name: hints[f.name] for f in msgspec.structs.fields(kind)}
    special = {"plan": PLAN, "travellers": [traveller()]}
    made: Word = kind(**{name: special.get(name, VALUES.get(hint)) for name, hint in given_fields.items()})
    return made


@pytest.mark.parametrize("kind", WORDS, ids=lambda kind: kind.__name__)
def test_every_word_comes_as_it_was_said(kind: type) -> None:
    codec, word = SwitchCodec(), word_of(kind)
    decoded = codec.decode(codec.encode(SwitchMessage("1", word)))
    assert decoded.plan_id == "1" and type(decoded.word) is kind
    again = codec.encode(decoded)
    assert [bytes(part) for part in again] == [bytes(part) for part in codec.encode(SwitchMessage("1", word))]


def test_a_word_has_all_of_its_fields() -> None:
    """None may be left out: a word that means one thing at one change and another at the next would need that."""
    optional = [(kind.__name__, f.name) for kind in WORDS for f in msgspec.structs.fields(kind) if not f.required]
    assert optional == []


def test_the_table_of_words_names_them_all() -> None:
    table = messages.__doc__ or ""
    families = {"Met": "*Met", "Wave": "*Wave", "Done": "*Done"}
    for kind in WORDS:
        ending = next((family for end, family in families.items() if kind.__name__.endswith(end)), kind.__name__)
        assert ending in table, kind.__name__


@given(st.lists(st.binary(max_size=40), max_size=3))
def test_junk_raises_one_error(parts: list[bytes]) -> None:
    with pytest.raises(EngineError, match="no message of a switch"):
        SwitchCodec().decode(parts)


def test_a_word_that_was_cut_or_lacks_a_field_raises_the_same_error() -> None:
    whole = bytes(
        SwitchCodec().encode(SwitchMessage("1", MergeWave(travellers=[], lease=[1], given_up=[], freed=[])))[0]
    )
    lacking = msgspec.msgpack.encode(["1", {"word": "MergeWave", "travellers": []}])
    unknown = msgspec.msgpack.encode(["1", {"word": "Whistle"}])
    for data in (*(whole[:end] for end in range(len(whole))), lacking, unknown):
        with pytest.raises(EngineError, match="no message of a switch"):
            SwitchCodec().decode([data])
