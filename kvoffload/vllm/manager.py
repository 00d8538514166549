"""KVOffloadManager: the scheduler's side of the offloading, a CacheIndex with one entry for each chunk.

vLLM's scheduler calls it from one thread. A key stands for one chunk of one group. Its entry is the number of its slot,
the same in every worker. A store:

    prepare_store ──> pending ──complete_store──> hit          a reservation of the index, open in between
                         └──one worker failed, reset──> missing

A load holds a lease from `prepare_load` to `complete_load`. After a reset the workers may still touch the slots of
transfers under way; these are free only at `on_reset_flushed`.

After a reset vLLM 0.33 offers all chunks of running requests again. In groups with a sliding window, other requests may
own some of these blocks by now. So such chunks are not stored for requests from before a reset.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload.cache.entries import LeaseRecord, ReservationRecord, Status
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import DEFAULT_POLICY, PolicyName
from kvoffload.cache.statistics import CacheEvent
from kvoffload.internal.nesting import new_lock
from kvoffload.vllm.hints import give, hints_of, session_of
from kvoffload.vllm.metrics import Reporter
from kvoffload.vllm.pooled import PooledLookups
from kvoffload.vllm.promotions import Promotions

_MISS, _HIT, _PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING
_IS_MISS, _IS_HIT, _ = Status  # looking them up in the class takes as long as the rest of `lookup`


@dataclass(slots=True, eq=False)
class _Filling:
    """A reservation whose chunks are being stored.

    Attributes:
        left: keys whose store is not complete yet.
        well: no worker has reported a failure.
    """

    record: ReservationRecord
    left: int
    well: bool = True


class KVOffloadManager(OffloadingManager):
    """Knows which chunks are offloaded, and in which slot. See vLLM's `OffloadingManager` for the calls.

    With `promotions`, keys without a slot are promoted from tiers, or the keys are those of a shared pool. Statistics
    then count each key once for a request, when its answer is final: HIT or MISS.

    Args:
        num_chunks: slots of each worker; 0: store nothing.
        windowed_groups: vLLM's numbers of the groups whose blocks are freed while a request runs.
        info: labels for vLLM's metric of the configuration.
        promotions: the tiers below the slots, or the shared pool that has the slots; None: neither.
    """

    def __init__(
        self,
        num_chunks: int,
        *,
        policy: PolicyName = DEFAULT_POLICY,
        enable_events: bool = False,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        windowed_groups: Collection[int] = (),
        info: dict[str, Any] | None = None,
        promotions: Promotions | PooledLookups | None = None,
    ) -> None:
        self._promotions = promotions
        self._events = EventLog() if enable_events else None
        self._num_chunks, self._policy_name = num_chunks, policy
        self._info = info or {}
        self._windowed = frozenset(windowed_groups)
        self._resets = 0
        self._offers = Offers(store_threshold, max_tracker_size)
        self._reporter = Reporter(counts_skipped=store_threshold >= 2)
        self._status_of: Callable[[bytes], Status] = lambda key: self.index.status_of(key)  # until there is an index
        self._begun: list[ReservationRecord] = []  # whose keys are not in `_filling` yet
        self._filling: dict[bytes, _Filling] = {}
        self._reading: dict[tuple[str, frozenset[bytes]], list[LeaseRecord]] = {}
        self._before_reset: list[Callable[[], None]] = []  # ends what was under way at a reset
        self.named: dict[str, object] = {}  # the session of the request that comes next, by the request's name

    @cached_property
    def index(self) -> CacheIndex:
        """The index of the keys. Opened at its first use, with tiers if there are any: that use raises their errors."""
        on_event = None if self._events is None else self._events.note
        if self._promotions is not None:
            return self._promotions.open(on_event)
        index = CacheIndex(self._num_chunks, policy=self._policy_name, on_event=on_event)
        self._status_of = index.status_of
        return index

    # loading ------------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        state_of(self.index, req_context, self._resets, self.named.pop(req_context.req_id, None))
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return HIT if the key can be loaded, HIT_PENDING if it is being stored or promoted, RETRY if a tier may have
        it, else MISS.
        """
        if self._promotions is not None:
            return self._promotions.lookup(self.index, key, req_context)
        status = self._status_of(key)
        return _HIT if status is _IS_HIT else _MISS if status is _IS_MISS else _PENDING

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST if self._promotions is None else self._promotions.source_of(key, req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._promotions is not None:
            self._promotions.advance()

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Return the slots of keys that `lookup` found, and hold them until `complete_load` of the same keys.

        Raises MissingKeyError if a key has no slot; then nothing is held.
        """
        index, wanted = self.index, list(keys)
        state = state_of(index, req_context, self._resets)
        used = wanted if len(wanted) < 2 else in_order(wanted, req_context)
        first = req_context.get_offload_key_position(used[0]) if used else None
        known = len(state.record.keys)
        leases = self._reading.setdefault(which := (req_context.req_id, frozenset(wanted)), [])
        try:
            lease = index.records.hold((wanted, leases, None if first is None else state.record, used))
        finally:
            if not leases:  # a key is missing
                del self._reading[which]
        if first is not None and len(state.record.keys) > known:
            state.keep_order(req_context, used, first)
        if self._promotions is not None:
            self._promotions.release(req_context)
        return CPULoadStoreSpec(lease.indices)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        which = (req_context.req_id, frozenset(keys))
        leases = self._reading[which]
        self.index.records.release(leases[-1])
        leases.pop()
        if not leases:
            del self._reading[which]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note that the request uses these keys. Keys that it stored, loaded or touched before count only once.

        If vLLM has not said where they end, they count as all keys of an ended request.
        """
        index, wanted = self.index, list(keys)
        used = wanted if len(wanted) < 2 else in_order(wanted, req_context)
        first = req_context.get_offload_key_position(used[0]) if used else None
        if first is None:
            index.touch(wanted)
            return
        state = state_of(index, req_context, self._resets)
        known = len(state.record.keys)
        index.records.use((used, state.record))
        if len(state.record.keys) > known:
            state.keep_order(req_context, used, first)

    def on_request_finished(self, req_context: ReqContext) -> None:
        if self._promotions is not None:
            self._promotions.release(req_context)
        state = req_context.get_state(RequestState)
        if state is not None and state.owner is self.index:
            state.request.end()  # its keys were used once, the first ones last
            give(self.index, state.hints, "release", "demote")  # earlier, the request would take its keys back

    # storing ------------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve slots for the keys that are missing and worth storing, evicting others.

        If there are too few slots, the request's first keys get them. Returns None if no key got one, but transfers
        hold slots that will be free later, or one that is under way stores a key that a shared pool has lost with its
        owner: then vLLM offers the keys again at its next step. (It would not say which store of such a key has ended.)
        """
        index, offered = self.index, list(dict.fromkeys(keys))
        state = state_of(index, req_context, self._resets)
        if self._windowed and state.resets < self._resets:
            offered = [key for key in offered if get_offload_group_idx(key) not in self._windowed]
        wanted = offered if len(offered) < 2 else in_order(offered, req_context)
        if self._offers.threshold > 1:  # leave out missing keys that have not been offered often enough
            self._offers.note(wanted)
            statuses = zip(wanted, self.index.status(wanted), strict=True)
            missing = [key for key, status in statuses if status is Status.MISS]
            left_out = set(missing).difference(self._offers.passing(missing))
            wanted = [key for key in wanted if key not in left_out]
        first = req_context.get_offload_key_position(wanted[0]) if wanted else None
        known = len(state.record.keys)
        for begun in self._begun:  # of calls that an interrupt has ended
            index.records.abandon(begun)
            self._filling = {key: filling for key, filling in self._filling.items() if filling.record is not begun}
        self._begun.clear()
        record = index.records.reserve((wanted, self._begun, None if first is None else state.record))
        if first is not None and len(state.record.keys) > known:
            state.keep_order(req_context, wanted, first)
        if asked := len(record.keys) + len(record.declined):
            self._reporter.sizes.append(asked)
        twice = not self._filling.keys().isdisjoint(record.keys)  # a pool's next owner does not know what is stored now
        if twice or not record.keys:
            (index.records.abort if twice else index.records.commit)(record)
            self._begun.clear()
            if twice or (record.short and (self._filling or self._reading or self._before_reset)):
                return None
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        filling = _Filling(record, len(record.keys))
        for key in record.keys:
            self._filling[key] = filling
        self._begun.clear()
        stored, slots = record.keys, record.indices
        if wanted is not offered:  # vLLM expects the order in which it has offered the keys, group after group
            slot_of = dict(zip(record.keys, record.indices, strict=True))
            stored = [key for key in offered if key in slot_of]
            slots = [slot_of[key] for key in stored]
        return PrepareStoreOutput(list(stored), CPULoadStoreSpec(slots), list(record.evicted))

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Note that every worker has ended the store of these keys. The keys of one `prepare_store` become hits
        together, when the last of them is complete, or missing if one failed.
        """
        filling_of = self._filling
        for key in keys:
            filling = filling_of.get(key)
            if filling is None:  # it was present, or stored by another request
                continue
            if not success:
                filling.well = False
            if filling.left > 1:
                filling.left -= 1
            elif filling.well:
                self.index.records.commit(filling.record)
            else:
                self.index.records.abort(filling.record)
            del filling_of[key]

    def note_failed(self, slots: Collection[int]) -> None:
        """Note that a worker failed to store into these slots or to load from them. Called before `complete_store`.

        Keys that are being stored there will be missing. Keys that were being loaded are missing from now on, so that
        the request, which vLLM computes again, does not fail in the same way for ever.
        """
        failed = set(slots)
        for filling in set(self._filling.values()):
            if not failed.isdisjoint(filling.record.indices):
                filling.well = False
        for leases in self._reading.values():
            for lease in leases:
                wrong = [key for key, slot in zip(lease.keys, lease.indices, strict=True) if slot in failed]
                if wrong:  # in a shared pool its owner is asked
                    self.index.remove(wrong, below=False)  # the tiers' records are not at fault

    # the rest -----------------------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Make all keys missing, in tiers, too; in a shared pool for this engine alone, see `PooledLookups.clear`.
        Slots of transfers under way are free at `on_reset_flushed`.

        If a tier cannot remove its records, that is logged, and the tiers are closed for good.
        """
        self._resets += 1
        if self._promotions is None:
            self.index.clear()
        else:
            self._promotions.clear(self.index)
        if self._events is not None:  # vLLM reports a reset by an event of its own, which comes before those kept here
            self._events.take()
        self._before_reset += [
            partial(self.index.records.release, lease) for leases in self._reading.values() for lease in leases
        ]
        self._before_reset += [
            partial(self.index.records.abandon, filling.record) for filling in set(self._filling.values())
        ]
        self._reading.clear()
        self._filling.clear()

    def on_reset_flushed(self) -> None:
        for end in self._before_reset:
            end()
        self._before_reset.clear()

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in () if self._events is None else self._events.take():
            if event.metadata_only:  # a second attempt may have the keys by now
                statuses = self.index.status(event.keys)
                event.keys = [key for key, status in zip(event.keys, statuses, strict=True) if status is Status.MISS]
            if event.keys:
                yield event

    def get_stats(self) -> Any:
        now = self.index.statistics() if self._promotions is None else self._promotions.statistics(self.index)
        stats = self._reporter.report(now, self._offers.take_skipped())
        if self._promotions is not None:
            self._reporter.report_tiers(stats, self._promotions.tier_statistics())
        return stats

    def shutdown(self) -> None:
        """Close the tiers, and wait at most 10 seconds for their writes; leave the pool. Else it does nothing."""
        if self._promotions is not None:
            self._promotions.close()

    def config_info(self) -> list[dict[str, Any]]:
        return [self._info]


# events ---------------------------------------------------------------------------------------------------------------


class EventLog:
    """Keeps events until vLLM asks for them. `note` is the hook of a CacheIndex."""

    def __init__(self) -> None:
        self._events: list[OffloadingEvent] = []
        self._lock = new_lock()  # with tiers, events come from a thread of theirs, too

    def note(self, event: CacheEvent) -> None:
        there, failed = event.kind in ("stored", "promoted"), event.kind == "failed"
        if there or failed or event.kind in ("evicted", "removed"):
            keys = [OffloadKey(key) for key in event.keys]
            # A failed store was never announced as stored: its event is for vLLM's own tracker alone.
            noted = OffloadingEvent(keys, Medium.CPU, removed=not there, metadata_only=failed)
            with self._lock:
                self._events.append(noted)

    def take(self) -> Iterable[OffloadingEvent]:
        with self._lock:
            events, self._events = self._events, []
        return events


# the state of requests ------------------------------------------------------------------------------------------------


class RequestState:
    """Kept in vLLM's `ReqContext`, by its type.

    Attributes:
        owner: the index of `request`; several managers may see one context.
        request: the request of the index. Its later keys do not evict its earlier ones.
        record: the index's record for `request`.
        resets: how often the manager had been reset when the request came.
        end: where its last key so far ends, in tokens.
        session: it belongs to; None: to none.
        hints: came with it.
    """

    __slots__ = ("end", "hints", "owner", "record", "request", "resets", "session")

    def __init__(self, owner: CacheIndex, resets: int, context: ReqContext, named: object) -> None:
        self.owner = owner
        self.resets = resets
        self.session = session_of(context, named)
        self.hints = hints_of(context, self.session)
        self.open()
        give(owner, self.hints, "retain", "prefetch")

    def open(self) -> None:
        self.request = self.owner.open_request(session=self.session)
        self.record = self.request._record
        self.end = 0

    def keep_order(self, context: ReqContext, added: Sequence[OffloadKey], first: int) -> None:
        """Keep the request's keys in the order of their tokens, even if keys were added before its last one.

        That happens when a partial tail was stored first. Then another request of the index takes over all keys.

        Args:
            first: where the first of `added` ends, in tokens.
        """
        follows = first >= self.end
        last = first if len(added) == 1 else context.get_offload_key_position(added[-1]) or 0
        self.end = end = max(last, self.end)
        if follows:
            return
        keys, before = list(self.record.keys), self.record.of_session
        ordered = sorted(keys, key=lambda key: context.get_offload_key_position(OffloadKey(key)) or 0)
        if ordered != keys:
            self.open()
            if before is not None and self.record.of_session is not None:
                self.record.of_session.stored = before.stored
            give(self.owner, self.hints, "retain")
            self.end = end
            self.owner.records.use((ordered, self.record))


def state_of(index: CacheIndex, context: ReqContext, resets: int, named: object = None) -> RequestState:
    """Return a context's state, with an open request of the index; made if there is none, for the session `named`."""
    state: RequestState | None = context.get_state(RequestState)
    if state is None or state.owner is not index:
        state = RequestState(index, resets, context, named)
        context.set_state(state)
    elif state.record.ended:
        state.open()
    return state


def in_order(keys: list[OffloadKey], context: ReqContext) -> list[OffloadKey]:
    """Sort keys, which come group after group, by the tokens that they stand for.

    If vLLM has not said where a key ends, they stay as they are.
    """
    if len(keys) < 2 or get_offload_group_idx(keys[0]) == get_offload_group_idx(keys[-1]):
        return keys
    ends = list(map(context.get_offload_key_position, keys))
    if None in ends:
        return keys
    return [key for _, key in sorted(zip(ends, keys, strict=True), key=lambda pair: pair[0])]


class Offers:
    """Counts how often keys were offered for storing, so that keys that come only once are not stored.

    Args:
        threshold: a key passes when it has been offered so many times; below 2 nobody need ask.
        most: keys that are counted. Beyond that it forgets keys whose last offer is longest ago, but none of the
            current offer.

    Attributes:
        skipped: keys that did not pass, since the last `take_skipped`.
    """

    def __init__(self, threshold: int, most: int) -> None:
        self.threshold = threshold
        self.skipped = 0
        self._most = most
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def note(self, keys: Sequence[bytes]) -> None:
        counts = self._counts
        for key in keys:
            if key in counts:
                counts[key] += 1
                counts.move_to_end(key)
        known = sum(key in counts for key in keys)
        for key in keys:
            if key in counts:
                continue
            if len(counts) >= self._most:
                if known == len(counts):
                    continue
                counts.popitem(last=False)
            counts[key] = 1
            known += 1

    def passing(self, keys: Sequence[bytes]) -> list[bytes]:
        found = [key for key in keys if self._counts.get(key, 0) >= self.threshold]
        self.skipped += len(keys) - len(found)
        return found

    def take_skipped(self) -> int:
        skipped, self.skipped = self.skipped, 0
        return skipped
