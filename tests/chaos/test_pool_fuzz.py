"""Four engines in processes of their own, one pool, random calls, and a model of what each may find."""

from __future__ import annotations

from collections import Counter

import exhaust_pool
import pytest
from fuzz_pool import ROUNDS

HITS = ("loaded", "loaded behind", "fetched", "leased")


def checked(found: tuple[Counter[str], list[str]], rounds: int) -> Counter[str]:
    counts, wrong = found
    print(dict(counts))
    assert wrong == []
    assert counts["rounds"] == rounds
    assert sum(counts[what] for what in HITS) > 2 * rounds
    return counts


def test_every_answer_is_what_a_model_says(seed: int) -> None:
    """With the policy "lru": calls one after another, whose answers the model knows exactly, and at the same time."""
    assert ROUNDS[1:3] == (("lru", False), ("lru", True))
    checked(exhaust_pool.fuzz(2, seed % 100_000 * len(ROUNDS) + 1, steps=60, seconds=60.0), 2)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_policy_and_both_orders(seed: int) -> None:
    rounds = 2 * len(ROUNDS)
    counts = checked(exhaust_pool.fuzz(rounds, seed % 100_000, lanes=2, steps=300, seconds=200.0), rounds)
    for what in ("engines killed", "engines left", "owners"):
        assert counts[what] > 5, what
