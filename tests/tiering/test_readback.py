"""ReadbackModel: chances against those that observations follow, and what a block gains by its write."""

from __future__ import annotations

from itertools import pairwise
from math import exp, log

import numpy as np
import pytest

from kvoffload.cache.tiering.admission import KINDS, MOST_USES, ReadbackModel, kind_of

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


def test_waiting_in_several_steps_is_waiting_as_long() -> None:
    kind, steps = kind_of(2, False, 0, 1), (0, 3, 70, 71, 500, 999, 1700)
    models = [ReadbackModel(CAPACITY, 2 * CAPACITY, 0.2) for _ in range(2)]
    models[0].waited(kind, 0, steps[-1], 50)
    for begin, end in pairwise(steps):
        models[1].waited(kind, begin, end, 50)
    for model in models:
        model.reused(kind, 600, 20)
        model.learn(1.5 * CAPACITY)
    assert models[1].chances[kind] == pytest.approx(models[0].chances[kind], rel=1e-9)


@pytest.mark.parametrize("kind", [kind_of(2, False, 0, 1), kind_of(3, True, 0, 1)])
def test_unread_blocks_count_as_much_as_those_of_which_nothing_is_known(kind: int) -> None:
    """Of which there are eight: as many that were never read halve the rate. Counted once, not by kind and group."""
    model = ReadbackModel(CAPACITY, 2 * CAPACITY, 0.2)
    before = log(1 - model.chances[kind])
    model.waited(kind, 0, 2 * CAPACITY, 8)
    model.learn(CAPACITY)
    assert log(1 - model.chances[kind]) == pytest.approx(before / 2, rel=1e-9)
