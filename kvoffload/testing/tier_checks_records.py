"""Checks of `check_tier`: the bytes of records, which are there, and which are gone."""

from __future__ import annotations

import random
import threading

from kvoffload.testing.tier_model import TierFuzz
from kvoffload.testing.tier_session import DONE, MISSING, TierSession, TierSetup, names
from kvoffload.tiers import Outcome

_MOST_TO_FILL = 4096  # records


def every_byte_comes_back(setup: TierSetup) -> None:
    with setup.session() as session:
        numbers = list(range(1, 3 * setup.entries + 1))
        session.put_all(numbers)
        for order in (numbers, numbers[::-1], random.Random(setup.seed).sample(numbers, len(numbers))):
            session.expect(order)
        assert session.tier.drain(setup.timeout) is True, "drain has not returned True, and nothing hangs"
        session.expect(numbers)


def keys_of_all_lengths(setup: TierSetup) -> None:
    with setup.session() as session:
        keys = [b"a", b"b", b"a\0", b"\0", b"\xff", b"x" * 63, b"x" * 64, b"x" * 63 + b"y"]
        numbers = list(range(1, len(keys) + 1))
        session.put_all(numbers, keys)
        session.expect(numbers, keys)
        session.expect_none([b"aa", b"\0\0", b"x" * 62], "keys that were not put, but begin like some that were")


def a_known_key_keeps_its_record(setup: TierSetup) -> None:
    with setup.session() as session:
        session.put_all([1, 2])
        session.put_all([11, 12, 3], session.keys([1, 2, 3]))
        session.expect([1, 2, 3])


def unknown_keys_are_missing(setup: TierSetup) -> None:
    with setup.session() as session:
        session.expect_none(session.keys(range(setup.entries)), "an empty tier")
        removed = session.outcomes(session.tier.remove(session.keys([1, 2])))
        assert removed == [MISSING, MISSING], f"remove of keys without records: {names(removed)}"


def results_are_in_the_order_of_the_keys(setup: TierSetup) -> None:
    chance = random.Random(setup.seed)
    with setup.session() as session:
        session.put_all([1, 3, 5, 7])
        for _ in range(10):
            numbers = chance.sample(range(8), 8)
            there = [number % 2 == 1 for number in numbers]
            wanted = [DONE if each else MISSING for each in there]
            assert session.get(session.keys(numbers)) == [
                number if known else None for number, known in zip(numbers, there, strict=True)
            ], "get, of known and unknown keys: results are not in the order of the keys"
            asked = session.outcomes(session.tier.exists(session.keys(numbers)))
            assert asked == wanted, f"exists: {names(asked)}, instead of {names(wanted)}"
            if session.tier.capabilities.local_index:
                known = session.tier.contains(session.keys(numbers))
                assert known == there, f"contains, with a local index: {known}, instead of {there}"
        removed = session.outcomes(session.tier.remove(session.keys(range(8))))
        assert removed == [MISSING, DONE] * 4, f"remove: {names(removed)}"


def any_interleaving(setup: TierSetup) -> None:
    with setup.session() as session:
        fuzz = TierFuzz(
            session.tier,
            session.pools,
            seed=setup.seed,
            keys=2 * setup.entries,
            lossless=True,
            timeout=setup.timeout,
        )
        fuzz.run(2000)


def removed_records_are_gone(setup: TierSetup) -> None:
    with setup.session() as session:
        session.put_all([1, 2, 3, 4])
        removed = session.outcomes(session.tier.remove(session.keys([2, 9, 4])))
        assert removed == [DONE, MISSING, DONE], f"remove of [known, unknown, known]: {names(removed)}"
        session.expect_none(session.keys([2, 4]), "after remove")
        session.expect([1, 3])
        session.put_all([22, 4], session.keys([2, 4]))
        session.expect([1, 22, 3, 4], session.keys([1, 2, 3, 4]))


def cleared_records_are_gone(setup: TierSetup) -> None:
    with setup.session() as session:
        session.put_all([1, 2, 3])
        job = session.tier.clear()
        assert job.keys == (b"",), f"clear: a job of the keys {job.keys}, instead of one key b''"
        outcomes = session.outcomes(job)
        assert set(outcomes) <= {DONE, MISSING}, f"clear: {names(outcomes)}"
        session.expect_none(session.keys([1, 2, 3]), "after clear")
        records = session.tier.statistics().records
        assert records in (0, None), f"after clear: statistics().records is {records}"
        session.put_all([12, 2], session.keys([1, 2]))
        session.expect([12, 2], session.keys([1, 2]))


def what_removes_overtakes_no_put(setup: TierSetup) -> None:
    """Puts that were called before are gone, whether they wait or have begun."""
    for number in range(20):
        with_clear = number % 2 == 0
        with setup.session() as session:
            keys = session.keys(range(setup.entries))
            put = session.tier.put(keys, session.fill(range(setup.entries)))
            removal = session.tier.clear() if with_clear else session.tier.remove(keys)
            session.outcomes(removal)
            outcomes = session.outcomes(put)
            assert set(outcomes) <= {DONE, Outcome.CANCELLED}, f"put, then a removal: {names(outcomes)}"
            session.expect_none(keys, f"put, then {'clear' if with_clear else 'remove'} without waiting")


def it_stays_within_its_bytes(setup: TierSetup) -> None:
    with setup.session() as session:
        most = session.tier.capabilities.max_bytes
        record_bytes = session.pools.record_bytes
        if most is None or most // record_bytes > _MOST_TO_FILL:
            return
        wanted = 2 * (most // record_bytes) + setup.entries
        for start in range(0, wanted, setup.entries):
            numbers = range(start, min(wanted, start + setup.entries))
            session.put(numbers)
            records = session.tier.statistics().records
            assert records is None or records * record_bytes <= most, (
                f"{records} records of {record_bytes} bytes, and max_bytes is {most}"
            )
        found = 0
        for start in range(0, wanted, setup.entries):
            numbers = range(start, min(wanted, start + setup.entries))
            for number, version in zip(numbers, session.get(session.keys(numbers)), strict=True):
                assert version in (number, None), f"get of {session.key(number)!r}: content {version}"
                found += version is not None
        assert found * record_bytes <= most, f"{found} records come back, of {record_bytes} bytes; max_bytes is {most}"


def statistics_count(setup: TierSetup) -> None:
    with setup.session() as session:
        before = session.tier.statistics()
        session.put_all([1, 2, 3])
        session.get(session.keys([1, 2, 9]))
        after = session.tier.statistics()
        nbytes = session.pools.record_bytes
        changes = {
            "written": 3,
            "bytes_written": 3 * nbytes,
            "read": 2,
            "bytes_read": 2 * nbytes,
            "missing": 1,
            "corrupt": 0,
            "failed": 0,
            "declined": 0,
        }
        for name, change in changes.items():
            grown = getattr(after, name) - getattr(before, name)
            assert grown == change, f"statistics().{name} has grown by {grown} instead of {change}"
        assert after.records in (3, None), f"statistics().records is {after.records} instead of 3"


def many_threads_at_once(setup: TierSetup) -> None:
    threads = 4
    with setup.session() as session:
        errors: list[BaseException] = []
        each = setup.entries // threads

        def run(number: int) -> None:
            try:
                for turn in range(20):
                    _one_thread(session, range(number * each, (number + 1) * each), 1000 * turn)
            except BaseException as error:
                errors.append(error)

        running = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(setup.timeout)
        assert not any(thread.is_alive() for thread in running), "a thread does not come to an end"
        for error in errors:
            raise error


def _one_thread(session: TierSession, entries: range, first: int) -> None:
    """Put records, fetch them, remove them; with keys and entries that no other thread has."""
    tier, pools = session.tier, session.pools
    keys = session.keys(entries)
    for entry in entries:
        pools.fill(entry, first + entry)
    outcomes = session.outcomes(tier.put(keys, entries))
    assert set(outcomes) == {DONE}, f"put by several threads: {names(outcomes)}"
    for entry in entries:
        pools.poison(entry)
    session.outcomes(tier.exists(keys))
    tier.contains(keys)
    tier.statistics()
    outcomes = session.outcomes(tier.get(keys, entries))
    assert set(outcomes) == {DONE}, f"get by several threads of what was put: {names(outcomes)}"
    for entry in entries:
        version = pools.version(entry)
        assert version == first + entry, f"get by several threads: content {version} instead of {first + entry}"
    outcomes = session.outcomes(tier.remove(keys))
    assert set(outcomes) == {DONE}, f"remove by several threads: {names(outcomes)}"


CHECKS = [
    every_byte_comes_back,
    keys_of_all_lengths,
    a_known_key_keeps_its_record,
    unknown_keys_are_missing,
    results_are_in_the_order_of_the_keys,
    removed_records_are_gone,
    cleared_records_are_gone,
    what_removes_overtakes_no_put,
    it_stays_within_its_bytes,
    statistics_count,
]
MIXED_CHECKS = [many_threads_at_once, any_interleaving]  # last: what they find, others say better
