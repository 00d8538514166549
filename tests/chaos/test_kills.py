"""Processes that are killed while they write, and tiers that are opened again and again."""

from __future__ import annotations

from collections import Counter

import chaos_machine
import exhaust_disk
import pytest

pytestmark = pytest.mark.long


def test_killed_writers_leave_what_was_put_and_nothing_that_was_removed(seed: int) -> None:
    counts, wrong = exhaust_disk.kills(10, seed)
    assert wrong == []
    assert counts["kills"] == 10
    assert counts["put"] > 20
    assert counts["removed"] > 2
    assert counts["records"] > 5


def test_memory_descriptors_and_threads_stay_the_same(seed: int) -> None:
    counts = exhaust_disk.program("chaos_soak.py", seed, 200)
    assert counts["cycles"] >= 200
    assert [counts[name] for name in ("descriptors more", "threads more", "tasks more")] == [0, 0, 0], counts
    assert counts["resident more"] < exhaust_disk.MOST_GROWTH


def test_the_command_prints_counts_and_says_by_its_status_if_something_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exhaust_disk.main(["--only", "crashes", "--only", "faults", "--states", "20", "--operations", "100"]) == 0
    out = capsys.readouterr().out
    assert "crashes: " in out
    assert "states" in out
    assert out.count("  0 wrong") == 2

    def wrong(operations: int, seed: int) -> Counter[str]:
        raise AssertionError(f"{operations} operations of seed {seed}")

    monkeypatch.setattr(chaos_machine, "run", wrong)
    assert exhaust_disk.main(["--only", "faults", "--operations", "100"]) == 1
    assert "machine of seed 0: 100 operations of seed 0" in capsys.readouterr().out
