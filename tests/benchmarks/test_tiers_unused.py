"""What an unused host tier costs: pairs of bursts become ratios, and the law is read off them."""

from pathlib import Path

import pytest

from benchmarks.tiers.unused import LAYOUTS, Burst, Plan, gap_ratio, is_met, markdown

STARTS, PAIRS = 2, 3


def bursts(**factors: float) -> list[Burst]:
    """With a host tier a step takes `factors[layout]` times as long; some pairs come while the machine is slow."""
    found = []
    for layout in LAYOUTS:
        for start in range(STARTS):
            for index in range(PAIRS):
                slow = 1.0 + 3.0 * (index == 1)
                for has_host_tier in (True, False) if index % 2 else (False, True):
                    gap_s = 0.01 * slow * (factors.get(layout, 1.0) if has_host_tier else 1.0)
                    found.append(
                        Burst(
                            start=start,
                            layout=layout,
                            index=index,
                            has_host_tier=has_host_tier,
                            cpu_s=gap_s,
                            gap_s=gap_s,
                            tokens_per_s=1 / gap_s,
                        )
                    )
    return found


def test_a_pair_is_compared_within_itself() -> None:
    found = bursts(pp2=1.5)
    assert [gap_ratio(found, layout) for layout in LAYOUTS] == pytest.approx([1.0, 1.0, 1.5])


@pytest.mark.parametrize(("factors", "holds"), [({}, True), ({"tp2": 1.019}, True), ({"pp2": 1.03}, False)])
def test_each_layout_has_to_keep_the_limit(factors: dict[str, float], holds: bool) -> None:
    assert is_met(bursts(**factors)) == holds


def test_the_table_has_a_row_for_each_layout() -> None:
    plan = Plan(model=Path("/models/tiny-1"), starts=STARTS, pairs=PAIRS)
    rows = [line for line in markdown(plan, bursts(dp=1.1), "2026-11-28").splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == list(LAYOUTS)
    assert "1.100 (1.100 to 1.100)" in rows[0] and rows[0].endswith("no |")
    assert rows[1].endswith("yes |")


def test_both_clusters_get_the_same_bursts() -> None:
    plan = Plan(model=Path("/models/tiny-1"), starts=1, pairs=1)
    assert plan.burst(3) == plan.burst(3) != plan.burst(4)
    assert len(plan.burst(0)) == plan.requests
