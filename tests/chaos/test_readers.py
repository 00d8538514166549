"""A tier and those who read its files meanwhile: other processes, other tiers, other threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos_files import ChaosFiles
from chaos_history import PAGE, SECONDS, Memory, fetch, make_tier, names, put_all, versions
from chaos_history import SIX as KEYS
from disk_sets import blank, open_set, payload, read_key, write_key

from kvoffload.tiers import Outcome
from kvoffload.tiers.disk_index import DiskIndex

DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED


@pytest.fixture
def memory() -> Memory:
    return Memory(12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


# two processes --------------------------------------------------------------------------------------------------------

OTHER = """
import sys
from pathlib import Path
from typing import Any
from chaos_history import Memory, fetch, make_tier, names
memory = Memory(12)
try:
    make_tier(Path(sys.argv[1]), memory)
except BlockingIOError:
    print("locked")
reader = make_tier(Path(sys.argv[1]), memory, read_only=True)
for line in sys.stdin:
    print(sorted(fetch(reader, memory, names(range(6))).values()), flush=True)
print(reader.close(30.0))
"""


def test_another_process_cannot_write_and_reads_nothing_that_was_removed(folder: Path, memory: Memory) -> None:
    tier = make_tier(folder, memory)
    put_all(tier, memory, 1)
    paths = [str(Path(make_tier.__code__.co_filename).parent), *filter(None, sys.path)]
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            print("?", file=process.stdin, flush=True)
            return process.stdout.readline().strip()

        assert process.stdout.readline() == "locked\n"
        assert ask() == "[1, 2, 3, 4, 5, 6]"
        tier.remove(KEYS[:2]).wait(SECONDS)
        assert ask() == "[3, 4, 5, 6]"
        put_all(tier, memory, 11, KEYS[:2])  # in the same slots: the reader sees only what it found when it was opened
        assert ask() in ("[3, 4, 5, 6]", "[3, 4, 5, 6, 11, 12]")
        assert tier.clear().wait(SECONDS) == [DONE]
        assert ask() == "[]"
        process.stdin.close()
        assert process.stdout.readline() == "True\n"
    assert tier.close(SECONDS)


class Paused(ChaosFiles):
    """Calls `between` after a payload has been read."""

    between: Callable[[], object] | None = None

    def preadv(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        count = super().preadv(file, views, offset)
        if offset >= 3 * PAGE and self.between is not None:
            between, self.between = self.between, None
            between()
        return count


@pytest.mark.parametrize("change", ["remove", "clear", "overwrite"])
def test_a_reader_in_the_middle_of_a_record_that_changes(folder: Path, memory: Memory, change: str) -> None:
    tier = make_tier(folder, memory)
    put_all(tier, memory, 1)
    calls, own = Paused(), Memory(12)
    reader = make_tier(folder, own, read_only=True, operations=calls)

    def between() -> None:
        if change == "remove":
            assert tier.remove(KEYS[:1]).wait(SECONDS) == [DONE]
        elif change == "clear":
            assert tier.clear().wait(SECONDS) == [DONE]
        else:
            assert set(put_all(tier, memory, 50, names(range(20, 26)))) == {DONE}

    with ThreadPoolExecutor(1) as other:  # a thread of the reader's may not wait for another tier
        calls.between = lambda: other.submit(between).result(SECONDS)
        assert reader.get(KEYS[:1], [0]).wait(SECONDS) == [MISSING]
    assert reader.close(SECONDS)
    assert tier.close(SECONDS)


@pytest.mark.parametrize("call", ["remove", "remove what it does not know", "clear"])
def test_a_removal_by_a_reader_is_failed_and_changes_nothing(folder: Path, memory: Memory, call: str) -> None:
    """It cannot say that a record is gone: also not of one that was put after it was opened."""
    tier = make_tier(folder, memory)
    put_all(tier, memory, 1, KEYS[:2])
    own = Memory(12)
    reader = make_tier(folder, own, read_only=True)
    put_all(tier, memory, 3, KEYS[2:3])
    removed = KEYS[:3] if call == "remove" else KEYS[2:3]
    job = reader.clear() if call == "clear" else reader.remove(removed)
    assert set(job.wait(SECONDS)) == {FAILED}
    assert fetch(reader, own, KEYS) == (versions(1, KEYS[:2]) if removed == KEYS[2:3] and call != "clear" else {})
    assert reader.close(SECONDS)
    assert fetch(tier, memory, KEYS) == versions(1, KEYS[:3])
    assert tier.close(SECONDS)


# a record that is read before its put is finished ---------------------------------------------------------------------


class Hooked(np.ndarray[Any, Any]):
    """An array that calls `hook` once, after an element was read."""

    hook: Callable[[], None] | None = None

    def __getitem__(self, place: Any) -> Any:
        value = super().__getitem__(place)
        hook, self.hook = self.hook, None
        if hook is not None:
            hook()
        return value


def test_a_record_whose_slot_gets_another_key_between_two_looks_at_it(tmp_path: Path) -> None:
    """The put is finished, its record evicted, and another one written, while a read without a lease goes on."""
    disk = DiskIndex(open_set(tmp_path / "a.kv", slots=1), policy="lru", tenants={})
    put = disk.reserve([b"key"])
    assert write_key(disk, put, b"key", payload(1))

    def others() -> None:
        disk.finish(put)
        other = disk.reserve([b"other"])
        assert write_key(disk, other, b"other", payload(2))
        disk.finish(other)

    member = disk.files._members[0]
    hooked = member.hashes.view(Hooked)
    hooked.hook = others
    member.hashes = hooked
    assert not read_key(disk, b"key", blank())
    assert disk.contains([b"key", b"other"]) == [False, True]
    disk.files.close()
