"""What the engines that share a pool may find: two models, of which each run of `fuzz_pool.py` has one.

`Exact` says for calls one after another, over a pool with the policy "lru", which keys are there, what evicts which,
and what is held. `Ledger` says for calls at the same time, and for any policy, which bytes a hit may not have.

Neither knows an entry's number or a message. Keys are numbers. Each store of a key writes other bytes, its version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MISS, HIT, PENDING = range(3)
Handle = tuple[int, str, int]  # of a reservation, a lease, a load or a request: the engine, what it is, a number
Numbers = Sequence[int]
Versions = Sequence[int] | None  # None: the call was refused


class Judge:
    """Both have these calls, after the engine has answered; `sent`: when it was asked. They raise AssertionError.

    An engine is a number. What orders keys, and what only happens to the owner, `Ledger` need not know.

    Attributes:
        shared: leases, and loads that go on: while an engine has no owner, its calls read what one of these holds,
            if that has all their keys.
    """

    def __init__(self) -> None:
        self.now = 0
        self.shared = set[Handle]()
        self.counts = Counter[str]()
        self.latest = Counter[int]()

    @property
    def uncertain(self) -> bool:
        """Whether it does not know how much room there is."""
        return False

    def tick(self) -> int:
        """The time of a question or an answer."""
        self.now += 1
        return self.now

    def version(self, number: int) -> int:
        """For the next store of a key."""
        self.latest[number] += 1
        return self.latest[number]

    def begun(self, numbers: Numbers, versions: Numbers) -> None:
        """An engine is about to be told to make these hits."""

    def open_request(self, handle: Handle) -> None: ...

    def end_request(self, handle: Handle) -> None: ...

    def touch(self, numbers: Numbers) -> None: ...

    def lose_owner(self) -> None: ...

    def have_owner(self) -> None: ...

    def join(self, engine: int, *, sent: int) -> None:
        """An owner has answered what this engine has asked."""

    def drop(self, handle: Handle) -> None:
        """It is garbage, and holds its entries until transfers have ended."""
        self.shared.discard(handle)

    def forget(self, engine: int) -> None:
        """The engine has removed keys, or has ended."""
        self.shared = {handle for handle in self.shared if handle[0] != engine}


@dataclass(eq=False)
class Entry:
    """Room for a key's bytes: taken as long as it has its key, or a holder.

    Attributes:
        holders: a `Reservation` that fills it, `Lease`s that read it, and numbers of engines that hold what the last
            owner has granted them.
    """

    number: int
    version: int
    ready: bool = False
    with_key: bool = True
    holders: set[Any] = field(default_factory=set)


@dataclass(eq=False)
class Held:
    """A reservation or a lease of an engine's.

    Attributes:
        stored: transfers that fill its entries were submitted with it.
        old: the last owner has granted it.
    """

    engine: int
    entries: list[Entry]
    reading: bool = False
    stored: bool = False
    old: bool = False


@dataclass(eq=False)
class Request:
    """An open request.

    Attributes:
        keys: its keys, as the owner knows them; None: it does not know the request, since it was opened at another one.
        place: its keys in the order of eviction.
    """

    keys: dict[int, None] | None = None
    place: list[int] = field(default_factory=list)


class Exact(Judge):
    """A pool of so many keys, whose oldest make room.

    Attributes:
        of: entries by key.
        places: the order of eviction, the oldest first: a list of one key, or of the keys of an open request, whose
            last one goes first.
        served: whether there is an owner.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.of: dict[int, Entry] = {}
        self.keyless: set[Entry] = set()
        self.places: list[list[int]] = []
        self.held: dict[Handle, Held] = {}
        self.requests: dict[Handle, Request] = {}
        self.evicted = 0
        self.served = True

    @property
    def uncertain(self) -> bool:
        """Whether engines use what the last owner has granted. The next one holds that for them, and perhaps more: so
        how much room there is this does not know.
        """
        return bool(self.old)

    @property
    def old(self) -> list[Held]:
        return [held for held in self.held.values() if held.old and held.entries]

    # what it is made of -------------------------------------------------------------------------------------------

    def leading(self, numbers: Numbers, own: int | None = None) -> int:
        """How many leading keys are ready, or those that this engine's transfers are filling."""
        for found, number in enumerate(numbers):
            entry = self.of.get(number)
            if not self.served or entry is None or not (entry.ready or self.fills(own, entry)):
                return found
        return len(numbers)

    def fills(self, engine: int | None, entry: Entry) -> bool:
        return any(isinstance(each, Held) and each.stored and each.engine == engine for each in entry.holders)

    def readable(
        self, engine: int, numbers: Sequence[int], *, pending: bool = False
    ) -> dict[tuple[int, ...], list[Entry]]:
        """What a call of the engine's that wants all these keys may read, by versions. None: it is refused."""
        choices: list[list[Entry]] = []
        if self.leading(numbers, engine if pending else None) == len(numbers):
            choices = [[self.of[number] for number in numbers]]
        elif not self.served:
            for held in [self.held[handle] for handle in self.shared if handle[0] == engine]:
                entry_of = {entry.number: entry for entry in held.entries}
                if entry_of.keys() >= set(numbers):
                    choices.append([entry_of[number] for number in numbers])
        return {tuple(entry.version for entry in entries): entries for entries in choices}

    def found(
        self, engine: int, numbers: Sequence[int], versions: Sequence[int] | None, what: str, *, pending: bool = False
    ) -> list[Entry] | None:
        """The entries that a call of the engine's has read, which wants all these keys; None: it was refused."""
        readable = self.readable(engine, numbers, pending=pending)
        if not readable:
            assert versions is None, f"{what} of {list(numbers)} was not refused"
            return None
        read = None if versions is None else tuple(versions)
        assert read in readable, f"{what} of {list(numbers)} has versions {versions}, not {list(readable)}"
        return readable[read]

    def leave_place(self, numbers: Numbers) -> None:
        for place in self.places:
            place[:] = [number for number in place if number not in numbers]
        self.places = [place for place in self.places if place]

    def renew(self, numbers: Numbers, request: Request | None) -> None:
        """These keys are the latest: the first of all, or together with the others of their request."""
        self.leave_place(numbers)
        if request is None:
            self.places += [[number] for number in reversed(numbers)]
        elif numbers:
            self.places = [place for place in self.places if place is not request.place]
            request.place += [number for number in numbers if number not in request.place]
            self.places.append(request.place)

    def lose_key(self, number: int) -> None:
        entry = self.of.pop(number)
        entry.with_key = False
        self.leave_place([number])
        if entry.holders:
            self.keyless.add(entry)

    def let_go(self, holder: object, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.holders.discard(holder)
            if not entry.holders:
                self.keyless.discard(entry)

    def known(self, request: Handle | None) -> Request | None:
        """The request, if the owner knows it."""
        opened = None if request is None else self.requests.get(request)
        return opened if opened is not None and opened.keys is not None and self.served else None

    # calls --------------------------------------------------------------------------------------------------------

    def reserve(
        self,
        handle: Handle,
        numbers: Numbers,
        versions: Numbers,
        accepted: Numbers,
        *,
        sent: int,
        request: Handle | None,
    ) -> None:
        """Missing keys get room, the first first, as far as there is some or others may be evicted."""
        del sent
        at_owner = self.known(request)
        new = [number for number in numbers if number not in self.of] if self.served else []
        stay = {*numbers, *(at_owner.keys or () if at_owner is not None else ())}
        movable = [
            number
            for place in self.places
            for number in reversed(place)
            if number not in stay and not self.of[number].holders
        ]
        free = self.capacity - len(self.of) - len(self.keyless)
        assert free >= 0, "the model holds more than there is room for"
        new = new[: free + len(movable)]
        assert list(accepted) == new, f"{handle} was to get room for {new} of {list(numbers)}, and got {list(accepted)}"
        for number in movable[: max(0, len(new) - free)]:
            self.lose_key(number)
            self.evicted += 1
        version_of = dict(zip(numbers, versions, strict=True))
        entries = [Entry(number, version_of[number]) for number in new]
        held = self.held[handle] = Held(handle[0], entries, stored=handle[1] == "store")
        for entry in held.entries:
            entry.holders.add(held)
            self.of[entry.number] = entry
        if at_owner is not None:
            assert at_owner.keys is not None
            at_owner.keys.update(dict.fromkeys(numbers))
        self.renew(new, at_owner)
        self.counts["stored"] += len(new)

    def commit(self, handle: Handle) -> None:
        held = self.held.pop(handle)
        for entry in held.entries:
            entry.ready = not held.old
        self.end(held)

    def abort(self, handle: Handle) -> None:
        held = self.held.pop(handle)
        for entry in held.entries:
            if self.of.get(entry.number) is entry and not held.old:
                self.lose_key(entry.number)
        self.end(held)

    def end(self, held: Held) -> None:
        self.let_go(held, held.entries)
        if held.old and not any(each.engine == held.engine for each in self.old):
            self.clean(held.engine)

    def clean(self, engine: int) -> None:
        """Nothing of this engine's is in use that the last owner has granted."""
        if self.served:
            self.let_go(engine, [*self.keyless, *self.of.values()])

    def look_up(self, numbers: Numbers, found: int, *, sent: int) -> None:
        del sent
        assert found == self.leading(numbers), f"{found} hits of {list(numbers)}, not {self.leading(numbers)}"

    def load(
        self,
        engine: int,
        numbers: Numbers,
        versions: Versions,
        what: str,
        *,
        sent: int,
        request: Handle | None = None,
        whole: bool = True,
        pending: bool = False,
    ) -> None:
        """These keys were asked for, and their bytes had these versions. `whole`: else the leading hits are enough, and
        there are as many versions. None: refused, since a key is no hit.
        """
        del sent
        if not whole:
            numbers = numbers[: self.leading(numbers)]
        if self.found(engine, numbers, versions, what, pending=pending) is not None:
            self.counts[what] += len(numbers)
            self.use(numbers, request)

    def use(self, numbers: Numbers, request: Handle | None) -> None:
        at_owner = self.known(request)
        if at_owner is not None:
            assert at_owner.keys is not None
            numbers = [number for number in numbers if number not in at_owner.keys]
            at_owner.keys.update(dict.fromkeys(numbers))
        if self.served:
            self.renew([number for number in numbers if number in self.of], at_owner)

    def lease(self, handle: Handle, numbers: Numbers, versions: Versions, *, sent: int, pending: bool = False) -> None:
        """As `load` of all, but they are held until `release`. `pending`: it is a load that goes on until then."""
        del sent
        if pending:
            entries = next(iter(self.readable(handle[0], numbers, pending=True).values()))
        else:
            found = self.found(handle[0], numbers, versions, "a lease")
            if found is None:
                return
            entries = found
        held = self.held[handle] = Held(handle[0], entries, reading=True, old=not self.served)
        if all(entry.ready for entry in entries):  # else it follows a store of its engine's
            self.shared.add(handle)
        for entry in entries:
            entry.holders.add(held)
        if pending:
            self.use(numbers, None)

    def release(self, handle: Handle, versions: Versions) -> None:
        held = self.held.pop(handle)
        self.shared.discard(handle)
        expected = [entry.version for entry in held.entries]
        assert versions is None or versions == expected, f"{handle} read versions {versions}, not {expected}"
        self.counts["leased"] += len(expected)
        self.end(held)

    def open_request(self, handle: Handle) -> None:
        self.requests[handle] = Request(keys={} if self.served else None)

    def end_request(self, handle: Handle) -> None:
        at_owner = self.known(handle)
        if at_owner is not None:
            self.touch(list(at_owner.keys or ()))
        del self.requests[handle]

    def touch(self, numbers: Numbers) -> None:
        if self.served:
            self.renew([number for number in numbers if number in self.of], None)

    def remove(self, engine: int, numbers: Sequence[int], count: int, *, sent: int, heard: bool) -> None:
        """`heard`: an owner has answered."""
        del sent
        self.forget(engine)
        assert heard == self.served
        there = [number for number in numbers if number in self.of] if self.served else []
        assert count == len(there), f"{count} keys of {list(numbers)} were removed, not {len(there)}"
        for number in there:
            self.lose_key(number)

    def look(self, statuses: dict[int, int], statistics: dict[str, int], *, sent: int) -> None:
        """The statuses of all keys, and the counts of the region."""
        del sent
        expected = {number: self.status(number) for number in statuses}
        assert statuses == expected, f"statuses {statuses}, not {expected}"
        counts = self.statistics()
        if self.uncertain:
            counts["pinned"] = max(counts["pinned"], statistics["pinned"])
        if not self.served:
            counts["evicted"] = statistics["evicted"]  # as the last owner told this member: no counter is reduced
        assert statistics == counts, f"{statistics}, not {counts}"

    def status(self, number: int) -> int:
        entry = self.of.get(number)
        return MISS if entry is None or not self.served else HIT if entry.ready else PENDING

    def statistics(self) -> dict[str, int]:
        if not self.served:
            return dict.fromkeys(("resident", "pending", "pinned", "evicted"), 0)
        entries = [*self.of.values(), *self.keyless]
        ready = sum(entry.ready for entry in self.of.values())
        pinned = sum(any(not isinstance(each, Held) or each.reading for each in entry.holders) for entry in entries)
        return {"resident": ready, "pending": len(self.of) - ready, "pinned": pinned, "evicted": self.evicted}

    # what happens to processes ------------------------------------------------------------------------------------

    def leave(self, engine: int) -> None:
        """The engine has ended, and the owner has seen it."""
        self.forget(engine)
        for handle in [handle for handle, held in self.held.items() if held.engine == engine]:
            if self.held[handle].reading:
                self.end(self.held.pop(handle))
            else:
                self.abort(handle)
        self.clean(engine)
        for request in [request for request in self.requests if request[0] == engine]:
            del self.requests[request]  # its keys keep their place

    def lose_owner(self) -> None:
        self.served = False
        for held in self.held.values():
            held.old = True

    def have_owner(self) -> None:
        """Another one has taken over what was ready, and holds what engines may still read or write."""
        self.served, self.evicted, self.keyless = True, 0, set()
        kept = {number: entry for number, entry in self.of.items() if entry.ready}
        for entry in {*self.of.values(), *(entry for held in self.held.values() for entry in held.entries)}:
            entry.holders = {held.engine for held in self.held.values() if entry in held.entries}
            if kept.get(entry.number) is not entry:
                entry.with_key = False
                if entry.holders:
                    self.keyless.add(entry)
        for request in self.requests.values():
            request.keys, request.place = None, []
        self.of, self.places = kept, [[number] for number in kept]


class Ledger(Judge):
    """Which versions of a key a hit may have.

    A version is possible from the moment at which an engine is told to store it, and until it is known to be gone:

    1. The key was removed by a call that began after the store had been accepted. Calls that begin after the removal's
       answer must not find it.
    2. The same for the store of another version, that was accepted: then the key was missing.
    3. Its reservation was aborted, or has not been committed yet.

    An engine whose owner has ended may also find versions that one of its leases holds.

    Args:
        same: versions of a key are the same until it is removed, as a tier keeps the first one: 1. is all there is.
    """

    def __init__(self, capacity: int, *, same: bool) -> None:
        super().__init__()
        self.capacity, self.same = capacity, same
        self.born = set[tuple[int, int]]()
        self.accepted: dict[int, dict[int, int]] = {}  # by key and version: when that was known
        self.gone: dict[tuple[int, int], int] = {}  # when that was known
        self.held: dict[Handle, list[tuple[int, int]]] = {}
        self.loading: dict[Handle, tuple[Sequence[int], int]] = {}
        self.lost = -1  # when the latest owner was
        self.answered = Counter[int]()  # by engine: when it sent the latest question that an owner has answered

    def version(self, number: int) -> int:
        return self.latest[number] if self.same else super().version(number)

    def begun(self, numbers: Numbers, versions: Numbers) -> None:
        self.born.update(zip(numbers, versions, strict=True))

    def check(self, number: int, version: int, what: str, sent: int) -> None:
        assert (number, version) in self.born, f"{what}: key {number} has bytes of version {version}, which was none"
        gone = self.gone.get((number, version))
        assert gone is None or gone > sent, (
            f"{what}: key {number} has bytes of version {version}, which was gone at {gone}, before {sent}"
        )

    def check_all(self, engine: int, numbers: Sequence[int], versions: Sequence[int], what: str, sent: int) -> None:
        """What a call of the engine's has read."""
        found = list(zip(numbers, versions, strict=False))
        if self.answered[engine] <= self.lost and any(
            self.holds(handle, found) for handle in self.shared if handle[0] == engine
        ):
            return
        for number, version in found:
            self.check(number, version, what, sent)

    def holds(self, handle: Handle, found: Sequence[tuple[int, int]]) -> bool:
        """Whether a lease, or a load that goes on, may have all these keys and versions."""
        if handle not in self.loading:
            return set(found) <= set(self.held[handle])
        numbers, sent = self.loading[handle]
        return all(each[0] in numbers and each in self.born and self.gone.get(each, sent + 1) > sent for each in found)

    def lose(self, number: int, before: int) -> None:
        """Versions accepted before this are gone from now on."""
        known = self.accepted.setdefault(number, {})
        for version in [version for version, at in known.items() if at < before]:
            del known[version]
            self.gone.setdefault((number, version), self.now)

    def reserve(
        self,
        handle: Handle,
        numbers: Numbers,
        versions: Numbers,
        accepted: Numbers,
        *,
        sent: int,
        request: Handle | None,
    ) -> None:
        del request
        version_of = dict(zip(numbers, versions, strict=True))
        assert set(accepted) <= set(numbers)
        if accepted:
            self.join(handle[0], sent=sent)
        for number in accepted:
            if not self.same:
                self.lose(number, sent)
            if (number, version_of[number]) not in self.gone:
                self.accepted.setdefault(number, {})[version_of[number]] = self.now
        self.held[handle] = [(number, version_of[number]) for number in accepted]
        self.counts["stored"] += len(accepted)

    def commit(self, handle: Handle) -> None:
        del self.held[handle]

    def abort(self, handle: Handle) -> None:
        del self.held[handle]  # it was never begun, so any hit of it is wrong

    def look_up(self, numbers: Numbers, found: int, *, sent: int) -> None:
        for number in numbers[:found]:
            versions = [version for key, version in self.born if key == number]
            assert any(self.gone.get((number, version), sent + 1) > sent for version in versions), (
                f"key {number} is a hit, and was removed"
            )

    def load(
        self,
        engine: int,
        numbers: Numbers,
        versions: Versions,
        what: str,
        *,
        sent: int,
        request: Handle | None = None,
        whole: bool = True,
        pending: bool = False,
    ) -> None:
        del request, pending
        if versions is not None:
            assert not whole or len(versions) == len(numbers)
            self.check_all(engine, numbers, versions, what, sent)
            self.counts[what] += len(versions)

    def lease(self, handle: Handle, numbers: Numbers, versions: Versions, *, sent: int, pending: bool = False) -> None:
        if pending:
            self.loading[handle] = numbers, sent
        elif versions is not None:
            self.check_all(handle[0], numbers, versions, "lease", sent)
            self.held[handle] = list(zip(numbers, versions, strict=True))
        if pending or versions is not None:
            self.shared.add(handle)

    def release(self, handle: Handle, versions: Sequence[int] | None) -> None:
        self.shared.discard(handle)
        if handle in self.loading:
            numbers, sent = self.loading.pop(handle)
            self.load(0, numbers, versions, "loaded behind", sent=sent)
            return
        expected = [version for _, version in self.held.pop(handle)]
        assert versions is None or versions == expected, f"{handle} read versions {versions}, not {expected}"
        self.counts["leased"] += len(expected)

    def open_request(self, handle: Handle) -> None: ...

    def end_request(self, handle: Handle) -> None: ...

    def touch(self, numbers: Sequence[int]) -> None: ...

    def remove(self, engine: int, numbers: Sequence[int], count: int, *, sent: int, heard: bool) -> None:
        del count
        self.forget(engine)
        if heard:
            self.join(engine, sent=sent)
            for number in numbers:
                self.lose(number, sent)
                self.latest[number] += self.same

    def look(self, statuses: dict[int, int], statistics: dict[str, int], *, sent: int) -> None:
        for number, status in statuses.items():
            self.look_up([number], status == HIT, sent=sent)
        assert statistics["resident"] + statistics["pending"] <= self.capacity, statistics

    def leave(self, engine: int) -> None:
        self.forget(engine)
        self.held = {handle: held for handle, held in self.held.items() if handle[0] != engine}
        self.loading = {handle: load for handle, load in self.loading.items() if handle[0] != engine}

    uncertain = False

    def lose_owner(self) -> None:
        self.lost = self.now

    def join(self, engine: int, *, sent: int) -> None:
        self.answered[engine] = sent
