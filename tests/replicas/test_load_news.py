"""When a step's load is told: at once where anything but running requests' tokens has changed, else now and then."""

from pengserve.replicas.load_news import EVERY_S, LoadNews


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_first_step_and_each_change_are_told_at_once() -> None:
    news = LoadNews(Clock())
    assert news.is_due((0, "dp", 0))
    assert not news.is_due((0, "dp", 0))
    for change in ((1, "dp", 0), (1, "tp2", 0), (1, "tp2", 1)):
        assert news.is_due(change) and not news.is_due(change)


def test_without_a_change_it_is_told_again_after_a_while() -> None:
    clock = Clock()
    news = LoadNews(clock)
    told = []
    for _ in range(100):
        told.append(news.is_due("same"))
        clock.now_s += EVERY_S / 3.9
    assert told[:9] == [True, False, False, False, True, False, False, False, True] and sum(told) == 25


def test_untold_steps_are_counted() -> None:
    news = LoadNews(Clock())
    assert news.is_due("a") and news.num_untold == 0
    assert not news.is_due("a") and not news.is_due("a") and news.num_untold == 2
    assert news.is_due("b") and news.num_untold == 0
