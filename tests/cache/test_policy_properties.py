"""Any course of requests: each policy gives up what its oracle does, and asking or being refused changes nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policy_oracles import ACTIONS, PAIRS, SideBySide, Step
from policy_steps import KEYS, STEPS

EXAMPLES = 75


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(capacity=st.integers(1, 14), steps=st.lists(STEPS, max_size=40))
def test_any_steps_give_up_what_the_oracle_gives_up(name: str, capacity: int, steps: list[Step]) -> None:
    pair = SideBySide(name, capacity)
    for step in steps:
        pair.take(step)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("capacity", [7, 40])
def test_long_courses_give_up_what_the_oracle_gives_up(name: str, capacity: int, seed: int) -> None:
    """Keys asked for again soon, late and never, so that ghosts come back and counters fill."""
    chance = random.Random(seed)
    pair = SideBySide(name, capacity)
    for moment in range(700):
        size = chance.randint(1, max(2, capacity // 4))
        base = chance.choice([0, 0, chance.randrange(3 * capacity), 10_000 + 20 * moment])
        keys = tuple(b"%d" % number for number in range(base, base + size))
        protected = frozenset(key for key in pair.policy if chance.random() < chance.choice([0, 0.1, 0.9]))
        pair.take(Step(chance.choice(ACTIONS), keys, protected, chance.randint(0, capacity // 2)))


@pytest.mark.parametrize("name", PAIRS)
def test_the_driver_notices_a_policy_that_gives_up_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above cannot pass for want of comparing."""
    pair = SideBySide(name, 4)
    pair.take(Step("store", tuple(KEYS[:4]), frozenset(), 0))
    answer = pair.policy.victims

    def reordered(*arguments: object) -> list[bytes]:
        return (answer(*arguments) or [])[::-1]  # type: ignore[arg-type]

    monkeypatch.setattr(pair.policy, "victims", reordered)
    with pytest.raises(AssertionError):
        pair.take(Step("ask", (), frozenset(), 2))
