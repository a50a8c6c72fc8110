"""Laws of the comparison of matrix products."""

import pytest

torch = pytest.importorskip("torch")

from benchmarks.gemm import WAYS, Weight, demo_step, faster_from, measure, products, report  # noqa: E402
from pengserve.replicas.memory.packed_weights import pack_in_place  # noqa: E402


@pytest.mark.parametrize("num_rows", [1, 3, 4, 64])
def test_both_plain_ways_compute_the_same(num_rows: int) -> None:
    x, weight = torch.randn(num_rows, 96), torch.randn(160, 96)
    (ours,), (theirs,) = (ways for name, ways in products([weight]).items() if name != "packed")
    torch.testing.assert_close(ours(x), theirs(x))


def test_packed_weights_are_a_way_of_their_own_where_they_can_be() -> None:
    weights = [torch.randn(192, 128), torch.randn(192, 128)]
    if pack_in_place(weights[0].clone()) is None:
        pytest.skip("this CPU's packed weights have another size")
    assert tuple(products(weights)) == WAYS
    assert tuple(products([torch.randn(160, 96).t()])) == WAYS[:2]


@pytest.mark.parametrize(
    ("onednn_s", "expected"),
    [((2.0, 0.5, 0.5), 2), ((0.5, 2.0, 0.5), 4), ((0.5, 0.5, 0.5), 1), ((0.5, 0.5, 2.0), None), ((2.0, 1.0, 0.9), 4)],
)
def test_one_is_faster_from_where_it_is_never_slower_again(onednn_s: tuple[float, ...], expected: int | None) -> None:
    times = {num_rows: (1.0, seconds) for num_rows, seconds in zip((1, 2, 4), onednn_s, strict=True)}
    assert faster_from(times) == expected


def test_a_run_has_a_time_of_each_way_for_each_number_of_rows() -> None:
    weight = Weight(name="some", num_outputs=64, num_inputs=32)
    times = measure(weight, rows=(1, 8), min_s=0.0)
    assert list(times) == [1, 8]
    assert all(linear_s > 0 and onednn_s > 0 for linear_s, onednn_s, _ in times.values())


def test_the_table_has_a_line_for_each_weight() -> None:
    weights = [Weight(name=name, num_outputs=64, num_inputs=32) for name in ("first", "second")]
    text = report({weight: {1: (10e-6, 20e-6, 9e-6), 8: (30e-6, 20e-6, 10e-6)} for weight in weights}, 0.5)
    assert "| first | 64 x 32 | 10.0 / 20.0 / 9.0 | 30.0 / 20.0 / 10.0 | 8 |" in text.splitlines()
    assert text.count("64 x 32") == 2


def test_a_step_is_all_of_its_products() -> None:
    counts = {"first": 4, "second": 1, "of another model": 0}
    weights = [Weight(name=name, num_outputs=64, num_inputs=32, num_in_step=n) for name, n in counts.items()]
    assert demo_step({weight: {1: (1.0, 2.0, 0.5), 8: (3.0, 4.0, 0.25)} for weight in weights}) == {
        1: (5.0, 10.0, 2.5),
        8: (15.0, 20.0, 1.25),
    }
