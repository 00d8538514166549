"""The memory of a region: what a new owner finds in the headers, whenever the last one died; which memory it takes."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pooling import region_bytes

from kvoffload.device.shared_slots import allocate_memory
from kvoffload.pool import pool_memory as memory_module
from kvoffload.pool.pool_memory import HEADER, OWNER, PAGE, READY, Meaning, PoolMemory, close_files
from kvoffload.pool.region import meaning_of

CAPACITY = 6
MEANING = Meaning(CAPACITY, PAGE, b"f" * 16, b"i" * 16)
TENANT = b"tenant--"


@contextmanager
def region(meaning: Meaning = MEANING) -> Iterator[PoolMemory]:
    memory = PoolMemory.create(meaning)
    try:
        yield memory
    finally:
        memory.close()


@contextmanager
def adopted(memory: PoolMemory) -> Iterator[PoolMemory]:
    """The same memory, as a new owner maps it."""
    other = PoolMemory.adopt(memory.descriptor, memory.meaning)
    try:
        yield other
    finally:
        other.close()


def filled(memory: PoolMemory, keys: list[bytes], entries: list[int], tenant: bytes = TENANT) -> None:
    memory.named(keys, entries, tenant)
    memory.ready(entries)


@contextmanager
def stepwise(memory: PoolMemory, other: PoolMemory, check: Callable[[], None]) -> Iterator[None]:
    """Whenever the owner's code has changed headers, those of `other` follow word by word, with a check after each."""

    def words(of: PoolMemory) -> npt.NDArray[np.uint32]:
        return of.headers.view(np.uint32)

    def notice(frame: FrameType, *_: object) -> Any:
        if frame.f_code.co_filename != memory_module.__file__:
            return None
        frame.f_trace_opcodes = True
        for place in np.flatnonzero(words(memory) != words(other)).tolist():
            words(other)[place] = words(memory)[place]
            check()
        return notice

    sys.settrace(notice)
    try:
        yield
    finally:
        sys.settrace(None)


def test_every_prefix_of_what_an_owner_writes_is_a_state_to_go_on_from(seed: int) -> None:
    """Rows hold what the model says; `written` are rows that somebody may be writing at the time of the death."""
    rng = random.Random(seed)
    with region() as memory, region() as other:
        row_of: list[bytes | None] = [None] * CAPACITY  # the key whose bytes are in the row
        row_of_written: dict[int, bytes] = {}  # what is being written
        named = set[int]()
        written: dict[int, int] = {}
        reading: dict[int, int] = {}
        steps = 0

        def check() -> None:
            nonlocal steps
            steps += 1
            found = other.found()
            assert len(set(found.keys)) == len(found.keys)
            for key, entry in zip(found.keys, found.entries.tolist(), strict=True):
                assert entry not in written, f"{key!r} is there while entry {entry} is being written"
                assert row_of[entry] == key, f"{key!r} is found in entry {entry}, which has {row_of[entry]!r}"
            users = found.users
            for entry, member in written.items():
                assert users.get(entry, 0) >> member & 1, f"entry {entry} is being written by {member}"
            for entry, bits in reading.items():
                assert users.get(entry, 0) & bits == bits, f"entry {entry} is being read"

        for sequence in range(1, 150):
            free = [entry for entry in range(CAPACITY) if entry not in written and entry not in reading]
            kind = rng.choice(("write", "write", "fill", "fill", "remove", "read", "end"))
            chosen = rng.sample(free, min(len(free), rng.randint(1, 3)))
            with stepwise(memory, other, check):
                if kind == "write" and chosen:
                    member = rng.randrange(63)
                    memory.reserved(chosen, sequence, member)
                    written |= dict.fromkeys(chosen, member)
                    keys = [rng.randbytes(rng.randint(0, 64)) for _ in chosen]
                    row_of_written |= dict(zip(chosen, keys, strict=True))
                    if rng.random() < 0.9:  # the owner has gone on
                        memory.named(keys, chosen, TENANT)
                        named.update(chosen)
                elif kind == "fill" and written:
                    chosen = rng.sample(sorted(written), rng.randint(1, len(written)))
                    for entry in chosen:
                        row_of[entry] = row_of_written[entry]
                        del written[entry]
                    memory.ready(chosen)
                    there = {row_of[entry] for entry in named.intersection(chosen)}
                    named.difference_update(chosen)
                    assert there <= set(memory.found().keys)
                elif kind == "remove" and chosen:
                    memory.gone(chosen)
                    assert not set(chosen) & set(memory.found().entries.tolist())
                elif kind == "read":
                    ready = [entry for entry in memory.found().entries.tolist() if entry not in written]
                    for entry in ready[:2]:
                        memory.reading([entry, entry], 5)
                        reading[entry] = 1 << 5
                elif kind == "end" and reading:
                    entries = list(reading)
                    reading.clear()
                    memory.read(entries, 5)
            check()
        assert steps > 500


def test_what_is_found_is_in_the_order_of_reservations_and_names_tenants() -> None:
    with region() as memory, adopted(memory) as other:
        for sequence, entry in ((7, 3), (8, 0), (9, 5)):
            memory.reserved([entry], sequence, 2)
            filled(memory, [b"key-%d" % entry], [entry], b"tenant-%d" % entry)
        memory.reserved([1, 2], 10, OWNER)
        found = other.found()
        assert found.keys == [b"key-3", b"key-0", b"key-5"]
        assert found.entries.tolist() == [3, 0, 5]
        assert found.sequences.tolist() == [7, 8, 9]
        assert found.tenants == [b"tenant-3", b"tenant-0", b"tenant-5"]
        assert found.users == {1: 1 << OWNER, 2: 1 << OWNER}


def test_two_headers_with_one_key_give_one_entry() -> None:
    with region() as memory, adopted(memory) as other:
        for sequence in (1, 2):
            memory.reserved([sequence], sequence, 0)
            filled(memory, [b"key"], [sequence])
        assert other.found().entries.tolist() == [1]


def test_a_header_with_any_bit_changed_gives_its_key_or_none() -> None:
    with region() as memory, adopted(memory) as other:
        for entry, key in enumerate((b"k" * 64, b"key", b"")):
            memory.reserved([entry], entry + 1, 2)
            filled(memory, [key], [entry])
        before = dict(zip(other.found().entries.tolist(), other.found().keys, strict=True))
        image = memory.headers.reshape(CAPACITY, HEADER.size)
        lost = 0
        for entry in range(3):
            for byte in range(HEADER.size):
                for bit in range(8):
                    image[entry, byte] ^= 1 << bit
                    found = other.found()
                    after = dict(zip(found.entries.tolist(), found.keys, strict=True))
                    assert after.items() <= before.items()
                    assert before.keys() - after.keys() <= {entry}
                    lost += len(after) < len(before)
                    image[entry, byte] ^= 1 << bit
        assert lost > 3 * 8 * (4 + 4 + 4)
        assert dict(zip(other.found().entries.tolist(), other.found().keys, strict=True)) == before


def test_random_bytes_as_headers_give_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with region() as memory, adopted(memory) as other:
        for _ in range(200):
            memory.headers[:] = rng.integers(0, 256, memory.headers.nbytes, dtype=np.uint8)
            memory.headers.view(np.uint32)[1 :: HEADER.size // 4] = rng.integers(0, 4, CAPACITY)
            found = other.found()
            assert found.keys == []
            assert all(0 <= entry < CAPACITY for entry in found.users)


def test_a_memory_that_is_not_this_region_is_not_adopted() -> None:
    """Its descriptor stays the caller's."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, MEANING.nbytes)
    os.pwrite(unsealed, MEANING.pack(), MEANING.rows_bytes)
    read, write = os.pipe()
    with region() as memory:
        for descriptor, why in (
            (unsealed, "no region"),
            (read, "no region"),
            (os.open("/dev/zero", os.O_RDWR), "no region"),
            (os.open(__file__, os.O_RDONLY), "no region"),
            (allocate_memory([], "other size", MEANING.nbytes + PAGE), "no region"),
            (allocate_memory([], "empty", MEANING.nbytes), "superblock"),
        ):
            with pytest.raises(ValueError, match=why):
                PoolMemory.adopt(descriptor, MEANING)
            os.close(descriptor)
        for changes in ({"fingerprint": b"F" * 16}, {"identity": b"I" * 16}, {"capacity": CAPACITY - 1}):
            with pytest.raises(ValueError, match=r"superblock|no region"):
                PoolMemory.adopt(memory.descriptor, MEANING._replace(**changes))
        for byte in range(len(MEANING.pack())):  # each byte of the superblock counts
            there = os.pread(memory.descriptor, 1, MEANING.rows_bytes + byte)
            os.pwrite(memory.descriptor, bytes([there[0] ^ 1]), MEANING.rows_bytes + byte)
            with pytest.raises(ValueError, match="superblock"):
                PoolMemory.adopt(memory.descriptor, MEANING)
            os.pwrite(memory.descriptor, there, MEANING.rows_bytes + byte)
        with adopted(memory):
            pass
    os.close(write)
    gc.collect()  # the errors' frames have mapped some
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_region_cannot_be_resized() -> None:
    with region() as memory:
        for size in (0, MEANING.nbytes - 1, MEANING.nbytes + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.descriptor, size)


def test_a_lock_is_held_until_it_is_given_up_or_the_last_file_that_has_it_is_closed() -> None:
    with region() as memory, adopted(memory) as first, adopted(memory) as second:
        assert not any(memory.locked(number) for number in range(64))
        first.lock(5)
        second.lock(5)
        second.lock(7)
        assert [number for number in range(64) if memory.locked(number)] == [5, 7]
        inherited = [os.dup(each._files[1]) for each in (first, second)]  # as forked children have them
        close_files(first._files)  # as of a process that has died
        second.close()
        assert [number for number in range(64) if memory.locked(number)] == [5]
        os.close(inherited[0])
        assert not memory.locked(5)
        os.close(inherited[1])


def test_a_region_leaves_no_room_for_two_more_entries() -> None:
    for nbytes in (0, 1, PAGE, 3 * PAGE, 100_000, 10_000_000, 10_000_001, 1 << 30):
        for row_bytes in (4096, 40_960, 1 << 20):
            meaning = meaning_of(b"f" * 16, "identity", row_bytes, nbytes=nbytes)
            assert not meaning.capacity or meaning.nbytes <= nbytes
            assert meaning._replace(capacity=meaning.capacity + 2).nbytes > nbytes
            if meaning.capacity:
                assert region_bytes(meaning.capacity, row_bytes) == meaning.nbytes


def test_a_key_that_was_ready_is_not_found_while_its_entry_is_written_anew() -> None:
    with region() as memory, adopted(memory) as other:
        memory.reserved([2], 1, 0)
        filled(memory, [b"old"], [2])
        assert other.headers.view(np.uint32)[2 * HEADER.size // 4 + 1] == READY
        memory.reserved([2], 2, 1)
        assert other.found().keys == []
        assert other.found().users == {2: 1 << 1}
