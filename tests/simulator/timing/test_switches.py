"""Costs of switches and starts come out as their sources have them."""

import pytest

from pengserve.simulator.hardware.catalog import gpu, model
from pengserve.simulator.timing.choose import costs
from pengserve.simulator.timing.switches import latencies, switch_costs


def test_dropping_half_of_kunserve_s_model_takes_its_five_milliseconds():
    half = model("qwen2.5-14b").weight_bytes // 2
    assert switch_costs(gpu("a800")).remap_s(half, 24) == pytest.approx(5e-3, rel=0.02)


def test_on_a_cpu_a_layer_is_one_call():
    assert switch_costs(gpu("cpu")).remap_s(336 << 20, 7) == pytest.approx(0.38e-3, rel=0.01)


def test_moving_nothing_costs_nothing():
    assert switch_costs(gpu("h200")).remap_s(0, 10) == 0.0


@pytest.mark.parametrize(("copies", "measured_s"), [(1, 146.54), (2, 211.97), (4, 292.38)])
def test_cold_starts_are_within_six_percent_of_flying_serving_s(copies, measured_s):
    assert switch_costs(gpu("h200")).start_s(model("llama3-70b"), copies) == pytest.approx(measured_s, rel=0.06)


def test_every_row_says_where_it_is_from():
    data = costs()
    rows = [
        data["host"],
        data["links"],
        *(row for part in ("remap", "cutover", "start") for row in data[part].values()),
    ]
    assert all(len(row["source"]) > 20 for row in rows)


def test_latencies_are_microseconds():
    found = latencies()
    assert all(1e-6 < seconds < 1e-4 for seconds in (found.nvlink_s, found.nic_s, found.pcie_s))
