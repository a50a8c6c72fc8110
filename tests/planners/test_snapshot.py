"""What instances tell of their load."""

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from pengserve.planners.types.snapshot import InstanceStats


def test_stats_of_named_values_are_those_of_the_constructor():
    values = {"step": 3, "num_running": 2, "shape": "tp2", "last_step_s": 0.5}
    found = InstanceStats.of(values)
    assert found == InstanceStats(**values)
    assert replace(found, step=0, num_running=0, shape="dp", last_step_s=0.0) == InstanceStats()
    assert pickle.loads(pickle.dumps(found)) == found
    assert InstanceStats.of({}) == InstanceStats(), "what was given before is not kept"


def test_stats_have_no_other_fields():
    with pytest.raises(TypeError, match="num_walking"):
        InstanceStats.of({"num_walking": 1})


def test_stats_do_not_change():
    with pytest.raises(FrozenInstanceError):
        InstanceStats.of({"step": 1}).step = 2
