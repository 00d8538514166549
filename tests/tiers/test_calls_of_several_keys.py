"""Tiers that transfer several records in a call: which keys come together, and what becomes of the others of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tier_classes import SECONDS, DictTier, attached

from kvoffload.testing import check_tier
from kvoffload.tiers import Origin, Outcome, ThreadedTier
from kvoffload.tiers.threaded import Rows

DONE, MISSING, DECLINED, FAILED, CANCELLED = (
    Outcome.DONE, Outcome.MISSING, Outcome.DECLINED, Outcome.FAILED, Outcome.CANCELLED
)  # fmt: skip
RECORD = 4096
KEYS = [b"%d" % number for number in range(8)]


class BatchTier(DictTier):
    """Up to four records a call; `calls` has the keys of each. `before` is called first, and may raise."""

    def __init__(self, *, threads: int = 1, max_queued: int = 4096) -> None:
        super().__init__(threads=threads, max_queued=max_queued)
        self.bytes_per_call = 4 * RECORD
        self.calls: list[tuple[str, list[bytes]]] = []
        self.before: Callable[[str, Sequence[bytes]], None] = lambda _kind, _keys: None

    def read_records(self, keys: Sequence[bytes], rows: Sequence[Rows]) -> Sequence[Outcome]:
        self._note("read", keys)
        return super().read_records(keys, rows)

    def write_records(self, keys: Sequence[bytes], rows: Sequence[Rows], origin: Origin) -> Sequence[Outcome]:
        self._note("write", keys)
        return super().write_records(keys, rows, origin)

    def have_records(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self._note("ask", keys)
        return super().have_records(keys)

    def _note(self, kind: str, keys: Sequence[bytes]) -> None:
        self.calls.append((kind, list(keys)))
        self.before(kind, keys)


class Gate:
    """Calls wait in it until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, _kind: str, _keys: Sequence[bytes]) -> None:
        self.entered.set()
        assert self.opened.wait(SECONDS)


def test_conformance() -> None:
    check_tier(lambda: BatchTier(threads=2))


def test_neighbours_come_together() -> None:
    tier = BatchTier()
    with attached(tier) as memory:
        for entry in range(7):
            memory.fill(entry, entry)
        assert tier.put(KEYS[:7], range(7)).wait(SECONDS) == [DONE] * 7
        assert tier.get(KEYS[:7], range(10, 17)).wait(SECONDS) == [DONE] * 7
        assert tier.exists(KEYS[:7]).wait(SECONDS) == [DONE] * 7
        assert [memory.version(entry) for entry in range(10, 17)] == list(range(7))
        assert tier.statistics().bytes_read == 7 * RECORD
    halves = [KEYS[:4], KEYS[4:7]]
    expected = [("write", each) for each in halves] + [("read", each) for each in halves] + [("ask", KEYS[:7])]
    assert tier.calls == expected


def test_a_small_job_is_divided_among_the_threads() -> None:
    tier = BatchTier(threads=3)
    with attached(tier):
        tier.put(KEYS[:5], range(5)).wait(SECONDS)
        tier.exists(KEYS).wait(SECONDS)
    assert sorted(keys for kind, keys in tier.calls if kind == "write") == [KEYS[:2], KEYS[2:4], KEYS[4:5]]
    assert sorted(keys for kind, keys in tier.calls if kind == "ask") == [KEYS[:3], KEYS[3:6], KEYS[6:8]]


def test_the_queue_is_bounded_by_keys() -> None:
    tier, gate = BatchTier(max_queued=6), Gate()
    with attached(tier):
        tier.before = gate
        first = tier.put([b"first"], [8])
        assert gate.entered.wait(SECONDS)
        job = tier.put(KEYS, range(8))
        assert job.outcomes == [None] * 6 + [DECLINED] * 2
        assert tier.statistics().queued_writes == 6
        assert tier.put([b"more"], [9]).wait(SECONDS) == [DECLINED]
        gate.opened.set()
        assert job.wait(SECONDS) == [DONE] * 6 + [DECLINED] * 2
        assert first.wait(SECONDS) == [DONE]
        assert tier.statistics().queued_writes == 0
    assert ("write", KEYS[4:6]) in tier.calls


def test_a_removal_cancels_its_key_alone_and_waits_for_calls_that_have_begun() -> None:
    tier, gate = BatchTier(threads=2), Gate()
    with attached(tier) as memory:
        memory.fill(0, 5)
        tier.before = gate
        begun, other = tier.put(KEYS[:2], [0, 1]), tier.put(KEYS[2:4], [2, 3])
        assert gate.entered.wait(SECONDS)
        waiting = tier.put([b"a", KEYS[0], b"b"], [4, 5, 6])
        removed = tier.remove([KEYS[0]])
        assert CANCELLED in waiting.outcomes
        assert waiting.outcomes.count(CANCELLED) == 1
        assert waiting.outcomes[1] is CANCELLED
        gate.opened.set()
        assert removed.wait(SECONDS) == [DONE]
        assert begun.wait(SECONDS) == other.wait(SECONDS) == [DONE] * 2
        assert waiting.wait(SECONDS) == [DONE, CANCELLED, DONE]
        assert tier.exists([KEYS[0], KEYS[1], b"a", b"b"]).wait(SECONDS) == [MISSING, DONE, DONE, DONE]


def test_what_one_call_raises_fails_its_keys_and_no_others() -> None:
    tier = BatchTier()

    def refuse(_kind: str, keys: Sequence[bytes]) -> None:
        if KEYS[1] in keys and len(keys) > 1:
            raise OSError("no")

    with attached(tier):
        tier.before = refuse
        assert tier.put(KEYS, range(8)).wait(SECONDS) == [FAILED] * 4 + [DONE] * 4
        assert tier.get(KEYS, range(8, 16)).wait(SECONDS) == [FAILED] * 4 + [DONE] * 4
        asked = tier.exists(KEYS).wait(SECONDS)
        assert asked == [MISSING] * 4 + [DONE] * 4, "questions are asked again, one by one"
        statistics = tier.statistics()
        assert (statistics.failed, statistics.read, statistics.written) == (8, 4, 4)


@pytest.mark.parametrize("wrong", [[], [DONE] * 5, [DONE, None, DONE, DONE], None])
def test_outcomes_of_another_number_or_type_fail_the_call(wrong: Any) -> None:
    class Wrong(BatchTier):
        def read_records(self, keys: Sequence[bytes], rows: Sequence[Rows]) -> Sequence[Outcome]:  # noqa: ARG002
            outcomes: Sequence[Outcome] = wrong
            return outcomes

    tier = Wrong()
    with attached(tier):
        assert tier.get(KEYS[:4], range(4)).wait(SECONDS) == [FAILED] * 4
        assert tier.put(KEYS[:4], range(4)).wait(SECONDS) == [DONE] * 4, "the thread goes on"


def test_one_of_several_keys_that_raises_fails_alone() -> None:
    class Some(DictTier):
        def read_record(self, key: bytes, rows: Rows) -> Outcome:
            if key == KEYS[1]:
                raise OSError("no")
            return super().read_record(key, rows)

    tier = Some(threads=1)
    tier.bytes_per_call = 4 * RECORD
    with attached(tier):
        tier.put(KEYS[:3], range(3)).wait(SECONDS)
        assert tier.get(KEYS[:3], range(3)).wait(SECONDS) == [DONE, FAILED, DONE]


@pytest.mark.parametrize("missing", ["read_record", "write_record", "has_record"])
def test_a_class_has_each_method_in_one_of_two_forms(missing: str) -> None:
    names = {"read_record": "read_records", "write_record": "write_records", "has_record": "have_records"}
    methods: dict[str, Any] = {name: getattr(DictTier, name) for name in names if name != missing}
    methods |= {name: getattr(DictTier, name) for name in ("remove_records", "remove_all")}
    with pytest.raises(TypeError, match=f"must have the method {missing}, or {names[missing]}"):
        type("Half", (ThreadedTier,), methods)()
    whole = type("Whole", (ThreadedTier,), methods | {names[missing]: lambda *_: []})()
    with pytest.raises(NotImplementedError, match=names[missing]):
        getattr(whole, missing)(
            *([b""] * (1 if missing == "has_record" else 2)), *([None] * (missing == "write_record"))
        )
