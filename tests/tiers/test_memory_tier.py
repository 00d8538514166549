"""MemoryTier: its bound, what it evicts, and that a record is whole whatever happens to it meanwhile."""

from __future__ import annotations

import threading

import pytest
from tier_classes import SECONDS, attached

from kvoffload.errors import CapacityError
from kvoffload.tiers import Limits, MemoryTier, Origin, Outcome, TierJob

DONE = Outcome.DONE


def test_it_evicts_what_was_not_used_for_longest() -> None:
    tier = MemoryTier(3 * 4096, limits=Limits(threads=1))
    with attached(tier):
        tier.put([b"a", b"b", b"c"], [0, 1, 2]).wait(SECONDS)
        tier.get([b"a"], [3]).wait(SECONDS)
        tier.put([b"d"], [4]).wait(SECONDS)
        assert tier.contains([b"a", b"b", b"c", b"d"]) == [True, False, True, True]
        assert tier.statistics().records == 3


@pytest.mark.parametrize("nbytes", [4095, 8191])
def test_room_for_no_record_is_refused(nbytes: int) -> None:
    tier = MemoryTier(nbytes)
    with pytest.raises(CapacityError, match=f"nbytes={nbytes} holds no record of 8192 bytes"), attached(tier, pools=2):
        pass


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True])
def test_nbytes_is_checked(nbytes: int) -> None:
    with pytest.raises(ValueError, match="nbytes must be an integer of at least 1"):
        MemoryTier(nbytes)


class Watched(MemoryTier):
    """Asks for the number of records whenever one is added or taken out."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, limits=Limits(threads=4))
        tier, records = self, self._records

        class Records(type(records)):  # type: ignore[misc]
            def __setitem__(self, key: bytes, value: object) -> None:
                super().__setitem__(key, value)
                tier.most = max(tier.most, tier.num_records())

        self.most = 0
        self._records = Records()


def test_it_never_has_more_than_its_bytes() -> None:
    tier = Watched(5 * 4096)
    with attached(tier):
        for start in range(0, 200, 50):
            keys = [b"%d" % number for number in range(start, start + 50)]
            assert set(tier.put(keys, range(50)).wait(SECONDS)) == {DONE}
        assert tier.most == 5
        assert tier.statistics().records == 5


def test_a_record_that_is_evicted_while_it_is_read_is_whole() -> None:
    tier = MemoryTier(4096, limits=Limits(threads=2))
    with attached(tier) as memory:
        memory.fill(0, 7)
        tier.put([b"a"], [0]).wait(SECONDS)
        row = memory.arrays[0][1]
        reading = threading.Event()

        class Rows(list):  # type: ignore[type-arg]
            def __iter__(self):  # type: ignore[no-untyped-def]
                reading.set()
                tier.remove_all()
                return super().__iter__()

        assert tier.read_record(b"a", Rows([row])) is DONE
        assert reading.is_set()
        assert memory.version(1) == 7
        assert tier.contains([b"a"]) == [False]


def test_a_known_key_is_not_copied_again() -> None:
    tier = MemoryTier(2 * 4096, limits=Limits(threads=1))
    with attached(tier) as memory:
        memory.fill(0, 1)
        memory.fill(1, 2)
        for entry in (0, 1):
            assert tier.write_record(b"a", [memory.arrays[0][entry]], Origin("", TierJob([b"a"]))) is DONE
        tier.get([b"a"], [2]).wait(SECONDS)
        assert memory.version(2) == 1
