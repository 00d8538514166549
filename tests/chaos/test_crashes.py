"""Crash states of a disk tier: what was put, whole, or nothing; and nothing that was removed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chaos_crashes import FAULTS, Replay, run, run_program
from chaos_files import ChaosFiles, EventLog, Faults, SyncEnded
from chaos_history import SECONDS, Memory, fetch, make_tier
from tiering import keys, tiered

from kvoffload import NO_WAIT
from kvoffload.layout.coding import CODECS, CodecName
from kvoffload.tiers import DiskTier, Outcome

pytestmark = pytest.mark.long


@pytest.mark.parametrize("faults", [Faults(), FAULTS], ids=["crashes", "crashes and failing calls"])
def test_pitfall_64_no_crash_state_has_a_wrong_or_removed_record(seed: int, faults: Faults) -> None:
    counts, wrong = run_program(1000, random.Random(seed), faults)
    assert wrong == []
    assert counts["states"] >= 1000
    assert counts["records"] > 500
    assert min(counts[kind] for kind in ("put", "remove")) > 0


def test_the_long_form_runs_programs_with_and_without_failing_calls(seed: int) -> None:
    counts, wrong = run(600, seed)
    assert wrong == []
    assert counts["programs"] == 2
    assert counts["states"] >= 600


class LyingFiles(ChaosFiles):
    """A sync is reported as done, and makes nothing durable."""

    def fdatasync(self, file: int) -> None:
        self._paths[file]


def test_a_disk_whose_syncs_do_nothing_is_found(seed: int) -> None:
    """The examination can fail: removed records come back from such a disk."""
    rng = random.Random(seed)
    assert any(run_program(200, rng, Faults(), lambda seed, log: LyingFiles(seed, log=log))[1] for _ in range(20))


class Disk:
    """One file with one slot, whose crash states are examined; `calls` are the system calls of the last process."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.log = EventLog()
        self.memory = Memory(4)
        self.folder = folder
        self.calls: ChaosFiles
        self.tier: DiskTier
        self.open()

    def open(self) -> None:
        self.calls = ChaosFiles(1, log=self.log)
        self.tier = make_tier(self.folder / "disk", self.memory, files=1, slots=1, operations=self.calls)

    def kill(self) -> None:
        self.calls.kill()
        assert self.tier.close(SECONDS)

    def put(self, key: bytes, version: int) -> Outcome:
        self.memory.fill(0, version)
        return self.tier.put([key], [0]).wait(SECONDS)[0]

    def remove(self, key: bytes) -> Outcome:
        return self.tier.remove([key]).wait(SECONDS)[0]

    def after_a_crash(self, keys: Sequence[bytes], states: int = 60) -> set[bytes]:
        """Keys with records in some states after a crash now."""
        return set().union(*self.each_after_a_crash(keys, states))

    def each_after_a_crash(self, keys: Sequence[bytes], states: int = 60) -> list[set[bytes]]:
        replay, found = Replay(), list[set[bytes]]()
        for event in self.log.events:
            replay.advance(event)
        for _ in range(states):
            for path, image in replay.state(self.rng).items():
                target = self.folder / "after" / Path(path).name
                target.write_bytes(image)
                target.chmod(0o600)
            tier = make_tier(self.folder / "after", self.memory, files=1, slots=1)
            found.append(set(fetch(tier, self.memory, keys)))
            assert tier.close(SECONDS)
        return found


@pytest.fixture
def disk(tmp_path: Path, seed: int) -> Disk:
    for name in ("disk", "after"):
        (tmp_path / name).mkdir(mode=0o700)
    return Disk(tmp_path, seed)


def test_without_a_removal_an_evicted_record_may_come_back(disk: Disk) -> None:
    """What makes the tests below more than a restart."""
    disk.put(b"old", 1)
    assert disk.tier.drain(SECONDS)
    disk.put(b"new", 2)
    assert disk.after_a_crash([b"old", b"new"]) == {b"old", b"new"}
    disk.kill()


def test_what_was_drained_is_there_after_every_crash(disk: Disk) -> None:
    disk.put(b"key", 1)
    assert not all(disk.each_after_a_crash([b"key"]))
    assert disk.tier.drain(SECONDS)
    assert all(disk.each_after_a_crash([b"key"]))
    disk.kill()


def test_what_a_process_lost_by_a_failed_sync_does_not_come_back_after_a_removal_by_the_next(disk: Disk) -> None:
    """The kernel says once that it dropped writes, to the process before; a sync of the next one succeeds."""
    disk.put(b"old", 1)
    assert disk.tier.drain(SECONDS)
    disk.put(b"new", 2)
    disk.calls.faults = Faults(sync_error=1.0)
    assert not disk.tier.drain(SECONDS)
    disk.kill()
    disk.open()
    assert disk.remove(b"old") is Outcome.MISSING
    assert b"old" not in disk.after_a_crash([b"old", b"new"])
    disk.kill()


def test_a_header_whose_write_failed_and_reached_the_disk_does_not_come_back_after_a_removal(disk: Disk) -> None:
    class Failing(ChaosFiles):
        def pwritev(self, file: int, views: Sequence[memoryview], offset: int) -> int:
            count = super().pwritev(file, views, offset)
            if sum(view.nbytes for view in views) == 192 and self.faults.late_error:
                raise self._error()
            return count

    disk.kill()
    disk.calls = Failing(1, log=disk.log)
    disk.tier = make_tier(disk.folder / "disk", disk.memory, files=1, slots=1, operations=disk.calls)
    assert disk.remove(b"any") is Outcome.MISSING
    disk.calls.faults = Faults(late_error=1e-9)
    assert disk.put(b"old", 1) in (Outcome.FAILED, Outcome.DECLINED)
    disk.calls.faults = Faults()
    assert disk.put(b"new", 2) is Outcome.DONE
    assert disk.remove(b"old") is Outcome.MISSING
    assert b"old" not in disk.after_a_crash([b"old", b"new"])
    disk.kill()


@pytest.mark.parametrize("call", ["remove", "clear"])
def test_a_removal_whose_sync_fails_is_failed(disk: Disk, call: str) -> None:
    """Not DONE, and not DONE by the next one either before the disk has taken it."""
    disk.put(b"old", 1)
    assert disk.tier.drain(SECONDS)
    disk.calls.faults = Faults(sync_error=1.0)
    for _ in range(2):
        job = disk.tier.remove([b"old"]) if call == "remove" else disk.tier.clear()
        assert job.wait(SECONDS) == [Outcome.FAILED]
        assert disk.tier.get([b"old"], [0]).wait(SECONDS) == [Outcome.MISSING]
    assert b"old" in disk.after_a_crash([b"old"])
    disk.calls.faults = Faults()
    job = disk.tier.remove([b"old"]) if call == "remove" else disk.tier.clear()
    assert job.wait(SECONDS)[0] in (Outcome.DONE, Outcome.MISSING)
    assert disk.after_a_crash([b"old"]) == set()
    disk.kill()


def test_syncs_are_recorded(disk: Disk) -> None:
    assert disk.tier.drain(SECONDS)
    assert [event for event in disk.log.events if isinstance(event, SyncEnded)]
    disk.kill()


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
