"""Laws of rows that the host tier of `dp` lends to a pipeline's stage: none has two users, and all come back."""

import random

import numpy as np
import pytest
import torch

from pengserve.replicas.kv.host_tier import HostTier, LentRows

LAYERS, ROWS, BLOCK = 5, 10, 16
SHAPES = [(1, 5), (2, 2), (2, 1), (3, 1), (5, 1)]  # layers of a stage, and its rows on one of the host


class Shared:
    """A host tier, and a second account of who has put what where on it."""

    def __init__(self, num_layers: int, per_row: int) -> None:
        self.host = HostTier(LAYERS, ROWS, BLOCK)
        self.num_layers = num_layers
        self.stages = [LentRows(self.host, num_layers, per_row)]  # the last one runs; others have handed over
        self.kept: dict[int, int] = {}  # row of `dp` -> what it holds
        self.taken: list[dict[int, int]] = [{}]  # of each stage: row -> what it holds
        self._stamp = 0

    @property
    def stage(self) -> LentRows:
        return self.stages[-1]

    def stamp(self) -> int:
        self._stamp = (self._stamp + 1) % 250
        return self._stamp + 1

    def keep(self, count: int) -> None:
        """`dp` takes rows, and writes to them."""
        for row in self.host.take(count).tolist():
            self.kept[row] = self.stamp()
            self.host.memory[:, row] = self.kept[row]

    def take(self, count: int) -> None:
        """The stage takes rows, and writes to them."""
        for row in self.stage.take(count).tolist():
            value = self.taken[-1][row] = self.stamp()
            for layer in range(self.num_layers):
                self.stage.cells[torch.from_numpy(self.stage.at(layer, np.array([row])))] = value

    def give(self, count: int, rng: random.Random) -> None:
        rows = rng.sample(sorted(self.taken[-1]), count)
        self.stage.give(rows)
        for row in rows:
            del self.taken[-1][row]

    def hand_over(self) -> None:
        other = self.stage.hand_over()
        assert self.stage.num_rows == self.stage.num_free == 0 and not len(self.stage.rows())
        self.stages.insert(-1, other)
        self.taken.append({})

    def check(self) -> None:
        host, lent = self.host, set[int]()
        assert sorted([*self.kept, *host.free_rows, *host.lent_rows]) == list(range(ROWS)), "each row has one owner"
        assert host.num_free == len(host.free_rows)
        used = list[int]()
        for stage, taken in zip(self.stages, self.taken, strict=True):
            rows = stage.rows()
            assert rows.tolist() == sorted([*stage.free_rows, *taken]), "each row is free or taken"
            assert (stage.num_rows, stage.num_free) == (len(rows), len(rows) - len(taken))
            assert stage.free_rows == sorted(stage.free_rows) and (rows < stage.most_rows).all()
            for layer in range(self.num_layers):
                places = stage.at(layer, rows)
                used += places.tolist()
                lent.update((places % ROWS).tolist())
                values = stage.cells[torch.from_numpy(stage.at(layer, np.array(list(taken), dtype=np.int64)))]
                assert (values == torch.tensor(list(taken.values())).view(-1, 1)).all(), "it holds what was written"
        assert len(set(used)) == len(used) and all(0 <= place < LAYERS * ROWS for place in used)
        assert sorted(lent) == host.lent_rows
        for row, value in self.kept.items():
            assert (host.memory[:, row] == value).all(), "what `dp` keeps is as it was"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_no_place_has_two_users_whatever_is_lent_and_comes_back(shape: tuple[int, int], seed: int) -> None:
    rng, shared = random.Random(seed), Shared(*shape)
    for _ in range(300):
        stage, host = shared.stage, shared.host
        match rng.randrange(8):
            case 0:
                shared.keep(rng.randint(0, min(3, host.num_free)))
            case 1:
                rows = rng.sample(sorted(shared.kept), rng.randint(0, len(shared.kept)))
                host.give(rows)
                for row in rows:
                    del shared.kept[row]
            case 2:
                before, free = stage.num_rows, host.num_free
                stage.borrow()
                assert host.num_free == 0 and stage.num_rows == before + free * stage.per_row
            case 3:
                shared.take(rng.randint(0, stage.num_free))
            case 4:
                shared.give(rng.randint(0, len(shared.taken[-1])), rng)
            case 5:
                stage.give_back()
                groups = {row // stage.per_row for row in shared.taken[-1]}
                assert stage.num_rows == len(groups) * stage.per_row, "what is lent still has a row in use"
            case 6 if len(shared.stages) == 1:
                shared.hand_over()
            case 7 if len(shared.stages) == 2:
                shared.stages.pop(0).give_all()
                shared.taken.pop(0)
        shared.check()
    for stage in shared.stages:
        stage.give_all()
        assert stage.num_rows == stage.num_free == 0 and not len(stage.rows())
    assert not shared.host.lent_rows and shared.host.num_free == ROWS - len(shared.kept)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_cleared_in_all_layers_and_no_others(shape: tuple[int, int]) -> None:
    shared = Shared(*shape)
    shared.keep(3)
    shared.stage.borrow()
    shared.take(shared.stage.num_free)
    cleared = list(shared.taken[-1])[::2]
    shared.stage.clear(np.array(cleared))
    shared.taken[-1].update(dict.fromkeys(cleared, 0))
    shared.check()


def test_rows_lie_on_as_few_of_the_host_as_can_be() -> None:
    """What is left goes back to `dp`."""
    shared = Shared(2, 2)
    shared.stage.borrow()
    shared.take(4)
    shared.stage.give_back()
    assert shared.stage.num_rows == 4 and shared.host.num_free == ROWS - 2
    shared.check()
