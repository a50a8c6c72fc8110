"""Which long answer gives way to a prompt that waits for memory, and when it goes on."""

import pytest

from pengserve.planners.long_answers import Answer, GivingWay, gives_way, goes_on, has_waited

RULES = GivingWay(min_tokens=100, max_preemptions=2, worth=2.0, again=4.0, spare=0.1, wait_s=0.01)
MISSING = 10


def answer(num_tokens: int = 500, num_blocks: int = 40, num_preemptions: int = 0, num_computed: int = 400) -> Answer:
    return Answer(num_tokens, num_computed, num_blocks, num_preemptions)


def test_the_longest_answer_gives_way() -> None:
    assert gives_way([answer(200), answer(900), answer(300)], MISSING, RULES) == 1


def test_of_equal_ones_the_first() -> None:
    assert gives_way([answer(200), answer(300), answer(300)], MISSING, RULES) == 1


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(answer(num_tokens=100), id="short"),
        pytest.param(answer(num_blocks=19), id="frees little more than is missing"),
        pytest.param(answer(num_preemptions=3), id="was preempted too often"),
        pytest.param(answer(num_computed=2001), id="has a long prompt"),
    ],
)
def test_none_gives_way_for_little(kept: Answer) -> None:
    assert gives_way([kept], MISSING, RULES) is None
    assert gives_way([kept, answer(101, 20, 2, 404)], MISSING, RULES) == 1, "at the limits"


def test_no_answer_no_victim() -> None:
    assert gives_way([], MISSING, RULES) is None


def test_it_goes_on_with_room_to_spare() -> None:
    assert goes_on(31, 20, 100, RULES)
    assert not goes_on(30, 20, 100, RULES), "what others generate would take its memory away again"


def test_it_waits_the_longer_the_longer_its_answer_is() -> None:
    assert has_waited(200, 2.01, RULES)
    assert not has_waited(200, 1.99, RULES)
    assert not has_waited(400, 2.01, RULES)
