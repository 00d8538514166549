"""Regions that an owner makes in a thread of their own: who waits for one, and what is left if it or its owner ends."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pooling import SECONDS, SlowTiers, descriptors, eventually, mapped, member, raw, region_bytes, serve
from tier_classes import DictTier

from kvoffload.cache.policies import LRU
from kvoffload.pool import PoolOwner
from kvoffload.pool import owner as owners
from kvoffload.pool.messages import Operation, pack_keys

# who waits ------------------------------------------------------------------------------------------------------------


def test_several_members_that_come_while_their_region_is_being_made_share_it(tmp_path: Path) -> None:
    tiers = SlowTiers()
    with serve(tmp_path, tiers=tiers) as owner, ExitStack() as stack:
        joining = [stack.enter_context(raw(owner.path, join=False)) for _ in range(5)]
        with raw(owner.path, join=False) as gone:
            for each in (gone, *joining):
                each.send(Operation.JOIN, each.asking())
            eventually(lambda: "6 connections" in repr(owner), "they are accepted")
            owner.statistics()  # it has read what they asked
        eventually(lambda: "5 connections" in repr(owner), "one has gone")
        tiers.go.set()
        answers = [each.answer() for each in joining]
        assert [kind for kind, _ in answers] == [Operation.JOIN] * 5
        assert len({json.loads(said)["number"] for _, said in answers}) == 5
        assert len({os.fstat(each.passed).st_ino for each in joining}) == 1
        for each in joining:
            os.close(each.passed)
        assert [region["members"] for region in owner.statistics()] == [5], "the one that has gone is none"


def test_a_member_waits_for_an_owner_that_allocates_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than for an owner that says nothing."""
    monkeypatch.setattr(owners, "NOTICE_SECONDS", 0.05)
    tiers, timeout = SlowTiers(), 0.8

    def open_late() -> None:
        assert tiers.opening.wait(SECONDS)
        time.sleep(1.2 * timeout)
        tiers.go.set()

    thread = threading.Thread(target=open_late)
    thread.start()
    with serve(tmp_path, 8, tiers=tiers) as owner, member(owner.path, timeout=timeout) as one:
        assert one.store(1).keys
        one.check_load(1)
    thread.join()


class SlowToClose(DictTier):
    """A tier as those on files: there may be one of a name. Closing it takes until it is let go."""

    def __init__(self, names: set[str], name: str) -> None:
        super().__init__()
        if name in names:
            raise BlockingIOError(f"{name} is in use")
        names.add(name)
        self.names, self.of, self.go, self.closing = names, name, threading.Event(), threading.Event()

    def close(self, timeout: float = 10.0) -> bool:
        self.closing.set()
        self.go.wait(SECONDS)
        self.names.discard(self.of)
        return super().close(timeout)


def test_whoever_wants_a_region_that_makes_room_waits_for_the_end_of_its_tiers(tmp_path: Path) -> None:
    tiers, names, nbytes = list[SlowToClose](), set[str](), region_bytes(4)

    def make(name: str, _: str) -> list[SlowToClose]:
        tiers.append(SlowToClose(names, name))
        return [tiers[-1]]

    first, second, third = (bytes([each]) * 16 for each in range(3))
    with serve(tmp_path, nbytes=2 * nbytes, region_bytes=nbytes, tiers=make) as owner, ExitStack() as left:
        for fingerprint in (first, second):
            with raw(owner.path, fingerprint=fingerprint):
                pass
        eventually(lambda: not any(each["members"] for each in owner.statistics()), "they have left")
        tiers[1].go.set()
        one, other = (left.enter_context(raw(owner.path, join=False, fingerprint=each)) for each in (third, first))
        one.send(Operation.JOIN, one.asking())
        assert tiers[0].closing.wait(SECONDS), "the first region makes room"
        other.send(Operation.JOIN, other.asking())
        _, kind, why = other.receive()
        assert kind == Operation.WAIT, why
        tiers[0].go.set()
        kind, why = other.answer()
        assert kind == Operation.JOIN, why
        for each in tiers:
            each.go.set()


# what is left ---------------------------------------------------------------------------------------------------------


def no_disk() -> list[DictTier]:
    raise OSError("no disk")


def test_a_region_that_cannot_be_made_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with serve(tmp_path, 64, tiers=lambda *_: no_disk()) as owner:
        before = descriptors(), mapped()
        for _ in range(3):
            with raw(owner.path, join=False) as one:
                answer = one.ask(Operation.JOIN, one.asking())
                assert answer == (Operation.REFUSED, b"OSError: no disk")
        eventually(lambda: (descriptors(), mapped()) == before, "nothing is left")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("how", ["close", "error"])
def test_an_owner_that_ends_while_it_makes_a_region_leaves_nothing(
    how: str, opens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its member is cut off. What the region's thread still opens is closed, and another owner serves the path."""
    monkeypatch.setattr(owners, "GRACE_SECONDS", 0.01)  # no member has had a memory
    path, tier, before = str(tmp_path / "pool"), DictTier(), (descriptors(), mapped())
    tiers = SlowTiers(lambda: [tier] if opens else no_disk())
    owner = PoolOwner(path, nbytes=region_bytes(64), tiers=tiers)
    with raw(path, join=False) as one:
        one.send(Operation.JOIN, one.asking())
        assert tiers.opening.wait(SECONDS)
        if how == "error":
            with monkeypatch.context() as patched:
                patched.setattr(owners, "QUARANTINE_SECONDS", "soon")
                assert one.cut_off()
        else:
            owner.close()
            assert one.cut_off()
    assert isinstance(owner.failure, TypeError if how == "error" else type(None))
    assert mapped() > before[1], "the region is still being made"
    tiers.go.set()
    eventually(lambda: (descriptors(), mapped()) == before, "nothing is left")
    assert tier.released == opens
    assert owner.statistics() == []
    owner.close()
    with serve(tmp_path), raw(path) as later:
        assert later.status([]) == []
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_region_that_its_owner_has_not_seen_before_it_ends_is_closed(tmp_path: Path) -> None:
    """The owner's thread stands in a policy when the region is made, and does not come back from there."""
    stands, go, tier, before = threading.Event(), threading.Event(), DictTier(), (descriptors(), mapped())
    tiers = SlowTiers(lambda: [tier] if stands.is_set() else [])

    class Exits(LRU):
        def touch(self, keys: Sequence[bytes]) -> None:
            del keys
            stands.set()
            assert go.wait(SECONDS)
            raise SystemExit

    options: Any = {"nbytes": 2 * region_bytes(8), "region_bytes": region_bytes(8), "policy": Exits}
    tiers.go.set()
    with serve(tmp_path, tiers=tiers, **options) as owner:
        with raw(owner.path) as one, raw(owner.path, join=False, fingerprint=b"other fingerprin") as other:
            one.store([b"key"], 1)
            tiers.go.clear()
            tiers.opening.clear()
            other.send(Operation.JOIN, other.asking())
            assert tiers.opening.wait(SECONDS)
            one.send(Operation.TOUCH, pack_keys([b"key"]))
            assert stands.wait(SECONDS)
            tiers.go.set()
            making = "kvoffload-pool-region"
            eventually(lambda: making not in [each.name for each in threading.enumerate()], "it is made")
            go.set()
            assert one.cut_off()
            assert other.cut_off()
        assert isinstance(owner.failure, SystemExit)
        eventually(lambda: (descriptors(), mapped()) == before, "nothing is left")
        assert tier.released == 1
