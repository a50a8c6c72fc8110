"""The TTFT that is learned: a line through what came lately, by shape."""

import random

import pytest

from pengserve.planners.ttft import MAX_SHAPES, MIN_SEEN, TtftModel


def taught(base_s: float = 0.05, token_s: float = 0.001, noise: float = 0.0, count: int = 100) -> TtftModel:
    source, model = random.Random(1), TtftModel()
    for _ in range(count):
        tokens = source.randrange(10, 4000)
        model.learn("dp", tokens, (base_s + token_s * tokens) * source.uniform(1 - noise, 1 + noise))
    return model


def test_a_line_is_found() -> None:
    assert taught().predict("dp", 2000) == pytest.approx(2.05)
    assert taught(noise=0.2).predict("dp", 2000) == pytest.approx(2.05, rel=0.05)


def test_little_seen_predicts_nothing() -> None:
    assert taught(count=MIN_SEEN - 1).predict("dp", 100) is None
    assert taught().predict("tp2", 100) is None


def test_equal_prompts_predict_their_mean_and_no_slope() -> None:
    model = TtftModel()
    for number in range(50):
        model.learn("dp", 100, 0.1 + 0.01 * (number % 2))
    assert model.predict("dp", 100) == pytest.approx(0.105, abs=0.001)
    assert model.predict("dp", 10**6) == pytest.approx(0.105, abs=0.001)


def test_more_to_compute_is_never_predicted_sooner() -> None:
    model = TtftModel()
    for number in range(50):
        model.learn("dp", number * 10, 1.0 - number * 0.01)
    assert model.predict("dp", 10) == model.predict("dp", 10_000) == pytest.approx(0.75, abs=0.1)


def test_it_follows_the_machine() -> None:
    model, source = taught(token_s=0.001), random.Random(2)
    for _ in range(2000):
        tokens = source.randrange(10, 4000)
        model.learn("dp", tokens, 0.05 + 0.003 * tokens)
    assert model.predict("dp", 1000) == pytest.approx(3.05, rel=0.02)


def test_shapes_are_bounded() -> None:
    model = TtftModel()
    for number in range(10 * MAX_SHAPES):
        model.learn(f"s{number}", 1, 1.0)
    assert len(model._lines) == MAX_SHAPES
