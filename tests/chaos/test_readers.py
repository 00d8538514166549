"""A tier and those who read its files meanwhile: other tiers, other threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos_history import SECONDS, Memory, fetch, make_tier, put_all, versions
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
