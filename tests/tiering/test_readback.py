"""ReadbackModel: chances against those that observations follow, and what a block gains by its write."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest

from kvoffload.tiering.readback import KINDS, MOST_USES, ReadbackModel, kind_of

CAPACITY = 1_000


def observe(model: ReadbackModel, kind: int, rate: float, seed: int, blocks: int = 20_000) -> None:
    """Blocks that are used again at a constant rate, or wait until twice the disk's capacity."""
    for age in np.random.default_rng(seed).exponential(1 / rate, blocks).astype(int).tolist():
        model.waited(kind, 0, min(age, 2 * CAPACITY), 1)
        if age < 2 * CAPACITY:
            model.reused(kind, age, 1)


def test_kinds_are_distinct() -> None:
    firsts = {kind_of(1, False, parent, depth) for parent in range(MOST_USES + 1) for depth in range(1, 200)}
    others = {kind_of(uses, is_end, 0, 1) for uses in range(1, MOST_USES + 1) for is_end in (False, True)}
    assert len(firsts) == 8 * (MOST_USES + 1)
    assert len(others - firsts) == 2 * MOST_USES - 1
    assert max(firsts | others) == KINDS - 1


@pytest.mark.parametrize("horizon", [CAPACITY, 2 * CAPACITY, 1500])
@pytest.mark.parametrize("uses", [1, 2, 3])
def test_chances_are_those_of_the_observations(seed: int, uses: int, horizon: int) -> None:
    model = ReadbackModel(CAPACITY, 2 * CAPACITY, 0.2)
    kind = kind_of(uses, False, 0, 5)
    observe(model, kind, 0.3 / CAPACITY, seed)
    model.learn(horizon)
    assert model.chances[kind] == pytest.approx(1 - exp(-0.3 * horizon / CAPACITY), rel=0.1)


def test_at_first_all_is_worth_its_write_and_then_what_brings_reads(seed: int) -> None:
    model = ReadbackModel(CAPACITY, 2 * CAPACITY, 0.22)
    assert min(model.gains[1:]) > 0
    used, unused = kind_of(1, False, 0, 5), kind_of(1, True, 0, 5)
    observe(model, used, 1.5 / CAPACITY, seed)
    observe(model, unused, 0.01 / CAPACITY, seed)
    model.learn(CAPACITY)
    assert model.gains[used] > 0 > model.gains[unused]


def test_old_observations_fade(seed: int) -> None:
    model = ReadbackModel(CAPACITY, 2 * CAPACITY, 0.22)
    kind = kind_of(2, False, 0, 1)
    observe(model, kind, 2 / CAPACITY, seed)
    for _ in range(60):
        model.learn(CAPACITY)
    observe(model, kind, 0.05 / CAPACITY, seed)
    model.learn(CAPACITY)
    assert model.chances[kind] == pytest.approx(0.05, abs=0.02)
