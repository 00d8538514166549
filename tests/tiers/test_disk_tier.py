"""DiskTier as other processes see it: a reader beside the writer, and children that were forked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from disk_sets import flip
from programs import run_program
from tier_classes import SECONDS, attached

from kvoffload.tiers import DiskTier, Outcome

KEYS = [b"old %d" % number for number in range(8)]
MORE = [b"new %d" % number for number in range(8)]

CHANGES: dict[str, Callable[[DiskTier], object]] = {
    "removed": lambda tier: tier.remove(KEYS).wait(SECONDS),
    "cleared": lambda tier: tier.clear().wait(SECONDS),
    "replaced": lambda tier: tier.put(MORE, range(8, 16)).wait(SECONDS),
}


def disk(folder: Path, *, read_only: bool = False) -> DiskTier:
    """Of eight records."""
    nbytes = 3 * 4096 + 8 * 4096
    return DiskTier(folder / "kv", nbytes=nbytes, identity="a model", policy="lru", read_only=read_only)


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_writer_has_removed_or_replaced_is_not_corrupt_for_a_reader(tmp_path: Path, change: str) -> None:
    writer, reader = disk(tmp_path), disk(tmp_path, read_only=True)
    with attached(writer):
        assert writer.num_slots == len(KEYS)
        assert set(writer.put(KEYS, range(8)).wait(SECONDS)) == {Outcome.DONE}
        with attached(reader):  # it knows the records of now
            assert reader.contains(KEYS) == [True] * 8
            CHANGES[change](writer)
            assert reader.get(KEYS, range(8)).wait(SECONDS) == [Outcome.MISSING] * 8
            figures = reader.statistics()
            assert (figures.missing, figures.corrupt, figures.failed) == (8, 0, 0)


@pytest.mark.parametrize("read_only", [False, True])
def test_wrong_bytes_under_a_header_that_stays_are_corrupt(tmp_path: Path, read_only: bool) -> None:
    writer = disk(tmp_path)
    with attached(writer):
        writer.put(KEYS, range(8)).wait(SECONDS)
    for slot in (2, 5):
        flip(tmp_path / "kv", 3 * 4096 + slot * 4096 + 100)
    tier = disk(tmp_path, read_only=read_only)
    with attached(tier):
        assert tier.get(KEYS, range(8)).wait(SECONDS).count(Outcome.DONE) == 6
        assert tier.get(KEYS, range(8)).wait(SECONDS).count(Outcome.DONE) == 6
        figures = tier.statistics()
        assert (figures.missing, figures.corrupt) == (4, 2)


def test_a_forked_child_keeps_no_lock_of_a_tier_that_its_parent_has_closed(tmp_path: Path) -> None:
    said = run_program(
        f"""
        import os, signal, warnings
        from kvoffload.testing.tier_pools import TierPools
        from kvoffload.tiers import DiskTier
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        memory = TierPools(8, 4096, 1, seed=1)

        def open_tier():
            tier = DiskTier({str(tmp_path / "kv")!r}, nbytes=1 << 17, identity="a model")
            tier.attach(memory.arrays, memory.layout)
            return tier

        tier = open_tier()
        closed, tell = os.pipe()
        child = os.fork()
        if child == 0:
            tier.close()
            os.write(tell, b"x")
            signal.pause()
        os.read(closed, 1)
        try:
            open_tier()
        except BlockingIOError:
            print("the child has closed its copy, the parent has the lock")
        assert tier.close(30)
        assert open_tier().close(30)
        print("opened again")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        """
    )
    assert said.splitlines() == ["the child has closed its copy, the parent has the lock", "opened again"]
