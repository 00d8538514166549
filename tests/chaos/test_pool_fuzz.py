"""Four engines in processes of their own, one pool, random calls, and a model of what each may find."""

from __future__ import annotations

from collections import Counter

import exhaust_pool
import pytest
from fuzz_pool import ROUNDS

HITS = ("loaded", "loaded behind", "fetched", "leased")


def checked(rounds: int, number: int, **options: int | float) -> Counter[str]:
    """Counts; fewer than so many rounds where the machine is too busy for them."""
    counts, wrong = exhaust_pool.fuzz(rounds, number, **options)  # type: ignore[arg-type]
    print(dict(counts))
    assert wrong == []
    assert counts["rounds"] >= 1
    return counts if counts["rounds"] == rounds else Counter()


def test_every_answer_is_what_a_model_says(seed: int) -> None:
    """With the policy "lru": calls one after another, whose answers the model knows exactly, and at the same time."""
    assert ROUNDS[1:3] == (("lru", False), ("lru", True))
    counts = checked(2, seed % 100_000 * len(ROUNDS) + 1, steps=150, seconds=30.0)
    assert not counts or sum(counts[what] for what in HITS) > 10


def test_keys_on_a_disk_that_outlives_its_owners_are_those_that_nobody_has_removed(seed: int) -> None:
    """The disk is slow, and owners are killed and closed meanwhile."""
    assert ROUNDS[9] == ("disk", False)
    counts = checked(1, seed % 100_000 * len(ROUNDS) + 9, steps=60, seconds=30.0)
    assert not counts or sum(counts[what] for what in HITS) > 5


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_policy_in_both_orders(seed: int) -> None:
    counts = checked(2 * len(ROUNDS), seed % 100_000, lanes=2, steps=200, seconds=45.0)
    for what in (*HITS, "engines killed", "engines left", "owners"):
        assert not counts or counts[what] > 5, what
