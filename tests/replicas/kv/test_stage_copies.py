"""KV goes to the host and comes back beside a stage's steps, and every byte is as if each copy were made at once."""

import random
from collections.abc import Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pengserve.replicas.kv.copies import Copy
from pengserve.replicas.kv.stage_rows import StageRows, Swap, stage_rows_in_row
from tests.replicas.kv.tiered_world import BLOCK_SIZE, TOKEN_BYTES, TieredWorld

LAYERS, STAGES, NUM_BLOCKS, HOST_BLOCKS = 4, ((0, 2), (2, 4)), 40, 20
BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES


class Stage:
    """The first stage, and a second account of what its blocks and rows hold, in which each copy is made at once."""

    def __init__(self, link_bytes_per_s: float = 0.0) -> None:
        self.world = TieredWorld(LAYERS, 8, HOST_BLOCKS, 4, link_bytes_per_s)
        self.kv = torch.randint(0, 256, (2, NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
        memory: Any = SimpleNamespace(kv=lambda layer: self.kv[layer])
        self.rows = StageRows(self.world.tiers, memory, STAGES[0], stage_rows_in_row(LAYERS, STAGES))
        self.blocks = self.kv.clone()
        self.saved: dict[int, torch.Tensor] = {}
        self.was_beside = 0  # times that a copy was under way after its swap had begun

    def swap(self, blocks: list[int], rows: list[int], *, to_host: bool, number: int = 0) -> None:
        self.rows.swap(Swap(blocks, rows, to_host=to_host, number=number))
        for block, row in zip(blocks, rows, strict=True):
            if to_host:
                self.saved[row] = self.blocks[:, block].clone()
            else:
                self.blocks[:, block] = self.saved[row]
        self.was_beside += len(self.rows.copies) > 0

    def step(self, blocks: list[int]) -> None:
        """A microbatch reads these blocks, and then writes them."""
        self.rows.wait_for(blocks)
        assert torch.equal(self.kv[:, blocks], self.blocks[:, blocks])
        self.kv[:, blocks] = self.blocks[:, blocks] = torch.randint(0, 256, (2, len(blocks), 1), dtype=torch.uint8)

    def check(self) -> None:
        assert self.rows.copies.check() == () and self.world.tiers.check() == ()

    def close(self) -> None:
        self.rows.copies.wait_all()
        self.check()
        assert torch.equal(self.kv, self.blocks)
        self.rows.give_all()
        self.world.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


@pytest.mark.parametrize("seed", range(4))
def test_swaps_beside_steps_give_the_bytes_of_swaps_at_once(seed: int) -> None:
    rng, number = random.Random(seed), 0
    stage = Stage(rng.choice([2e7, 1e8]))
    for _ in range(250):
        count = rng.randint(1, 12)
        blocks = rng.sample(range(1, NUM_BLOCKS), count)
        match rng.randrange(3):
            case 0:
                stage.swap(blocks, rng.sample(range(2 * HOST_BLOCKS), count), to_host=True)
            case 1 if len(stage.saved) >= count:
                number += 1
                stage.swap(blocks, rng.sample(sorted(stage.saved), count), to_host=False, number=number)
            case _:
                stage.step(blocks[:3])
        stage.check()
    assert stage.was_beside > 20, "copies ran beside what came after them"
    stage.rows.copies.wait_all()
    assert stage.rows.copies.num_come == number
    for row, kept in stage.saved.items():
        number += 1
        stage.swap([1], [row], to_host=False, number=number)
        stage.rows.wait_for([1])
        assert torch.equal(stage.kv[:, 1], kept)
    stage.close()


def test_a_microbatch_waits_for_the_blocks_that_it_takes_and_for_no_others(stage: Stage) -> None:
    """vLLM hands out the last blocks of a request first: these have left before the others."""
    engine, gate = stage.world.tiers.engine, Event()
    move = engine._move_piece

    def gated(copy: Copy) -> None:
        if 1 in copy.blocks:
            assert gate.wait(60)
        move(copy)

    engine._move_piece = gated  # type: ignore[method-assign]
    blocks = list(range(1, 29))
    stage.swap(blocks, blocks, to_host=True)
    stage.step(blocks[-2:])
    stage.step([30, 31])
    assert len(stage.rows.copies) > 0, "the first blocks have not left"
    gate.set()
    stage.step(blocks[:2])


def test_what_comes_waits_for_what_goes_to_its_rows(stage: Stage) -> None:
    for number in range(1, 30):
        stage.swap([1, 2, 3], [4, 5, 6], to_host=True)
        stage.swap([7, 8, 9], [4, 5, 6], to_host=False, number=number)
        stage.step([7, 8, 9, 1])
