"""System calls that fail, transfer a part, hang and end late; files that change underneath."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import chaos_machine
import pytest
from chaos_files import ERRORS, ChaosFiles, Faults
from chaos_history import PAGE, SECONDS, Memory, fetch, make_tier, put_all, versions
from chaos_history import SIX as KEYS
from disk_sets import FaultyFiles
from exhausting import held
from seeds import rest_long

from kvoffload.errors import LayoutError
from kvoffload.tiers import DiskTier, Limits, Outcome

DONE, MISSING, FAILED, DECLINED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED, Outcome.DECLINED


@pytest.fixture
def memory() -> Memory:
    return Memory(12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


# random operations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", rest_long(range(2), 1))
def test_random_operations_while_calls_fail_and_clocks_jump(
    seed: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of day, which may jump, decides nothing."""
    rng = random.Random(seed)
    monkeypatch.setattr(time, "time", lambda: rng.choice((0.0, 1e9, 4e9)))
    monkeypatch.setattr(time, "time_ns", lambda: rng.choice((0, 10**18, 4 * 10**18)))
    counts = chaos_machine.run(2500, seed + number)
    assert counts["operations"] >= 2500
    assert counts["descriptors left"] == 0
    assert counts["threads left"] == 0
    assert min(counts[each] for each in ("get done", "put done", "remove done", "step close", "step kill")) > 0
    assert counts["error"] + counts["late_error"] + counts["sync_error"] + counts["short"] + counts["hang"] > 20


# calls that fail ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
def test_every_error_of_every_call_is_an_outcome(folder: Path, memory: Memory, number: int) -> None:
    """A put is FAILED, or DECLINED by a full disk; a get FAILED; a removal FAILED until a sync has succeeded."""
    calls = FaultyFiles()
    tier = make_tier(folder, memory, operations=calls)
    calls.failing = {"pwritev": number}
    full = number in (errno.ENOSPC, errno.EDQUOT)
    assert set(put_all(tier, memory, 1)) == {DECLINED if full else FAILED}
    assert fetch(tier, memory, KEYS) == {}
    calls.failing = {}
    assert set(put_all(tier, memory, 10)) == {DONE}
    calls.failing = {"preadv": number}
    assert tier.get(KEYS[:1], [11]).wait(SECONDS) == [FAILED]
    calls.failing = {}
    assert fetch(tier, memory, KEYS) == versions(11, KEYS[1:])
    for failing in ("pwritev", "fdatasync"):
        calls.failing = {failing: number}
        assert tier.remove(KEYS[1:2]).wait(SECONDS) == [FAILED]
        assert tier.clear().wait(SECONDS) == [FAILED]
        assert not tier.drain(SECONDS)
    calls.failing = {}
    assert tier.remove(KEYS).wait(SECONDS) == [MISSING] * len(KEYS)
    assert set(put_all(tier, memory, 20)) == {DONE}
    assert tier.close(SECONDS)
    again = make_tier(folder, memory)
    assert fetch(again, memory, KEYS) == versions(20)
    assert again.close(SECONDS)


@pytest.mark.parametrize("call", ["open", "preadv", "pwritev", "fdatasync", "fallocate"])
def test_a_call_that_fails_while_the_files_are_opened_leaves_nothing_open(
    folder: Path, memory: Memory, call: str
) -> None:
    """And the tier can be given its pool again."""
    tier = make_tier(folder, memory)
    put_all(tier, memory, 1)
    assert tier.close(SECONDS)
    before = held()
    calls = FaultyFiles()
    for name in ("0.kv", "1.kv"):  # the second copy of the superblock differs: it is written again
        with (folder / name).open("r+b") as file:
            file.seek(PAGE)
            file.write(bytes(PAGE))
    calls.failing = {call: errno.EIO}
    again = DiskTier(
        [folder / "0.kv", folder / "1.kv"], nbytes=tier.nbytes, identity="model@1", direct=False, operations=calls
    )
    with pytest.raises(OSError, match="Input/output"):
        again.attach(memory.arrays, memory.layout)
    assert [held()[each] for each in ("descriptors", "threads")] == [before["descriptors"], before["threads"]]
    calls.failing = {}
    again.attach(memory.arrays, memory.layout)
    assert fetch(again, memory, KEYS) == versions(1)
    assert again.close(SECONDS)


class ShortTable(ChaosFiles):
    """The header table cannot be read while `short` is set: the file seems to end before it."""

    short = True

    def preadv(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        return 0 if self.short and offset == 2 * PAGE else super().preadv(file, views, offset)


def test_headers_that_could_not_be_read_do_not_come_back_after_a_removal(folder: Path, memory: Memory) -> None:
    tier = make_tier(folder, memory)
    put_all(tier, memory, 1)
    assert tier.close(SECONDS)
    calls = ShortTable()
    again = make_tier(folder, memory, operations=calls)
    calls.short = False
    assert fetch(again, memory, KEYS) == {}
    assert set(again.remove(KEYS[:1]).wait(SECONDS)) == {MISSING}
    calls.kill()
    assert again.close(SECONDS)
    last = make_tier(folder, memory)
    assert KEYS[0] not in fetch(last, memory, KEYS)
    assert last.close(SECONDS)


# calls that hang ------------------------------------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)


@pytest.fixture
def hanging(folder: Path, memory: Memory) -> Iterator[tuple[DiskTier, ChaosFiles]]:
    """A tier with all records, whose calls hang from now on."""
    calls = ChaosFiles(1)
    tier = make_tier(folder, memory, operations=calls, limits=Limits(threads=2))
    assert set(put_all(tier, memory, 1)) == {DONE}
    calls.faults = Faults(hang=1.0)
    yield tier, calls
    calls.faults = Faults()
    calls.release()
    assert tier.close(SECONDS)


def test_pitfall_62_a_read_that_hangs_keeps_its_entry_and_writes_to_it_late(
    hanging: tuple[DiskTier, ChaosFiles], memory: Memory
) -> None:
    tier, calls = hanging
    memory.fill(7, 70)
    memory.fill(8, 80)
    job = tier.get(KEYS[:1], [7], deadline=time.monotonic() + 0.05)
    until(lambda: calls.hung == 1)
    job.cancel()
    assert tier.remove(KEYS[1:2]) is not None
    assert tier.close(0.01) is False
    assert job.outcomes == [None]
    assert memory.version(7) == 70
    calls.faults = Faults()
    calls.release()
    assert job.wait(SECONDS) == [DONE]
    assert memory.version(7) == 1
    assert memory.version(8) == 80
    assert tier.close(SECONDS)


def test_a_removal_waits_for_a_write_that_hangs(hanging: tuple[DiskTier, ChaosFiles], memory: Memory) -> None:
    tier, calls = hanging
    calls.faults = Faults()
    tier.remove(KEYS[:1]).wait(SECONDS)
    calls.faults = Faults(hang=1.0)
    memory.fill(0, 50)
    put = tier.put(KEYS[:1], [0])
    until(lambda: calls.hung == 1)
    removal = tier.remove(KEYS[:1])
    with pytest.raises(TimeoutError):
        removal.wait(0.05)
    assert put.outcomes == [None]
    calls.faults = Faults()
    calls.release()
    assert put.wait(SECONDS) == [DONE]
    assert removal.wait(SECONDS) == [DONE]
    assert fetch(tier, memory, KEYS[:1]) == {}


def test_close_does_not_wait_for_a_sync_that_hangs(hanging: tuple[DiskTier, ChaosFiles], folder: Path) -> None:
    tier, calls = hanging
    assert tier.close(0.2) is False
    assert calls.hung == 1
    with pytest.raises(BlockingIOError):
        make_tier(folder, Memory(4))
    calls.faults = Faults()
    calls.release()
    assert tier.close(SECONDS)
    assert make_tier(folder, Memory(4)).close(SECONDS)


# files that change underneath -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 100, 4096, 8192, 8300, 12288, 20480, 30000])
def test_a_file_that_is_cut_off_underneath(folder: Path, memory: Memory, nbytes: int) -> None:
    """What is cut off is a miss, and what is put afterwards is a record; after a restart, too, if the file is ours."""
    tier = make_tier(folder, memory)
    put_all(tier, memory, 1)
    os.truncate(folder / "0.kv", nbytes)
    found = fetch(tier, memory, KEYS)
    assert found.items() <= versions(1).items()
    assert len(found) >= 3
    assert tier.remove(KEYS[:1]).wait(SECONDS)[0] in (DONE, MISSING)
    put_all(tier, memory, 100)
    last = fetch(tier, memory, KEYS)
    assert all(version in (versions(1)[key], versions(100)[key]) for key, version in last.items())
    assert KEYS[0] in last
    assert tier.close(SECONDS)
    if nbytes == 0:  # its superblock is gone: it could be anybody's file
        with pytest.raises(LayoutError, match="not a file of a disk tier"):
            make_tier(folder, memory)
        return
    again = make_tier(folder, memory)
    assert fetch(again, memory, KEYS).items() <= last.items()
    assert again.close(SECONDS)
