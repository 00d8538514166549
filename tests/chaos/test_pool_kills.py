"""Engines that share a pool, and its owner, are killed and stopped while they work."""

from __future__ import annotations

from collections import Counter

import exhaust_pool
import pytest


@pytest.mark.long
def test_killed_engines_and_owners_cost_no_byte_and_no_entry(seed: int) -> None:
    """And no process hangs, no descriptor and no file is left."""
    counts, wrong = exhaust_pool.kills(6, seed % 100_000, seconds=10.0)
    print(dict(counts))
    assert wrong == []
    assert counts["kills"] >= 1
    assert counts["audits"] >= 1
    assert counts["loaded"] + counts["fetched"] > 0


@pytest.mark.long
def test_owners_that_close_while_their_tiers_move_keys_cost_no_byte(seed: int) -> None:
    """The next owners begin at once, with the file of the last one's disk."""
    counts, wrong = exhaust_pool.kills(3, seed % 100_000, seconds=4.0, closes=True)
    print(dict(counts))
    assert wrong == []
    assert counts["kills"] >= 1
    assert counts["loaded"] + counts["fetched"] > 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_kills_in_every_state(seed: int) -> None:
    counts, wrong = exhaust_pool.kills(120, seed % 100_000, lanes=2, seconds=240.0)
    print(dict(counts))
    assert wrong == []
    assert counts["kills"] >= 40
    assert counts["foreign"] > 100
    assert sum(name.startswith("in ") for name in counts) > 5
    for what in ("closes", "changes of layout", "hinted"):
        assert counts[what] > 0, what


def test_the_command_says_by_its_status_if_something_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(count: int, seed: int, *, lanes: int, **_: object) -> tuple[Counter[str], list[str]]:
        return Counter(number=count, lanes=lanes), ["a byte"] * seed

    monkeypatch.setattr(exhaust_pool, "kills", found)
    monkeypatch.setattr(exhaust_pool, "fuzz", found)
    assert exhaust_pool.main(["--kills", "7", "--rounds", "8", "--lanes", "3"]) == 0
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [
        *("kills: 3 lanes, 7 number", "0 wrong", "fuzz: 3 lanes, 8 number", "0 wrong"),
    ]
    assert exhaust_pool.main(["--only", "fuzz", "--seed", "1"]) == 1
    printed = capsys.readouterr().out
    assert "a byte" in printed
    assert "kills" not in printed
