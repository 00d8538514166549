"""Crash states of a disk tier: what was put, whole, or nothing; and nothing that was removed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from chaos_crashes import FAULTS, Replay, run_program
from chaos_files import ChaosFiles, EventLog, Faults
from chaos_history import SECONDS
from tiering import keys, tiered

from kvoffload import NO_WAIT
from kvoffload.layout.coding import CODECS, CodecName
from kvoffload.tiers import DiskTier

pytestmark = pytest.mark.long


@pytest.mark.parametrize("faults", [Faults(), FAULTS], ids=["crashes", "crashes and failing calls"])
def test_pitfall_64_no_crash_state_has_a_wrong_or_removed_record(seed: int, faults: Faults) -> None:
    counts, wrong = run_program(1000, random.Random(seed), faults)
    assert wrong == []
    assert counts["states"] >= 1000
    assert counts["records"] > 500
    assert min(counts[kind] for kind in ("put", "remove")) > 0


class LyingFiles(ChaosFiles):
    """A sync is reported as done, and makes nothing durable."""

    def fdatasync(self, file: int) -> None:
        self._paths[file]


def test_a_disk_whose_syncs_do_nothing_is_found(seed: int) -> None:
    """The examination can fail: removed records come back from such a disk."""
    rng = random.Random(seed)
    assert any(run_program(200, rng, Faults(), lambda seed, log: LyingFiles(seed, log=log))[1] for _ in range(20))


@pytest.mark.parametrize("codec", CODECS)
def test_a_cache_over_a_crash_state_loads_what_was_stored_or_nothing(
    codec: CodecName, seed: int, tmp_path: Path
) -> None:
    """With a codec records are coded slots: of a block that does not fit there is none in any state."""
    rng, log, spoiled = random.Random(seed), EventLog(), {3, 8}
    path, after = tmp_path / "disk" / "0.kv", tmp_path / "after" / "0.kv"
    for each in (path, after):
        each.parent.mkdir(mode=0o700)

    def disk(where: Path, **options: Any) -> DiskTier:
        return DiskTier([where], nbytes=40 << 10, identity="model@1", policy="lru", direct=False, **options)

    with tiered(disk(path, operations=ChaosFiles(seed, log=log)), capacity=6, codec=codec) as bench:
        for _ in range(3):
            numbers = rng.sample(range(12), 6)
            for block, number in enumerate(numbers):
                bench.write(block, number)
                if codec != "raw" and number in spoiled:
                    bench.spoil(block)
            bench.cache.store(keys(numbers), range(6), after=NO_WAIT).wait(SECONDS)
            assert bench.cache.drain(SECONDS)
            bench.cache.clear(below=False)
    replay, found, last = Replay(), 0, len(log.events) - 1
    examined = {last, *rng.sample(range(last), min(15, last))}
    for number, event in enumerate(log.events):
        replay.advance(event)
        if number in examined:
            for state in replay.state(rng).values():
                after.write_bytes(state)
                after.chmod(0o600)
            with tiered(disk(after), capacity=12, codec=codec) as bench:
                for key in keys(range(12)):
                    with bench.cache.promote([key]) as promotion:
                        promotion.wait(SECONDS)
                hits = [wanted for wanted in range(12) if bench.cache.lookup(keys([wanted]))]
                bench.check_loaded(hits)
                assert codec == "raw" or not spoiled.intersection(hits)
                found += len(hits)
    assert found > 10
