"""Four engines in processes of their own, one pool, random calls, and a model of what each may find."""

from __future__ import annotations

from collections import Counter

import exhaust_pool
import pytest
from exhausting import go_on_for
from fuzz_pool import ROUNDS, Engine, Round, Step, command

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


def put(made: Round, engine: Engine) -> Step:
    yield from made.reserve(engine)
    ((number, written),) = engine.reserved.items()
    made.judge.begun(*written)
    yield command("commit", number, copy=written)
    made.judge.commit((engine.number, "reservation", number))
    engine.reserved.clear()


@pytest.mark.parametrize("policy", ["lru", "prefix"])
def test_models_allow_what_leases_hold_without_an_owner(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what another engine has removed; until the same engine removes keys."""
    made = Round(seed, policy, together=False, engines=2)
    monkeypatch.setattr(made, "some", lambda _: [0])
    one, two = made.engines
    try:
        for each, step in (
            (one, put(made, one)),
            (one, made.lease(one, [0])),
            (two, made.remove(two)),
            (two, put(made, two)),
        ):
            made.do(each, step)
        made.owner.kill()
        made.judge.lose_owner()
        for each in (one, two):
            made.do(each, made.one(command("lost")))
            made.do(each, made.lease(each, [0]))
            made.do(each, made.load(each, [0]))
        assert (len(one.leased), len(two.leased)) == (2, 0)
        made.do(one, made.remove(one))
        made.do(one, made.lease(one, [0]))
        assert len(one.leased) == 2
    finally:
        made.close()


def test_a_summary_counts_as_hangs_what_hangs(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the functions of a traceback are called."""
    wrong = (
        'Traceback (most recent call last):\n  File "fuzz.py", in exchange_owner\n    hang()\nAssertionError: changed'
    )
    found = [wrong, wrong, "lane of seed 7 does not end", f"{wrong}: engine 3 hangs", "does not agree"]
    assert go_on_for(1.0, "pools", [lambda _: (Counter(), found)], 1) == 1
    assert capsys.readouterr().out.endswith("pools: seed 1, 0 operations, 0 interrupts, 0 kills, 3 wrong, 2 hangs\n")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_policy_in_both_orders(seed: int) -> None:
    counts = checked(2 * len(ROUNDS), seed % 100_000, lanes=2, steps=200, seconds=45.0)
    for what in (*HITS, "engines killed", "engines left", "owners"):
        assert not counts or counts[what] > 5, what
