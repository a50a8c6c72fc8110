"""The committed step tables are what the measured ones give."""

from pathlib import Path

import pytest

from benchmarks.step_tables.__main__ import OUTPUT, main

PROFILES = Path(__file__).parents[2].parent / "shared" / "profiles"


@pytest.mark.skipif(not PROFILES.exists(), reason="the measured tables are not here")
def test_the_committed_tables_are_made_again_byte_by_byte(tmp_path, monkeypatch):
    again = tmp_path / "coefficients.csv"
    monkeypatch.setattr("sys.argv", ["step_tables", str(PROFILES), "--output", str(again)])
    assert main() == 0
    assert again.read_bytes() == OUTPUT.read_bytes()
