"""TierManager: one thread that moves keys between the slots of a cache and its tiers.

Down: a key is written to every tier that lacks it once it is worth a write: when it is stored (write="through"), when a
request with it ends ("admitted"), shortly before it is evicted ("back"), or when a hint demotes it. Up: a key comes
into a slot when a promotion, a fetch or a prefetch asks for it and its tier is expected to bring it sooner than the
model computes it; the tier keeps its copy. Dropped: the policy evicts a key from its slot whether it was written or
not, since no eviction waits for a write; only the tier itself, `remove` and `clear` take keys out of a tier.

Callers leave messages for it; it alone calls the promoter and the writer, under its lock. Only it takes the index's
lock under its own, and it calls the cache's hook with neither. Callers and tiers wake it; otherwise it sleeps. It
refers to the cache weakly, and ends with it, but not before every tier's call that may touch a slot has returned.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import compress, groupby
from typing import Any, Literal, TypeAlias, TypeVar

from kvoffload.cache.entries import Status
from kvoffload.cache.pools import RequestRecord
from kvoffload.cache.record_calls import RecordCalls, leading
from kvoffload.cache.statistics import CacheEvent
from kvoffload.cache.tiering.below import BreakerState, CacheTierStatistics, ComputeTime, TierBelow, fits
from kvoffload.cache.tiering.promoter import Promoter
from kvoffload.cache.tiering.promotion import PromotedLoad, PromotionRecord
from kvoffload.cache.tiering.tier import Outcome, Tier, TierJob
from kvoffload.cache.tiering.writer import WriteChoice, Writer
from kvoffload.device.ownership import FORKS
from kvoffload.engine.callbacks import Callbacks, WhenDone
from kvoffload.errors import ClosedError, TierError
from kvoffload.internal.checks import shown, to_wait
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import in_any_call, new_lock, new_thread, raise_nested, refuse_waiting, run_outside
from kvoffload.internal.waiting import wait_until

_POLL = 5e-3  # seconds between looks at stores that are in flight
_AFTER_ERROR = 0.1  # seconds
_LONGEST_SLEEP = 60.0
_SLEEP_OF_GARBAGE = 0.2  # between looks whether calls have returned, when there is no cache any more
MOST_MESSAGES = 1 << 16  # what is left for the thread beyond may be lost
_PROMOTING, _WRITING = 0.5, 0.25  # shares of the entries
_REMOVAL = 60.0  # seconds that `remove` and `clear` wait for tiers
_MOST_AHEAD = 256  # keys that are looked at before they are evicted
_MOST_ENDED = 256  # requests that wait for their stores

_R = TypeVar("_R")

Message: TypeAlias = "PromotionRecord | PromotedLoad[Any] | CacheEvent | Demotion | tuple[bytes, ...]"
"""A promotion to begin, a load to chain, what happened, keys to demote, or those of a request that has ended."""


class Removal:
    """Keys (None: all) that are being removed from tiers, during `TierManager.remove`, or until it is garbage."""

    __slots__ = ("__weakref__", "keys")

    def __init__(self, keys: Collection[bytes] | None) -> None:
        self.keys = None if keys is None else frozenset(keys)


class Demotion:
    """Keys of a tenant that are to be written, and then to leave their slots. `request` lives as long as it does."""

    __slots__ = ("keys", "request", "tenant")

    def __init__(self, keys: tuple[bytes, ...], tenant: str, request: RequestRecord) -> None:
        self.keys = keys
        self.request = request
        self.tenant = tenant


class TierManager:
    """The tiers of a cache, attached to its slots.

    Args:
        settle: brings the cache up to date; returns whether stores are in flight.
        submit: submits a chained load.

    Attributes:
        compute: how long the host takes to compute a key.
        when_done: calls a function once a promotion, or a load behind it, has ended, from a thread of its own.
    """

    def __init__(
        self,
        records: RecordCalls,
        tiers: Sequence[Tier],
        choice: WriteChoice,
        *,
        seconds_per_key: float | None,
        hung: float,
        settle: Callable[[], bool],
        submit: Callable[[PromotedLoad[Any]], None],
    ) -> None:
        self.tiers = [TierBelow(tier, hung) for tier in tiers]
        self.closed = False
        self._closer = 0  # the thread that closes
        self._forks = len(FORKS)
        self._lock = new_lock(of_manager=True)
        self._calling: set[int] = set()  # threads of callers that are in a call of a tier
        self._recorder = records.recorder
        self._choice = choice
        self._settle, self._submit = settle, submit
        self._waker = waker = Waker()
        self.wake = notify = waker.now
        self.when_done: WhenDone = Callbacks().add
        self._records = records
        self._filled = False  # since the latest look at what is evicted next
        self._ended = deque[tuple[bytes, ...]]()  # requests of which stores may be in flight
        self._tenants: dict[bytes, str] = {}  # of keys in slots, where it is not ""
        self.compute = ComputeTime(seconds_per_key)
        self._promoter = Promoter(records, self.tiers, self.compute, _PROMOTING, notify)
        self._writer = Writer(records, self.tiers, _WRITING, notify, choice)
        self._messages = deque[Message]()
        self._weights = self._told = frozenset[str]()  # names of those in use, and as the tiers have heard
        self._lost_events = False
        self._demoted: list[Demotion] = []
        self._chained: list[PromotedLoad[Any]] = []
        self._removals = removals = list[weakref.ref[Removal]]()
        self._promoter.refused = lambda keys: _removed(removals, keys) if removals else ()
        reference = weakref.ref(self, lambda _: notify())
        self._thread = new_thread("kvoffload-tiers", _run, reference, waker, list(tiers))
        self._thread.start()

    def promote(self, record: PromotionRecord) -> None:
        """Begin a promotion. If no tier can lengthen it, it ends in this call: its keys are in slots, or no tier is to
        be asked for the first missing one.
        """
        keys, table = record.keys, self._records._state.table
        pending = table.pending  # without the index's lock, as all of this: the record looks again under it
        if not keys or (pending and not pending.keys().isdisjoint(keys)):
            self.post(record)
            return
        found = leading(table, keys)
        may_come = found < len(keys) and self.calling_tiers(
            lambda: any(below.may_be_asked(keys[found]) for below in self.tiers)
        )
        if may_come or not record.end_with_what_is_here(self._records, found):
            self.post(record)

    def keep_weights(self, names: frozenset[str]) -> None:
        """Have the thread tell the tiers which weights are in use. No message: there may be any number of changes."""
        self._weights = names
        self.wake()

    def demote(self, keys: tuple[bytes, ...], tenant: str, request: RequestRecord) -> None:
        self.post(Demotion(keys, tenant, request))

    def locate(self, keys: list[bytes], places: list[str]) -> list[str]:
        """Put the names of tiers in the places of missing keys: see `BlockCache.locate`."""
        nowhere = "missing" if all(below.local_index for below in self.tiers) else "unknown"
        for below in self.tiers:
            missing = [position for position, place in enumerate(places) if place == "missing"]
            wanted = [keys[position] for position in missing]
            found = self.calling_tiers(partial(below.has, wanted)) if wanted else []
            for position, has in zip(missing, found, strict=True):
                if has:
                    places[position] = below.tier.name
        return [nowhere if place == "missing" else place for place in places]

    def statistics(self) -> list[CacheTierStatistics]:
        return self.calling_tiers(lambda: [below.statistics() for below in self.tiers])

    def post(self, message: Message) -> None:
        concerns_writes = isinstance(message, CacheEvent | tuple)
        if concerns_writes and (self.closed or len(self._messages) >= MOST_MESSAGES or self._rests()):
            if isinstance(message, CacheEvent):
                self._lost_events = True
            return  # these may be lost
        self._messages.append(message)
        if concerns_writes:
            self._waker.soon()
        else:
            self.wake()
        if self.closed:
            refuse_waiting("promote")  # for the lock
            self._end_messages()

    def stored(self) -> None:
        """Have the thread look, within 5 ms, when a store that was submitted ends."""
        if not self._rests():
            self._waker.soon()

    def _rests(self) -> bool:
        """Whether no tier is written now. Then requests should not pay for it, and the thread reads the index later."""
        now = time.monotonic()
        for below in self.tiers:  # a generator takes as long as all the rest, once for each event
            no_puts = below.puts.state is BreakerState.OPEN and below.puts.pauses(now)
            if not (no_puts or below.breaker.pauses(now)):
                return False
        return True

    # removing -----------------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[bytes] | None, here: Callable[[], int]) -> int:
        """Remove these keys (None: all) from the index by `here`, and from the tiers; returns the result of `here`.

        Meanwhile they are neither written nor promoted. The tiers are asked after `here`: writes of keys that the index
        has just lost are then among the records that they remove.

        Raises:
            TierError: a tier may still have them.
        """
        self.refuse_nested("remove")
        removal = Removal(keys)
        try:
            with self._lock:
                self._removals.append(weakref.ref(removal))
                self._writer.forget(lambda keys: _removed(self._removals, keys))
            count = here()
            wrong = self.calling_tiers(lambda: self._remove_from_tiers(keys))
        finally:
            with self._lock:
                self._removals[:] = filter(lambda each: each() not in (None, removal), self._removals)
        if wrong:
            raise TierError(
                f"tier {', '.join(wrong)} failed to remove the keys, or did not answer within {_REMOVAL:g} seconds: it "
                "may still have them; remove them again once it works"
            )
        return count

    def _remove_from_tiers(self, keys: Sequence[bytes] | None) -> list[str]:
        """Remove keys from all tiers, and wait; returns the names of tiers that may still have them."""
        fitting = [key for key in keys or () if fits(key)]
        jobs, failed = list[tuple[Tier, TierJob]](), list[str]()
        for tier in [below.tier for below in self.tiers]:
            try:
                if keys is None or fitting:
                    jobs.append((tier, tier.clear() if keys is None else tier.remove(fitting)))
            except Exception:  # noqa: BLE001  # a tier of the user's, or one that is closed
                failed.append(tier.name)
        end = time.monotonic() + _REMOVAL
        for tier, job in jobs:
            try:
                outcomes = job.wait(max(0.0, end - time.monotonic()))
            except Exception:  # noqa: BLE001  # a tier of the user's
                outcomes = [Outcome.FAILED]
            if not all(outcome in (Outcome.DONE, Outcome.MISSING) for outcome in outcomes):
                failed.append(tier.name)
        return failed

    # the thread ---------------------------------------------------------------------------------------------------

    def step(self) -> float | None:
        """Do all work that is due. Returns the seconds after which to look again, None: when woken."""
        in_flight = self._settle()
        self._recorder.deferred_by = threading.get_ident()  # the hook is called without the lock
        try:
            with self._lock:
                self._step()
                next_look = self._promoter.next_look()
        finally:  # what a policy or the hook raises keeps no load from being submitted, or from being known
            for chained in self._chained:
                self._submit(chained)
            self._chained = [each for each in self._chained if not each.submitted]
            self._recorder.deferred_by = 0
        self._recorder.notify()
        waits = [_POLL] if in_flight or self._ended else []
        if next_look is not None:
            waits.append(max(0.0, next_look - time.monotonic()))
        return min(waits, default=None)

    def _step(self) -> None:
        """Do the part of `step` that needs the lock."""
        if self.closed:
            self._end_messages()
            for record in self._promoter.abandon():
                record.end()
            self._writer.forget(set)
        if self._told is not self._weights:
            self._told = self._weights
            for below in self.tiers:
                below.keep_weights(self._told)
        while self._messages:
            message = self._messages.popleft()
            if isinstance(message, CacheEvent):
                self._heard(message)
            elif isinstance(message, PromotionRecord):
                self._promoter.begin(message)
            elif isinstance(message, PromotedLoad):
                self._chained.append(message)
            elif isinstance(message, Demotion):
                self._write([key for key, has in zip(message.keys, self._has(message.keys), strict=True) if not has])
                self._demoted.append(message)
            else:
                self._ended.append(message)
        closed = BreakerState.CLOSED
        if self._lost_events and any(below.breaker.state is below.puts.state is closed for below in self.tiers):
            self._resynchronise()
        self._choose()
        for record in self._promoter.advance():
            record.end()
        self._writer.advance()
        if self._demoted:
            self._set_free_what_is_written()
        self._writer.taken.clear()

    def _set_free_what_is_written(self) -> None:
        """Free the slots of keys to demote that a tier has by now; what no tier took stays as it is. A store without a
        local index cannot say what it has: there, the keys that it has just taken count.
        """
        # Forgotten if a policy raises: it might do so every time.
        demoted, self._demoted, taken = self._demoted, [], self._writer.taken
        for message in demoted:
            has = [has or key in taken for key, has in zip(message.keys, self._has(message.keys), strict=True)]
            self._records.set_free((tuple(compress(message.keys, has)), message.tenant))
            message.keys = tuple(key for key, there in zip(message.keys, has, strict=True) if not there)
        if not self._writer.idle:
            self._demoted = [message for message in demoted if message.keys][-_MOST_ENDED:]

    def _choose(self) -> None:
        """Choose writes among the keys of ended requests, once their stores have ended, and were heard of; and among
        keys about to be evicted.
        """
        while self._ended:
            statuses = self._records.status(list(self._ended[0]))
            unheard = Status.PENDING in statuses or self._messages or self._recorder.reporting(self._closer)
            if unheard and len(self._ended) < _MOST_ENDED:
                break
            keys = self._ended.popleft()
            if self._choice.learns:
                self._choice.left_disk([key for key, has in zip(keys, self._has(keys), strict=True) if not has])
            chosen = self._choice.ended(keys)
            hinted = self._records.hinted(keys) if self._choice.learns else {}
            # A session that has promised to come back is worth a write, and one that has ended is not.
            worth = set(chosen) if hinted else ()
            self._write([key for key in keys if hinted.get(key, key in worth)] if hinted else chosen)
        if self._filled and self._choice.looks_ahead:
            self._filled = False
            ahead = min(self._records.share(_WRITING), _MOST_AHEAD)
            keys = tuple(self._records.next_to_go(ahead))
            hinted = self._records.hinted(keys)
            self._write(self._choice.about_to_go([key for key in keys if hinted.get(key, True)]))

    def _heard(self, event: CacheEvent) -> None:
        self._filled |= event.kind in ("stored", "promoted")
        if event.kind == "stored":
            self.compute.stored(event.keys)
            if event.tenant:
                self._tenants.update(dict.fromkeys(event.keys, event.tenant))
            self._write(self._choice.stored(event.keys))
            if self._choice.learns:
                self._choice.written([key for key, has in zip(event.keys, self._has(event.keys), strict=True) if has])
        elif event.kind == "promoted":
            self._choice.promoted(event.keys)
        elif event.kind in ("evicted", "removed"):
            self._choice.left_host(event.keys)
            for key in event.keys if self._tenants else ():
                self._tenants.pop(key, None)

    def _resynchronise(self) -> None:
        """Events were lost: read from the index which keys are in slots. Events still to come agree with that."""
        self._lost_events = False  # before the index is read
        keys = self._records.keys
        there = [key for key, status in zip(keys, self._records.status(keys), strict=True) if status is Status.HIT]
        known = set(there)
        self._tenants = {key: tenant for key, tenant in self._tenants.items() if key in known}
        self._filled = True
        self._write(self._choice.resynchronise(there))
        if self._choice.learns:
            self._choice.written([key for key, has in zip(there, self._has(there), strict=True) if has])

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        return list(map(any, zip(*(below.has(keys) for below in self.tiers), strict=True)))

    def _write(self, keys: Sequence[bytes]) -> None:
        if self._removals:
            removed = _removed(self._removals, keys)
            self._choice.dropped([*removed])
            keys = [key for key in keys if key not in removed]
        for tenant, mine in groupby(keys, lambda key: self._tenants.get(key, "")):
            self._writer.add(list(mine), tenant)

    @property
    def busy(self) -> bool:
        """Whether tiers may still touch slots, or callers wait for work of the thread."""
        return bool(self._promoter.busy or self._writer.going_on or self._chained or self._messages)

    # the end ------------------------------------------------------------------------------------------------------

    def loads(self) -> list[PromotedLoad[Any]]:
        """Return the loads that still wait for their promotion."""
        with self._lock:
            return [*self._chained, *(each for each in list(self._messages) if isinstance(each, PromotedLoad))]

    def drain(self, timeout: float | None) -> bool:
        """Wait until all keys chosen so far are written, and durable; False after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if end is None else max(0.0, end - time.monotonic())

        def written() -> bool:
            if self._settle() or self._recorder.reporting():
                return False
            with self._lock:
                only_promotions = all(isinstance(each, PromotionRecord | PromotedLoad) for each in list(self._messages))
                return self._writer.idle and only_promotions and not self._ended

        self.wake()
        try:
            wait_until(written, left(), "writing to tiers")
        except TimeoutError:
            return False
        tiers = [below.tier for below in self.tiers]
        return all(self.calling_tiers(lambda: [_ended(tier, "drain", left()) for tier in tiers]))

    def close(self, timeout: float) -> bool:
        """Drain, end the thread and close the tiers; returns whether no call of a tier goes on."""
        self.refuse_nested("close")
        end = time.monotonic() + to_wait("timeout", timeout)
        self._closer = threading.get_ident()
        if not self.closed and self._thread is not threading.current_thread():
            self.drain(timeout)
        self.closed = True
        self.wake()
        tiers = [below.tier for below in self.tiers]
        ended = self.calling_tiers(lambda: [_ended(tier, "close", max(0.0, end - time.monotonic())) for tier in tiers])
        self.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(max(_AFTER_ERROR, end - time.monotonic()))
        self._end_messages()
        return all(ended) and not self.busy

    def refuse_nested(self, call: str) -> None:
        """Raise RuntimeError inside another call, or in a thread of the library: it may wait for that thread, or for a
        thread that wants one of its locks. In the hook in the manager's thread, for calls that wait for that thread.
        Raise ClosedError in a forked child, which does not have that thread.
        """
        if call != "close" and not self.closed and len(FORKS) != self._forks:
            raise ClosedError(f"{call} would wait in a forked process for the parent's tiers: make a cache here")
        waits_for_itself = self._thread is threading.current_thread() and call not in ("remove", "close")
        if in_any_call() or waits_for_itself or threading.get_ident() in self._calling:
            raise_nested(call)

    def calling_tiers(self, call: Callable[[], _R]) -> _R:
        """Make a call that enters tiers; these may hold locks of their own meanwhile."""
        thread = threading.get_ident()
        inside = thread in self._calling
        try:
            self._calling.add(thread)
            return call()
        finally:
            if not inside:
                self._calling.discard(thread)

    def _end_messages(self) -> None:
        """End promotions that have not begun, and loads that wait for them. For any thread, when closed."""
        with self._lock:
            while True:
                if not self._messages:
                    break
                message = self._messages[0]
                if isinstance(message, PromotionRecord):
                    message.end()
                elif isinstance(message, PromotedLoad):
                    message._submit(None)
                self._messages.popleft()


def _removed(removals: Sequence[weakref.ref[Removal]], keys: Sequence[bytes]) -> set[bytes]:
    going_on = [removal for each in removals if (removal := each()) is not None]
    return {key for key in keys for removal in going_on if (removal.keys is None or key in removal.keys)}


def _ended(tier: Tier, call: Literal["drain", "close"], timeout: float | None) -> bool:
    """Call `tier.drain` or `tier.close`; returns whether all has ended in time."""
    try:
        return bool(getattr(tier, call)(timeout))
    except Exception as error:  # noqa: BLE001  # a tier of the user's
        LOGGER.warning("tier %s: %s: %s", tier.name, call, shown(error))
        return False


def _run(reference: weakref.ref[TierManager], waker: Waker, tiers: list[Tier]) -> None:
    """Run the thread, and close the tiers when the manager has become garbage."""
    while (manager := reference()) is not None:
        waker.begin()
        try:
            wait = manager.step()
        except BaseException:  # noqa: BLE001  # nothing ends the thread: the tiers would be dead without a word
            LOGGER.exception("the thread of a cache's tiers: an error; it goes on")
            wait = _AFTER_ERROR
        if manager.closed and not manager.busy:
            return
        keeps = manager if manager.busy else None  # its slots must not be given to another cache
        del manager
        longest = _LONGEST_SLEEP if keeps is None else _SLEEP_OF_GARBAGE
        waker.wait(longest if wait is None else min(wait, longest))
        del keeps
    for tier in tiers:
        run_outside(_ended, tier, "close", _LONGEST_SLEEP)


SOON = 5e-3  # seconds


class Waker:
    """Wakes the thread: `now` at once; `soon` within 5 ms, so that the thread looks once at all the calls of a request,
    and not while each of these runs. Both are for any thread, finalizers included.
    """

    def __init__(self) -> None:
        self._woken = queue.SimpleQueue[bool]()  # an Event may not be set by a finalizer
        self._lingers = False  # written by the thread alone: it is about to look

    def now(self) -> None:
        if self._woken.qsize() < 2:  # of two at least one is urgent
            self._woken.put(True)

    def soon(self) -> None:
        if not self._lingers and self._woken.empty():
            self._woken.put(False)

    # of the thread ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget what has woken the thread, before it looks at anything: later events wake it again."""
        self._lingers = False
        while not self._woken.empty():
            self._woken.get()

    def wait(self, seconds: float) -> None:
        """Sleep until it is time to look, at most so long."""
        end = time.monotonic() + seconds
        try:
            urgent = self._woken.get(timeout=seconds)
            self._lingers = True
            end = min(end, time.monotonic() + SOON)
            while not urgent:
                urgent = self._woken.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            pass
