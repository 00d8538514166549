"""Engines with a codec over a shared pool: who shares with whom, and keys whose blocks do not fit."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from coded import unfit
from pooling import PLANES, ROW_BYTES, SECONDS, SOURCES, Member, eventually, held, keys_of, members, region_bytes, serve

from kvoffload import NO_WAIT, TransferError
from kvoffload.pool import PoolOwner
from kvoffload.tiers import MemoryTier

CODEC = {"codec": "bf16-12"}


def spoil(one: Member, *numbers: int) -> None:
    for number in numbers:
        one.put(number, unfit(one.expected[number].view("u2")).view("u1"))


def test_engines_with_and_without_the_codec_have_regions_of_their_own(tmp_path: Path) -> None:
    path = str(tmp_path / "pool")
    with PoolOwner(path, nbytes=2 * region_bytes(8), region_bytes=region_bytes(8)) as owner, ExitStack() as stack:
        first, second, raw = (Member(path, stack, codec=codec) for codec in ("bf16-12", "bf16-12", "raw"))
        first.store(*range(4))
        assert (second.hits(*range(8)), raw.hits(*range(8))) == (4, 0)
        raw.store(0, 1, 6)
        assert (second.hits(*range(8)), raw.hits(0, 1, 6)) == (4, 3)
        second.check_load(*range(4))
        raw.check_load(0, 1, 6)
        assert sorted(each["members"] for each in owner.statistics()) == [1, 2]
        (slot,) = second.cache.acquire(keys_of([2])).slots()
        assert (second.row(slot) == second.in_slot(second.expected[2])).all()
        assert second.row(slot).size == PLANES * ROW_BYTES * 49 // 64


@pytest.mark.parametrize("tiered", [False, True])
def test_a_key_that_does_not_fit_is_no_hit_for_anyone(tmp_path: Path, tiered: bool) -> None:
    """Neither while its store goes on nor later, nor in a tier of the owner's; the others of its store are."""
    options = {"tiers": lambda *_: [MemoryTier(1 << 20)], "write": "through"} if tiered else {}
    with serve(tmp_path, 8, **options) as owner, members(owner.path, 2, **CODEC) as (one, other):
        spoil(one, 1, 3)
        with held(one) as (stream, gate):
            job = one.store(*range(5), wait=False, after=stream)
            behind = one.cache.load(keys_of([2, 1]), [SOURCES, SOURCES + 1], after=NO_WAIT, pending=True)
            fit, spoilt = (one.cache.acquire(keys_of(numbers), pending=True) for numbers in ([2, 4], [2, 1]))
            gate.open()
            job.wait(SECONDS)
            with pytest.raises(TransferError, match="did not fit the codec"):
                behind.wait(SECONDS)
            with fit, spoilt:
                fit.wait(SECONDS)
                with pytest.raises(TransferError, match="must not be used"):
                    spoilt.wait(SECONDS)
        assert job.unfit == tuple(keys_of([1, 3]))
        eventually(lambda: other.hits(0), "the owner has heard of the end")
        for each in (one, other):
            assert [each.hits(number) for number in range(5)] == [1, 0, 1, 0, 1]
            each.check_load(0, 2, 4)
            each.cache.check()
        statistics = one.cache.statistics()
        assert (statistics.stored, statistics.declined, statistics.unfit) == (3, 2, 2)
        assert other.cache.statistics().unfit == 0
        eventually(lambda: one.counts() == (3, 0, 0), "nothing is held")
        other.store(1, 3)
        one.poison([1, 3])
        eventually(lambda: one.hits(1, 3) == 2, "they are stored by one whose blocks fit")
        one.check_load(1, 3)


def test_a_reserved_key_that_does_not_fit_goes_with_its_commit_after_its_jobs(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as owner, members(owner.path, 2, **CODEC) as (one, other):
        spoil(one, 1)
        reservation = one.cache.reserve(keys_of([0, 1]))
        job = one.engine.store([0, 1], reservation.slots(), after=NO_WAIT)
        reservation.commit(job)
        job.wait(SECONDS)
        eventually(lambda: one.hits(0, 1) == 1 == other.hits(0, 1), "the key is gone")
        assert one.cache.statistics().unfit == 1


def test_a_key_that_does_not_fit_goes_though_a_load_of_others_ends_last(tmp_path: Path) -> None:
    """A commit without jobs does not know. Both loads share the promotion's lease, which ends with the last of them.
    What had not been told then was told of the next key in the same entry, which fits.
    """
    with serve(tmp_path, 8) as owner, members(owner.path, 2, **CODEC) as (one, other):
        spoil(one, 1)
        reservation = one.cache.reserve(keys_of([0, 1]))
        one.engine.store([0, 1], reservation.slots(), after=NO_WAIT).wait(SECONDS)
        reservation.commit()
        eventually(lambda: other.hits(0, 1) == 2, "it is committed")
        with other.cache.promote(keys_of([0, 1])) as promotion, held(other) as (stream, gate):
            with pytest.raises(TransferError, match="did not fit the codec"):
                other.cache.load(keys_of([0, 1]), [SOURCES, SOURCES + 1], after=NO_WAIT).wait(SECONDS)
            last = other.cache.load(keys_of([0]), [SOURCES + 2], after=stream)
            promotion.release()
            other.cache.status([])
            gate.open()
            last.wait(SECONDS)
        eventually(lambda: one.hits(0, 1) == 1 == other.hits(0, 1), "the key is gone")
        assert (one.cache.statistics().unfit, other.cache.statistics().unfit) == (0, 1)
        one.cache.clear()
        other.store(*range(8))
        assert other.hits(*range(8)) == 8
