"""Laws of what all benchmarks begin with."""

import io
import random
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import harness
from benchmarks.fly.load import Plan as FlyPlan
from benchmarks.harness import Stolen, degrees, engine_flags, has_model, option_parser, text
from benchmarks.overhead.plan import Plan as OverheadPlan
from benchmarks.switch.measure import Plan as SwitchPlan


def test_a_change_replaces_its_flag_in_place_and_leaves_the_others() -> None:
    changed = engine_flags(max_num_seqs=4)
    assert changed == {**engine_flags(), "max_num_seqs": 4}
    assert list(changed) == list(engine_flags())  # results print them in this order


def test_benchmarks_differ_in_the_flags_that_their_loads_call_for_and_in_no_other() -> None:
    common = engine_flags()
    plans = [plan(model=Path("model")) for plan in (OverheadPlan, SwitchPlan, FlyPlan)]
    changes = [{name: value for name, value in plan.engine.items() if common[name] != value} for plan in plans]
    assert changes == [{"max_num_batched_tokens": 2048}, {"kv_cache_memory_bytes": 128 << 20, "max_num_seqs": 64}, {}]


def test_plans_do_not_share_their_flags() -> None:
    assert FlyPlan(model=Path("one")).engine is not FlyPlan(model=Path("other")).engine


@pytest.mark.parametrize(("num_instances", "expected"), [(1, ()), (2, (2,)), (3, (2,)), (4, (2, 4)), (8, (2, 4, 8))])
def test_groups_are_powers_of_two_within_the_cluster(num_instances: int, expected: tuple[int, ...]) -> None:
    assert degrees(num_instances) == expected


def test_a_text_has_its_length_and_follows_from_its_source() -> None:
    assert len(text(random.Random(1), 30).split()) == 30
    assert text(random.Random(1), 30) == text(random.Random(1), 30) != text(random.Random(2), 30)


def test_every_benchmark_takes_a_model_and_a_folder(tmp_path: Path) -> None:
    options = option_parser("some", None).parse_args(["--model", "m", "--output", str(tmp_path)])
    assert (options.model, options.output) == (Path("m"), tmp_path)


def test_a_folder_without_a_model_is_told_and_not_measured(tmp_path: Path) -> None:
    said = io.StringIO()
    assert not has_model(tmp_path, Console(file=said, width=200))
    assert f"{tmp_path} holds no model: give another --model" in said.getvalue()
    (tmp_path / "config.json").touch()
    assert has_model(tmp_path, Console(file=said))


def test_what_the_host_gave_to_others_is_a_share_of_all_time_since_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(harness, "CORE_TIMES", stat)
    stat.write_text("cpu  100 0 50 800 0 0 0 50 7 0\ncpu0 1 1 1\n")
    clock = Stolen()
    assert clock.share() == 0.0
    stat.write_text("cpu  160 0 60 820 0 0 0 60 7 0\ncpu0 1 1 1\n")
    assert clock.share() == pytest.approx(0.1)
    stat.unlink()
    assert Stolen().share() == 0.0  # another system
