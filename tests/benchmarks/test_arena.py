"""The arena benchmark moves what it says, in as few calls as it can be done, and reports it."""

import pytest

from benchmarks.arena import NUM_LAYERS, Setup, baselines, measure, report
from pengserve.planners.types.units import MIB

ARENA = 63 * MIB
CHUNK = MIB // 4
HALF = NUM_LAYERS // 2


@pytest.mark.parametrize("is_scattered, calls_a_layer", [(False, 1), (True, ARENA // CHUNK * 2 // 3 // NUM_LAYERS)])
def test_half_the_layers_move(is_scattered: bool, calls_a_layer: int) -> None:
    figures = measure(Setup(chunk_bytes=CHUNK, is_scattered=is_scattered), ARENA, 2)
    assert figures.moved_bytes == ARENA // 3
    assert (figures.calls.map_calls, figures.calls.unmap_calls) == (HALF * calls_a_layer, HALF)
    for values in (figures.drop_s, figures.restore_s, figures.first_touch_s, figures.second_touch_s):
        assert len(values) == 2


@pytest.mark.slow
def test_the_report_has_a_row_for_each_setup() -> None:
    small = Setup(chunk_bytes=CHUNK, huge_pages=False, populate=False)
    setups = [Setup(chunk_bytes=2 * MIB), small, Setup(chunk_bytes=CHUNK, is_scattered=True)]
    text = report({setup: measure(setup, 2 * ARENA, 1) for setup in setups}, baselines(MIB, 2), 2 * ARENA, 0.0)
    assert "| 2.0 MiB |" in text and "| 42.0 MiB | 7, 7 |" in text
    assert "| 4.0 KiB | as touched | 256.0 KiB |" in text
    assert text.count("| 256.0 KiB |") == 2
    assert "at most" in text and "copy 1.0 MiB" in text
