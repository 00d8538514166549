"""CacheIndex and BlockCache beside plain books: random calls, failures, moments of completion, and threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from helpers import Gate, cache_state, in_threads, key, keys, rig, simulated, whole
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from seeds import rest_long

from kvoffload import (
    NO_WAIT,
    BlockCache,
    CacheEvent,
    CacheIndex,
    CacheJob,
    CacheRequest,
    CapacityError,
    ClosedError,
    DriverError,
    Job,
    Lease,
    MissingKeyError,
    Reservation,
    Status,
    TransferError,
)
from kvoffload.cache.key_cache import KeyCache
from kvoffload.cache.policies import POLICIES

CAPACITY = 5
numbers = st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True)
few = st.lists(st.integers(0, 11), min_size=1, max_size=3)
which = st.integers(0, 5)
# calls that fail, and how often they are made before: whatever copies, and the events before, at and after the copies
FAULTS = (
    ("cuMemcpy2DAsync", 1),
    ("cuMemcpyAsync", 1),
    ("cuEventRecord", 1),
    ("cuEventRecord", 2),
    ("cuEventRecord", 3),
)
faults = st.sampled_from([None, None, None, None, *FAULTS])


class Fill:
    """Somebody fills entries: a reservation, or a store."""

    def __init__(self, reservation: Reservation | None, jobs: Sequence[Job] = ()) -> None:
        self.reservation = reservation
        self.jobs = jobs
        self.places: dict[bytes, int] = {}
        self.ended = False

    @property
    def failed(self) -> bool:
        return any(job.error is not None for job in self.jobs)


class Place:
    """Where a key is, what every byte of it should be, and who fills it, None if it can be read."""

    def __init__(self, index: int, value: int, fill: Fill | None) -> None:
        self.index = index
        self.value = value
        self.fill = fill


class Books:
    """What should be in a cache, whatever its policy, and who holds what."""

    def __init__(self, prefix: bool) -> None:
        self.may_decline = prefix
        self.here: dict[bytes, Place] = {}
        self.holds: Counter[int] = Counter()
        self.counts = Counter(dict.fromkeys(("stored", "evicted", "failed", "removed", "declined"), 0))

    @property
    def free(self) -> int:
        return CAPACITY - len({place.index for place in self.here.values()} | set(+self.holds))

    def status(self, name: bytes) -> Status:
        place = self.here.get(name)
        return Status.MISS if place is None else Status.HIT if place.fill is None else Status.PENDING

    def may_go(self, request: Sequence[bytes]) -> list[bytes]:
        """Keys that can be given up for a request."""
        return [
            name
            for name, place in self.here.items()
            if place.fill is None and not self.holds[place.index] and name not in request
        ]

    def missing(self, request: Sequence[bytes]) -> list[bytes]:
        return [name for name in request if name not in self.here]

    def refuses(self, request: Sequence[bytes], own: Sequence[bytes] = ()) -> bool:
        """Whether the request, which has the keys `own` already, finds no room, if none of it is declined."""
        return len(self.missing(request)) - self.free > len(self.may_go([*request, *own]))

    def store(
        self, request: Sequence[bytes], stored: Sequence[bytes], evicted: Sequence[bytes], own: Sequence[bytes] = ()
    ) -> None:
        """What a cache that was asked to store has answered must have been possible."""
        missing, may_go = self.missing(request), self.may_go([*request, *own])
        most = min(len(missing), self.free + len(may_go))
        assert list(stored) == missing[: len(stored)]
        assert len(stored) <= most if self.may_decline else len(stored) == most
        assert set(evicted) <= set(may_go), "nothing in use was given up, and nothing of the request's own"
        assert len(set(evicted)) == len(evicted) == max(0, len(stored) - self.free), "as few as necessary"
        for name in evicted:
            del self.here[name]
        self.counts["evicted"] += len(evicted)
        self.counts["declined"] += len(missing) - len(stored)

    def begin(self, fill: Fill, places: dict[bytes, int], values: dict[bytes, int]) -> None:
        """New keys are being filled."""
        taken = {place.index for place in self.here.values()} | set(+self.holds)
        assert not taken & set(places.values()), "nobody has these entries"
        assert len(set(places.values())) == len(places)
        fill.places = places
        self.holds.update(places.values())
        for name, index in places.items():
            self.here[name] = Place(index, values[name], fill)

    def end(self, fill: Fill, *, well: bool) -> None:
        """Those of its keys that were not removed meanwhile are hits, or gone."""
        assert not fill.ended
        fill.ended = True
        self.let_go(fill.places.values())
        mine = [name for name in fill.places if name in self.here and self.here[name].fill is fill]
        self.counts["stored" if well else "failed"] += len(mine)
        for name in mine:
            if well:
                self.here[name].fill = None
            else:
                del self.here[name]

    def remove(self, names: Sequence[bytes]) -> int:
        gone = [self.here.pop(name) for name in set(names) if name in self.here]
        self.counts["removed"] += sum(place.fill is None for place in gone)  # the others were never announced
        return len(gone)

    def let_go(self, indices: Any) -> None:
        self.holds.subtract(indices)

    def agree(self, index: KeyCache) -> None:
        """Compare with an index whose calls have all come to their end."""
        index.check()
        names = keys(*range(12))
        assert index.status(names) == [self.status(name) for name in names]
        assert {name: place.index for name, place in self.here.items()} == index._state.table.of
        assert index._state.table.holds == dict(+self.holds)
        assert index._state.table.num_free == self.free
        found = index.statistics()
        assert {kind: getattr(found, kind) for kind in self.counts} == dict(self.counts)
        pending = sum(place.fill is not None for place in self.here.values())
        assert (found.pending, found.resident) == (pending, len(self.here) - pending)
        assert found.stored - found.evicted - found.removed == found.resident


class Mirror:
    """The keys that can be loaded, as somebody knows them who hears of events only."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.wrong: list[CacheEvent] = []

    def __call__(self, event: CacheEvent) -> None:
        mine = set(event.keys)
        if event.kind == "stored":
            self.wrong += [event] if self.keys & mine else []
            self.keys |= mine
        elif event.kind in ("evicted", "removed"):
            self.wrong += [] if self.keys >= mine else [event]
            self.keys -= mine


class Requests:
    """Open requests of a cache, and the keys that each should have."""

    def __init__(self, cache: CacheIndex | BlockCache) -> None:
        self.cache = cache
        self.all: list[tuple[CacheRequest, list[bytes]]] = []

    def open(self) -> None:
        if len(self.all) < 4:
            self.all.append((self.cache.open_request(), []))

    def pick(self, member: int | None) -> tuple[CacheRequest | None, list[bytes]]:
        """One of them, and its keys; or none."""
        return (None, []) if member is None or not self.all else self.all[member % len(self.all)]

    def end(self, which: int, how: str, refused: Callable[[CacheRequest], object]) -> None:
        """End one, or drop it. `refused`: a call that an ended request must not be named in."""
        request, own = self.all.pop(which % len(self.all))
        assert list(request.keys) == own
        if how == "drop":
            return
        if how == "raise":
            with pytest.raises(InterruptedError), request:
                raise InterruptedError
        else:
            for _ in range(2):
                request.end()
        assert request.ended
        with pytest.raises(ClosedError):
            refused(request)


def add(own: list[bytes], given: Sequence[bytes]) -> None:
    own[:] = dict.fromkeys([*own, *given])


member = st.none() | st.integers(0, 5)
ends = st.sampled_from(["end", "drop", "raise"])


# CacheIndex


class IndexMachine(RuleBasedStateMachine):
    """A CacheIndex beside its books, and a mirror of it that hears its events only."""

    policy: Any = ""

    def __init__(self) -> None:
        super().__init__()
        self.mirror = Mirror()
        self.index = CacheIndex(CAPACITY, policy=self.policy, on_event=self.mirror)
        self.books = Books(self.policy == "prefix")
        self.open: list[Fill] = []
        self.settled: list[Reservation] = []
        self.leases: list[Lease] = []
        self.requests = Requests(self.index)

    @property
    def state(self) -> dict[str, Any]:
        idle = SimpleNamespace(statistics=lambda: SimpleNamespace(in_flight=0))
        stub: Any = SimpleNamespace(_state=self.index._state, statistics=self.index.statistics, engine=idle)
        return cache_state(stub)

    @rule()
    def open_request(self) -> None:
        self.requests.open()

    @precondition(lambda self: self.requests.all)
    @rule(which=which, how=ends)
    def end_request(self, which: int, how: str) -> None:
        before = self.state
        self.requests.end(which, how, lambda ended: self.index.reserve(keys(0), request=ended))
        assert how == "end" or self.state == before

    @rule(numbers=numbers, whole=st.booleans(), member=member)
    def reserve(self, numbers: list[int], whole: bool, member: int | None) -> None:
        request, before = keys(*numbers), self.state
        opened, own = self.requests.pick(member)
        refuses = self.books.refuses(request, own)
        if whole:
            try:
                reservation = self.index.reserve(request, all_or_nothing=True, request=opened)
            except CapacityError:
                assert refuses or self.books.may_decline
                assert self.state == before
                return
            assert not refuses
            assert not reservation.declined
        else:
            reservation = self.index.reserve(request, request=opened)
        assert list(reservation.present) == [name for name in request if name in self.books.here]
        assert reservation.keys == tuple(request[position] for position in reservation.positions)
        assert sorted((*reservation.keys, *reservation.declined, *reservation.present)) == sorted(request)
        self.books.store(request, reservation.keys, reservation.evicted, own)
        add(own, request)
        fill = Fill(reservation)
        places = dict(zip(reservation.keys, reservation.indices, strict=True))
        self.books.begin(fill, places, dict.fromkeys(places, 0))
        self.open.append(fill)

    @precondition(lambda self: self.open)
    @rule(which=which, well=st.booleans())
    def settle(self, which: int, well: bool) -> None:
        fill = self.open.pop(which % len(self.open))
        assert fill.reservation is not None
        (fill.reservation.commit if well else fill.reservation.abort)()
        self.books.end(fill, well=well)
        self.settled.append(fill.reservation)

    @precondition(lambda self: self.settled)
    @rule(which=which, commit=st.booleans())
    def settle_again(self, which: int, commit: bool) -> None:
        reservation, before = self.settled[which % len(self.settled)], self.state
        with pytest.raises(ClosedError):
            (reservation.commit if commit else reservation.abort)()
        assert self.state == before

    @rule(numbers=few, pending=st.booleans())
    def acquire(self, numbers: list[int], pending: bool) -> None:
        request, before = keys(*numbers), self.state
        if any(self.books.status(name) is not Status.HIT for name in request):
            with pytest.raises(MissingKeyError):  # also with `pending`: nobody has told of a transfer
                self.index.acquire(request, pending=pending)
            assert self.state == before
            return
        lease = self.index.acquire(request, pending=pending)
        assert list(lease.indices) == [self.books.here[name].index for name in request]
        self.books.holds.update(set(lease.indices))
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(which=which)
    def release(self, which: int) -> None:
        lease = self.leases.pop(which % len(self.leases))
        for _ in range(2):
            lease.release()
        self.books.let_go(set(lease.indices))

    @rule(numbers=few, everything=st.integers(0, 7))
    def remove(self, numbers: list[int], everything: int) -> None:
        if everything == 7:
            assert self.index.clear() == self.books.remove(list(self.books.here))
        else:
            assert self.index.remove(keys(*numbers)) == self.books.remove(keys(*numbers))

    @rule(numbers=few)
    def touch(self, numbers: list[int]) -> None:
        self.index.touch(keys(*numbers))

    @rule(numbers=few, member=member)
    def load(self, numbers: list[int], member: int | None) -> None:
        opened, own = self.requests.pick(member)
        self.index.load(keys(*numbers), request=opened)
        add(own, keys(*numbers))

    @rule(number=st.integers(0, 11))
    def status_of(self, number: int) -> None:
        before = self.index.statistics()
        status = self.index.status_of(key(number))
        assert status is self.books.status(key(number))
        after = self.index.statistics()
        assert (after.lookups - before.lookups, after.hits - before.hits) == (1, int(status is Status.HIT))

    @rule(numbers=numbers)
    def lookup(self, numbers: list[int]) -> None:
        request = keys(*numbers)
        ready = [self.books.status(name) is Status.HIT for name in request]
        assert self.index.lookup_many([request, request[1:]]) == [
            [*each, False].index(False) for each in (ready, ready[1:])
        ]

    @invariant()
    def agrees(self) -> None:
        self.books.agree(self.index)
        assert self.mirror.wrong == []
        assert self.mirror.keys == {name for name, place in self.books.here.items() if place.fill is None}
        held = {index for lease in self.leases for index in lease.indices}
        assert self.index.statistics().pinned == len(held)
        assert all(list(request.keys) == own for request, own in self.requests.all)


# BlockCache


class CacheMachine(RuleBasedStateMachine):
    """A BlockCache beside its books, with three streams that gates hold back, opened in any order.

    After each rule everything ends that no gate holds; a rule that submits may open a gate in the middle of it. Blocks
    from 32 on are targets, the others keep what they have; a key's bytes say which store they come from.
    """

    policy: Any = ""

    @initialize(seed=st.integers(0, 1000))
    def start(self, seed: int) -> None:
        self.device = simulated(seed, "no-batch")
        self.simulator: Any = self.device.simulator
        self.context = rig(self.device, planes=2, block_bytes=16, num_blocks=64, num_slots=CAPACITY)
        self.bench = self.context.__enter__()
        self.engine = self.bench.engine
        self.cache = BlockCache(self.engine, policy=self.policy)
        self.books = Books(self.policy == "prefix")
        self.streams = [self.bench.stream() for _ in range(3)]
        self.gates: dict[int, Gate] = {}
        self.open: list[tuple[Fill, dict[bytes, int]]] = []  # reservations, and what was written into their slots
        self.fills: list[Fill] = []  # with jobs that have not ended
        self.leases: list[tuple[Lease, list[tuple[Fill | None, int]]]] = []
        self.loads: list[tuple[CacheJob, set[int], list[Fill], list[tuple[int, int]]]] = []  # targets and values
        self.targets = 32
        self.written = 100
        self.requests = Requests(self.cache)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.simulator.faults.clear()
            self.finish()
            for fill, _ in self.open:
                assert fill.reservation is not None
                fill.reservation.abort()
                self.books.end(fill, well=False)
            for lease, _ in self.leases:
                lease.release()
                self.books.let_go(set(lease.indices))
            self.books.agree(self.cache)
            assert not +self.books.holds
            whole(self.engine)
            self.context.__exit__(None, None, None)
            self.device.close()
            assert self.simulator.violations == []

    # the world

    def settle(self) -> None:
        """Everything ends that no gate holds; the books hear of it."""
        self.simulator.run_all()
        self.engine.advance()
        for fill in [fill for fill in self.fills if all(job.finished for job in fill.jobs)]:
            self.fills.remove(fill)
            self.books.end(fill, well=not fill.failed)
        for load in [load for load in self.loads if load[0].done and load[1]]:
            self.books.let_go(load[1])
            load[1].clear()

    def open_gate(self, which: int) -> None:
        if self.gates:
            self.gates.pop(list(self.gates)[which % len(self.gates)]).open()

    def stream(self, which: int) -> Any:
        """None, or a stream behind a gate, which is shut."""
        if which >= len(self.streams):
            return NO_WAIT
        if which not in self.gates:
            self.gates[which] = self.bench.gate(self.streams[which])
        return self.streams[which]

    def submit(self, midway: int, fault: tuple[str, int] | None, call: Callable[[], Any]) -> Any:
        """Run a call that, having decided what to do, may have a gate open before its eyes; one that may fail."""
        check_room = self.engine.check_room

        def opening(jobs: int) -> None:
            check_room(jobs)
            if midway < 3:
                self.open_gate(midway)
                self.simulator.run_all()
            if fault is not None:
                self.simulator.faults.fail_call(*fault)

        self.engine.check_room = opening  # type: ignore[method-assign]
        try:
            return call()
        finally:
            self.engine.check_room = check_room  # type: ignore[method-assign]
            self.simulator.faults.clear()

    def pick(self, numbers: Sequence[int], known: int) -> list[bytes]:
        """Any keys, or rather such as are there."""
        there = sorted(self.books.here)
        return [there[number % len(there)] for number in numbers] if known and there else keys(*numbers)

    @rule(which=which)
    def let_through(self, which: int) -> None:
        self.open_gate(which)

    # filling

    @rule(
        numbers=numbers,
        base=st.integers(0, 31),
        which=st.integers(0, 4),
        midway=st.integers(0, 5),
        fault=faults,
        whole=st.booleans(),
        member=member,
    )
    def store(
        self, numbers: list[int], base: int, which: int, midway: int, fault: Any, whole: bool, member: int | None
    ) -> None:
        request, blocks = keys(*numbers), [(base + place) % 32 for place in range(len(numbers))]
        opened, own = self.requests.pick(member)
        refuses, before = self.books.refuses(request, own), cache_state(self.cache)
        ready = set(self.books.may_go(request))
        options = {"after": self.stream(which), "all_or_nothing": whole, "request": opened}
        call = partial(self.cache.store, request, blocks, **options)
        try:
            job = self.submit(midway, fault, call)
        except CapacityError:
            assert whole
            assert refuses or self.books.may_decline
            assert cache_state(self.cache) == before
            return
        except DriverError:
            assert midway < 3 or cache_state(self.cache) == before
            add(own, request)
            return
        assert not (whole and refuses)
        there = self.cache._state.table.of
        self.books.store(request, job.keys, [name for name in ready if name not in there], own)
        add(own, request)
        fill = Fill(None, job.jobs)
        values = {name: block + 1 for name, block in zip(request, blocks, strict=True)}
        self.books.begin(fill, {name: there[name] for name in job.keys}, values)
        if job.jobs:
            self.fills.append(fill)

    @rule()
    def open_request(self) -> None:
        self.requests.open()

    @precondition(lambda self: self.requests.all)
    @rule(which=which, how=ends)
    def end_request(self, which: int, how: str) -> None:
        self.requests.end(which, how, lambda ended: self.cache.store([], [], request=ended))

    @rule(numbers=numbers, whole=st.booleans(), member=member)
    def reserve(self, numbers: list[int], whole: bool, member: int | None) -> None:
        """Reserve and write the slots by hand."""
        request, before = keys(*numbers), cache_state(self.cache)
        opened, own = self.requests.pick(member)
        refuses = self.books.refuses(request, own)
        try:
            reservation = self.cache.reserve(request, all_or_nothing=whole, request=opened)
        except CapacityError:
            assert whole
            assert refuses or self.books.may_decline
            assert cache_state(self.cache) == before
            return
        assert not (whole and refuses)
        self.books.store(request, reservation.keys, reservation.evicted, own)
        add(own, request)
        fill = Fill(reservation)
        values = dict[bytes, int]()
        for name, slot in zip(reservation.keys, reservation.slots(), strict=True):
            self.written = 100 + (self.written - 99) % 100
            values[name] = self.written
            self.engine.slots[slot] = self.written
        self.books.begin(fill, dict(zip(reservation.keys, reservation.indices, strict=True)), values)
        self.open.append((fill, values))

    @precondition(lambda self: self.open)
    @rule(which=which, well=st.booleans())
    def settle_by_hand(self, which: int, well: bool) -> None:
        fill, _ = self.open.pop(which % len(self.open))
        assert fill.reservation is not None
        (fill.reservation.commit if well else fill.reservation.abort)()
        self.books.end(fill, well=well)

    @precondition(lambda self: self.open)
    @rule(which=which, base=st.integers(0, 31), first=st.integers(0, 4), second=st.integers(0, 4), fault=faults)
    def settle_by_jobs(self, which: int, base: int, first: int, second: int, fault: Any) -> None:
        """Copy into the slots with two jobs, each after a stream of its own, and commit with both."""
        fill, values = self.open.pop(which % len(self.open))
        reservation = fill.reservation
        assert reservation is not None
        blocks = [(base + place) % 32 for place in range(len(reservation.keys))]
        half = len(blocks) // 2
        jobs = list[Job]()
        if fault is not None:
            self.simulator.faults.fail_call(*fault)
        try:
            for part, stream in ((slice(half), first), (slice(half, None), second)):
                jobs.append(self.engine.store(blocks[part], reservation.slots()[part], after=self.stream(stream)))
        except DriverError:
            if jobs and not jobs[0].done:  # it writes still: a gap in the row would come back too early
                reservation.commit(*jobs)
                fill.jobs = jobs
            else:
                reservation.abort()
                self.books.end(fill, well=False)
                return
        else:
            reservation.commit(*jobs)
            fill.jobs = jobs
        finally:
            self.simulator.faults.clear()
        for name, block in zip(reservation.keys, blocks, strict=True):
            if len(jobs) == 2 or blocks.index(block) < half:
                values[name] = block + 1
            if name in self.books.here and self.books.here[name].fill is fill:
                self.books.here[name].value = values[name]
        self.fills.append(fill)

    # reading

    def readable(self, request: Sequence[bytes], pending: bool) -> bool:
        places = [self.books.here.get(name) for name in request]
        return all(place and (place.fill is None or (pending and place.fill.jobs)) for place in places)

    def promises(self, request: Sequence[bytes]) -> list[tuple[Fill | None, int]]:
        """What the bytes of each key will be, once somebody has filled it well."""
        return [(self.books.here[name].fill, self.books.here[name].value) for name in request]

    @rule(
        numbers=few,
        known=st.integers(0, 3),
        which=which,
        pending=st.booleans(),
        midway=st.integers(0, 5),
        fault=faults,
        member=member,
    )
    def load(
        self, numbers: list[int], known: int, which: int, pending: bool, midway: int, fault: Any, member: int | None
    ) -> None:
        request = self.pick(numbers, known)
        if self.targets + len(request) > 64:
            self.finish()
        targets = range(self.targets, self.targets + len(request))
        before = cache_state(self.cache)
        opened, own = self.requests.pick(member)
        options = {"after": self.stream(which), "pending": pending, "request": opened}
        call = partial(self.cache.load, request, targets, **options)
        if not self.readable(request, pending):
            with pytest.raises(MissingKeyError):
                call()
            assert cache_state(self.cache) == before
            return
        promises, indices = self.promises(request), {self.books.here[name].index for name in request}
        try:
            job = self.submit(midway, fault, call)
        except DriverError:
            assert midway < 3 or cache_state(self.cache) == before
            return
        self.targets = targets.stop
        add(own, request)
        self.books.holds.update(indices)
        sources = [fill for fill, _ in promises if fill is not None]
        values = [(target, value) for target, (_, value) in zip(targets, promises, strict=True)]
        self.loads.append((job, indices, sources, values))

    @rule(numbers=few, known=st.integers(0, 3), pending=st.booleans())
    def acquire(self, numbers: list[int], known: int, pending: bool) -> None:
        request, before = self.pick(numbers, known), cache_state(self.cache)
        if not self.readable(request, pending):
            with pytest.raises(MissingKeyError):
                self.cache.acquire(request, pending=pending)
            assert cache_state(self.cache) == before
            return
        lease = self.cache.acquire(request, pending=pending)
        assert [int(slot) for slot in lease.slots()] == [self.books.here[name].index for name in request]
        self.books.holds.update(set(lease.indices))
        self.leases.append((lease, self.promises(request)))

    @precondition(lambda self: self.leases)
    @rule(which=which)
    def release(self, which: int) -> None:
        lease, _ = self.leases.pop(which % len(self.leases))
        lease.release()
        lease.release()
        self.books.let_go(set(lease.indices))

    def finish(self) -> None:
        """Open all gates, let everything end, compare the bytes of the loads."""
        while self.gates:
            self.open_gate(0)
        self.engine.drain(10)
        self.settle()
        for job, _, sources, values in self.loads:
            spoilt = any(fill.failed for fill in sources)
            if spoilt or any(each.error is not None for each in job.jobs):
                with pytest.raises(TransferError):
                    job.wait(10)
                continue
            job.wait(10)
            assert [set(self.bench.block(target).tolist()) for target, _ in values] == [{value} for _, value in values]
        self.loads.clear()
        self.targets = 32
        self.engine.poll()

    # the rest

    @rule(really=st.integers(0, 3))
    def let_all_through(self, really: int) -> None:
        if not really:
            self.finish()

    @rule(numbers=few, known=st.booleans(), everything=st.integers(0, 7))
    def remove(self, numbers: list[int], known: bool, everything: int) -> None:
        request = self.pick(numbers, known)
        if everything == 7:
            assert self.cache.clear() == self.books.remove(list(self.books.here))
        else:
            assert self.cache.remove(request) == self.books.remove(request)

    @rule(numbers=few, known=st.booleans())
    def touch(self, numbers: list[int], known: bool) -> None:
        self.cache.touch(self.pick(numbers, known))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()  # before anything more ends
        self.settle()
        self.books.agree(self.cache)
        self.cache.check()
        assert all(list(request.keys) == own for request, own in self.requests.all)
        names = keys(*range(12))
        ready = [self.books.status(name) is Status.HIT for name in names]
        assert self.cache.lookup_many([[name] for name in names]) == [int(each) for each in ready]
        self.bytes_agree()

    def bytes_agree(self) -> None:
        """What can be read is what was stored; what is leased or reserved stays as it is."""
        for name, place in self.books.here.items():
            assert place.fill is not None or self.all_are(place.index, place.value), name
        for lease, promises in self.leases:
            for index, (fill, value) in zip(lease.indices, promises, strict=True):
                if fill is None or (fill.ended and not fill.failed):
                    assert self.all_are(index, value), lease
        for fill, values in self.open:
            assert all(self.all_are(index, values[name]) for name, index in fill.places.items()), "nobody else writes"

    def all_are(self, index: int, value: int) -> bool:
        return bool((self.bench.slot(index) == value).all())


def machine(base: type[RuleBasedStateMachine], policy: Any, examples: int, steps: int) -> Any:
    """The tests of a machine with a policy."""
    made: Any = type(f"{policy}{base.__name__}", (base,), {"policy": policy})
    made = made.TestCase
    made.settings = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return made


TestIndexWithARC = machine(IndexMachine, "arc", 25, 50)
TestIndexWithLRU = machine(IndexMachine, "lru", 25, 50)
TestIndexWithPrefix = machine(IndexMachine, "prefix", 25, 50)
TestIndexWithS3FIFO = machine(IndexMachine, "s3fifo", 25, 50)
TestCacheWithARC = pytest.mark.long(machine(CacheMachine, "arc", 30, 50))
TestCacheWithLRU = machine(CacheMachine, "lru", 30, 50)
TestCacheWithPrefix = machine(CacheMachine, "prefix", 30, 50)
TestCacheWithS3FIFO = pytest.mark.long(machine(CacheMachine, "s3fifo", 30, 50))


# threads


class Client:
    """One thread's use of a shared cache: whatever it reads of a key is that key's byte, or it is told."""

    def __init__(self, cache: BlockCache, read: Callable[[int], Any], number: int, seed: int) -> None:
        self.cache = cache
        self.engine = cache.engine
        self.read = read
        self.targets = range(32 + 6 * number, 38 + 6 * number)
        self.rng = np.random.default_rng([seed, number])
        self.loaded = 0
        self.spoilt = 0

    def run(self, turns: int) -> None:
        calls = (self.store, self.store, self.load, self.load, self.load_pending, self.reserve, self.lease, self.others)
        for _ in range(turns):
            chosen = sorted(int(each) for each in self.rng.permutation(16)[: self.rng.integers(1, 4)])
            try:
                calls[int(self.rng.integers(len(calls)))](chosen)
            except (CapacityError, MissingKeyError):
                pass  # others use what this one would have, or have pushed it out
            except TransferError:
                self.spoilt += 1
            self.cache.check()

    def store(self, chosen: list[int]) -> None:
        job = self.cache.store(keys(*chosen), chosen, after=NO_WAIT)
        if self.rng.random() < 0.5:
            job.wait(30)

    def load(self, chosen: list[int], *, pending: bool = False) -> None:
        targets = self.targets[: len(chosen)]
        self.cache.load(keys(*chosen), targets, after=NO_WAIT, pending=pending).wait(30)
        for number, target in zip(chosen, targets, strict=True):
            assert (self.read(target) == number + 1).all()
            self.loaded += 1

    def load_pending(self, chosen: list[int]) -> None:
        self.cache.store(keys(*chosen), chosen, after=NO_WAIT)
        self.load(chosen, pending=True)

    def reserve(self, chosen: list[int]) -> None:
        """A reservation filled by a job, by hand, or not at all."""
        method = self.rng.random()
        with self.cache.reserve(keys(*chosen)) as reservation:
            blocks = [chosen[position] for position in reservation.positions]
            if method < 0.4:
                reservation.commit(self.engine.store(blocks, reservation.slots(), after=NO_WAIT))
            elif method < 0.7:
                self.engine.slots[reservation.slots()] = np.array([[block + 1] for block in blocks], np.uint8).reshape(
                    -1, 1
                )
            else:
                self.engine.slots[reservation.slots()] = 255
                reservation.abort()

    def lease(self, chosen: list[int]) -> None:
        """What a lease holds stays as it is while others do their worst."""
        with self.cache.acquire(keys(*chosen), pending=self.rng.random() < 0.5) as lease:
            lease.wait(30)
            for _ in range(3):
                found = [set(row.tolist()) for row in self.engine.slots[lease.slots()][:, :64]]
                assert found == [{number + 1} for number in chosen]
                self.cache.touch(lease.keys)
            self.loaded += len(chosen)

    def others(self, chosen: list[int]) -> None:
        self.cache.lookup_many([keys(*chosen), [key(chosen[0])]])
        self.cache.touch(keys(*chosen))
        if self.rng.random() < 0.3:
            self.cache.remove(keys(chosen[0]))
        if self.rng.random() < 0.05:
            self.cache.clear()
        self.cache.statistics()


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("policy", rest_long(POLICIES, 1))
def test_threads_with_their_own_ways_share_a_cache(policy: Any, seed: int) -> None:
    """Now and then a copy fails. Nothing hangs, nothing stays behind, and nobody reads another key's bytes."""
    device = simulated(seed, "no-batch", deadlock_seconds=10)
    with device, rig(device, num_blocks=64, num_slots=10) as bench:
        mirror, simulator = Mirror(), cast(Any, device.simulator)
        cache = BlockCache(bench.engine, policy=policy, on_event=mirror)
        rng = np.random.default_rng(seed)
        for nth in np.cumsum(rng.integers(20, 120, size=20)):
            simulator.faults.fail_call("cuMemcpy2DAsync", nth=int(nth))
        clients = [Client(cache, bench.block, number, seed) for number in range(4)]
        in_threads(*(partial(client.run, 120) for client in clients))
        bench.engine.drain(30)
        cache.check()
        whole(bench.engine)
        statistics = cache.statistics()
        assert (statistics.pending, statistics.pinned) == (0, 0)
        assert cache._state.table.holds == {}
        assert (mirror.wrong, mirror.keys) == ([], set(cache._records.keys)), "events came in their order"
        assert sum(client.loaded for client in clients) > 20, "something was read"
        simulator.faults.clear()
        present = [number for number in range(20) if cache.lookup([key(number)])]
        cache.load(keys(*present), range(32, 32 + len(present))).wait(30)
        assert [int(bench.block(32 + place)[0]) for place in range(len(present))] == [number + 1 for number in present]
        cache.store(keys(*range(100, 110)), range(10)).wait(30)
        assert statistics.resident == len(present)
        assert len(cache) <= 10
