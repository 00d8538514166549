"""BlockCache: maps keys to slots of an engine's pool.

After an interrupt such as KeyboardInterrupt, no key is visible whose bytes are not in its slot.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from kvoffload.cache.engines import CacheAfter, EngineT, check_engine, check_parts, checked_ids
from kvoffload.cache.key_cache import FETCH_DEADLINE, KeyCache, KeyCacheOptions, Membership
from kvoffload.cache.keys import chain_keys
from kvoffload.cache.policies import DEFAULT_POLICY, PolicyChoice
from kvoffload.cache.pools import Tenant, claimed
from kvoffload.cache.record_calls import guarded, leading
from kvoffload.cache.reservations import CacheJob, CacheRequest, LoadArguments, record_of
from kvoffload.cache.statistics import CacheEvent, Restored
from kvoffload.cache.weights import split_namespace
from kvoffload.engine.job import Job
from kvoffload.errors import CapacityError, KVOffloadError, TransferError
from kvoffload.internal.checks import flag, to_wait
from kvoffload.internal.nesting import refuse_waiting
from kvoffload.internal.representation import HtmlRepresentation
from kvoffload.internal.types import Ids, Int64Array
from kvoffload.planning.layer_groups import PartsLike
from kvoffload.planning.transfer_plan import Direction

if TYPE_CHECKING:  # what is imported where there are tiers
    from kvoffload.cache.tiering.attaching import WriteName
    from kvoffload.cache.tiering.promotion import ChainedLoad, FetchJob, PromotedLoad, Promotion
    from kvoffload.cache.tiering.tier import Tier

BlockIds = Ids | Sequence[Ids]  # with several groups of planes a list for each
Parts = int | Sequence[Sequence[int]] | None
_Load = TypeVar("_Load", bound="PromotedLoad[Any]")
_REFUSALS = (KVOffloadError, ValueError, TypeError)  # of `engine.submit`: nothing has been queued


class BlockCache(KeyCache, HtmlRepresentation, Generic[EngineT]):
    """A prefix cache over the slots of an engine. Usable from any thread; a context manager.

    A key stands for `blocks_per_slot` blocks of every group of the layout; `kvoffload.chain_keys` computes keys. With
    several groups a key takes one slot per group, and `blocks` is a sequence with one list of ids per group.

    Serving a request, here with one block per key:

        job = cache.fetch(keys, blocks, after=stream)                  # leading keys, from slots and from tiers
        job.order_before(stream)                                       # compute what is after the first job.hits
        cache.keep(keys, blocks, after=stream)                         # skips present keys

    The same in steps. `lookup` sees only the slots; `promote` first brings keys that only a tier has into slots:

        with cache.promote(keys, deadline=0.2) as promotion:           # instead of lookup; keys in slots stay there
            hits = promotion.wait()
            cache.load(keys[:hits], blocks[:hits], after=stream).order_before(stream)
        cache.store(keys, blocks, after=stream)                        # tiers get the keys that are worth writing
        cache.touch(keys)                                              # once, at the end of the request

    If a tier fails, hangs or is full, its keys are misses; only `remove` and `clear` raise an error for it. No GPU
    stream waits for a tier. To move the bytes yourself, reserve slots, fill them and commit; or acquire a lease, read,
    release it. Inside another call in the same thread (in a signal handler or a policy) calls raise RuntimeError. But
    look-ups answer at once and count nothing, unless a policy asks (over a shared pool all keys are misses then); and
    the next call does a `release` or `abort`. In a forked child all calls but `close` and `keys` raise ClosedError.

    Args:
        engine: an OffloadEngine, or a ShardedEngine; then `after` and `order_before` take a list with one element per
            device. The cache guards the slots: `engine.store` refuses them unless an open reservation of it holds
            them. With 0 slots every lookup misses and every store is declined.
        policy: chooses the keys to evict when the cache is full: "prefix", "lru", "arc", "s3fifo", a `policies.Policy`,
            or a function that takes the capacity in keys and returns a new one. An object serves one cache, without
            quotas and priorities, and no other even when that one is closed: it knows its keys. Above tiers "prefix"
            declines nothing, since tiers can be given only keys in slots.
        tenants: quotas and priorities by name; see `Tenant`. Calls may name these tenants and "", no others.
        store_after: a key is stored only once this many lookups have missed it; 0: at once.
        max_load_blocks: the most hits that `lookup` and `lookup_many` report for a request, but not `promote` or
            `fetch`; None: no limit. (A very long load delays all others.)
        on_event: called with each `CacheEvent`, one at a time, in order, outside all locks: at the end of a call of the
            cache, or of `wait` or `done` of its jobs, in the thread that made the call, or in one that is in `on_event`
            at that time; with tiers, a shared pool, or an awaited job, in a thread of the library, too. It may call the
            cache, but each call adds its own events: one that answers every "hit" with a `lookup` never ends. In the
            tiers' thread `drain`, `wait` of a promotion, and `wait`, `hits` and `order_before` of a fetch that is not
            `submitted` raise RuntimeError. An Exception from it becomes a KVOffloadWarning.
        tiers: asked in this order, each for the keys that the tiers before did not bring. Each key that is written goes
            to all. The cache closes them when it is closed or garbage; if this constructor raises, close them yourself.
            Empty: no tiers; `write`, `prefill_tokens_per_second` and `hung` have no effect then, though wrong ones may
            be refused.
        write: which keys are written to the tiers. "admitted": keys worth a write, chosen at the end of requests
            (`touch`, `CacheRequest.end`) by what was asked for again before; "through": keys once they are stored;
            "back": keys shortly before they are evicted; "none": none. Nothing waits for a write: keys that are evicted
            first, or find too many others waiting, are left out.
        prefill_tokens_per_second: how fast the model computes. Keys are not promoted if their tier, at its latest
            measured speed, would take longer than computing them. Needs a layout with tokens_per_block. None: measured,
            as the median time from a `fetch` that missed keys until they are stored, divided by their number, of the
            latest 64 stores. All keys are promoted before there are 8. The time is too long by whatever your program
            does in between, such as decoding before `keep`; then tiers are asked for more keys than is best. A very low
            number: all keys are promoted, always.
        hung: seconds after which a tier's call counts as hanging. The tier is not used until that call returns.
        pool: a `SharedPool`, over whose memory the engine is, and no other cache. Its owner has the index: policy,
            tenants and tiers are its own (given here, they raise ValueError, as store_after does), and keys are hits
            for all members. Where no owner answers, every key is a miss, and every store is declined.

    Attributes:
        engine: as given.
        capacity: keys that fit, `engine.num_slots // num_groups`. While the pool grows (see `Growing`), fewer do:
            `statistics().capacity`. Shares of the entries, such as what promotions may occupy, are of those that there
            are. Policies are made for the whole pool, or again for what there is, if it has stopped growing early.

    Raises:
        CapacityError: the engine has slots, but fewer than groups; fewer jobs may be in flight than there are groups;
            another cache guards its slots, or is over `pool`; the engine is not over the memory of `pool`; there is no
            memory for `capacity` keys; or there are tiers and no slots.
        ClosedError: the engine or `pool` is closed, or this is a forked child.
        LayoutError: `prefill_tokens_per_second` and a layout without tokens_per_block; tiers, and slots with gaps; or
            `pool` was attached with another layout.
        ValueError, TypeError: bad arguments; a policy object that another cache has or had.
        RuntimeError: called inside another call of the engine in the same thread.
        The errors of `Tier.attach`.
    """

    _save: ClassVar[Callable[..., int]]  # of `kvoffload.session`, a floor above this one: `kvoffload` registers both
    _restore: ClassVar[Callable[..., Restored]]

    def __init__(
        self,
        engine: EngineT,
        *,
        policy: PolicyChoice = DEFAULT_POLICY,
        tenants: Mapping[str, Tenant] | None = None,
        store_after: int = 0,
        max_load_blocks: int | None = None,
        on_event: Callable[[CacheEvent], None] | None = None,
        tiers: Sequence[Tier] = (),
        write: WriteName = "admitted",
        prefill_tokens_per_second: float | None = None,
        hung: float = 30.0,
        pool: Membership | None = None,
    ) -> None:
        check_engine(engine)
        below = None
        self._owned: tuple[Callable[..., object], ...] = ()  # that `close` calls, with a timeout, in this order
        if prefill_tokens_per_second is not None or not isinstance(tiers, tuple) or tiers:
            from kvoffload.cache.tiering.attaching import TierPlan, seconds_per_key

            below = TierPlan.of(tiers, write, hung, seconds_per_key(engine.layout, prefill_tokens_per_second))
            if below is not None and engine.num_slots == 0:
                raise CapacityError("tiers need slots, and this engine has none; raise pool_bytes, or num_slots")
        self.engine = engine
        self._groups = engine.layout.num_groups
        capacity = engine.num_slots // self._groups
        if capacity == 0 < engine.num_slots:
            raise CapacityError(
                f"{engine.num_slots} slots hold no key of {self._groups} groups; raise pool_bytes, or num_slots"
            )
        if self._groups > engine.max_in_flight:
            raise CapacityError(
                f"a key of {self._groups} groups takes as many jobs, but max_in_flight is {engine.max_in_flight}"
            )
        with claimed(policy):
            options = KeyCacheOptions(policy, tenants, store_after, max_load_blocks, on_event)
            super().__init__(capacity, options, engine=engine, below=below, pool=pool)
            self._tenants = dict(tenants or {})
            engine.guard_slots(self._state)
            if below is not None:
                self._tiers = below.attach_engine(self._records, engine, weakref.ref(self))

    # moving bytes -------------------------------------------------------------------------------------------------

    def store(
        self,
        keys: Sequence[bytes],
        blocks: BlockIds,
        *,
        after: CacheAfter = None,
        tenant: str = "",
        all_or_nothing: bool = False,
        request: CacheRequest | None = None,
    ) -> CacheJob:
        """Store the keys that are neither present, pending nor declined; `job.keys` has them. They are hits once the
        job has ended well, but for `job.unfit`; before that, only `load` and `acquire` with `pending=True` take them.

        Until the job is done, do not write the source blocks, except in work queued after `job.order_before(stream)`.

        Other keys are evicted to make room, but none of `keys`, and none that is pending, leased or being loaded. If
        only some fit, the first are stored and the others declined. A key is also declined if it is worth less than the
        keys it would displace, was not looked up often enough, or is over a quota.

        Args:
            keys: bytes, no repeats, in the order of the request. May be all keys of the request: present ones are kept.
            blocks: source ids, `blocks_per_slot` for each of `keys`, present ones included (with several groups, a list
                for each). Repeats are legal. They are copied: you may change the list at once.
            after: the GPU waits for this before it reads a block: your stream, say. None: the legacy default stream,
                which a layout with `on_default_stream=False` refuses. Values as for `OffloadEngine.store`; with a
                `ShardedEngine` a list with one for each device.
            tenant: whose quota and priority the keys have. With `request`, leave it out: they are the request's.
            all_or_nothing: raise CapacityError instead of declining a missing key, for whatever reason.
            request: the open request that `keys` belong to. `keys` may be only its new ones, or all so far.

        Raises:
            CapacityError: with `all_or_nothing`, a key would be declined; or the engine has no room for the transfer.
            ClosedError: `request` has ended; the engine is closed; or this is a forked child.
            LayoutError: `keys` or `blocks` are no such lists; `keys` repeats a key; an id is out of range.
            ValueError: no such tenant; `request` is of another cache, or has another tenant; `after` is refused; a
                policy chose keys that must not be evicted; `all_or_nothing` is no bool.
            TypeError: `after` or `request` is no such thing.
            TransferError: a stream in `after` is being captured, or the CUDA context is lost.
            DriverError: the driver failed before anything was queued.
            RuntimeError: called inside another call in the same thread.
            No key has changed then, though `request` may have got its keys. But after a TransferError, or if the engine
            refuses a group after the first, the keys evicted for this call may be gone.
        """
        if all_or_nothing is not False:
            flag("all_or_nothing", all_or_nothing)
        weights = self._weights.now
        checked, per_group = checked_ids(self.engine.layout, keys, blocks, weights.tag)
        if weights.tag:
            tenant = weights.namespace(tenant, request)
        after = self.engine.resolve(after)
        self.engine.advance()
        job = self._store((checked, tenant, all_or_nothing, request, per_group, after))
        if self._tiers is not None:
            self._tiers.stored()
        return job

    @guarded
    def _store(
        self, given: tuple[list[bytes], str, bool, CacheRequest | None, list[Int64Array], CacheAfter]
    ) -> CacheJob:
        """Choose entries, make their keys pending and submit the transfer that fills them. There are four cases:

        1. All groups are submitted: the record is settled when they have ended.
        2. The engine refuses the first group: nothing was queued, and nothing has changed.
        3. It refuses a later group: copies into the entries may be queued. `guarded` abandons the record, so that its
           keys become missing, and its entries free when the copies have ended.
        4. Another exception: as 3, since copies may be queued.
        """
        keys, tenant, all_or_nothing, request, per_group, after = given
        state, engine, jobs = self._state, self.engine, tuple[Job, ...]()
        opened = None if request is None else record_of(request, state)
        record = state.propose(keys, tenant, all_or_nothing, opened, False)
        if not record.keys:
            engine.check_room(0)  # refuses a closed engine
            if record.declined:
                state.recorder.note("declined", record.declined, record.tenant)
            return CacheJob((), jobs, self._records, record)
        submitted = engine.submitted
        engine.check_room(self._groups)
        state.publish(record)
        try:
            for group, ids in enumerate(per_group):
                mine = ids if len(record.keys) == len(ids) else ids[record.positions]
                slots = state.slots(record.indices, group)
                job = engine.submit_locked(Direction.STORE, mine.reshape(-1), slots, group=group, after=after)
                jobs = (*jobs, job)
        except _REFUSALS as error:
            if jobs:
                state.fill(record)
            elif self._refused(error, submitted):
                state.withdraw(record)
            raise
        state.fill(record, jobs)
        shown = self._weights.plain(record.keys) if self._weights.names else tuple(record.keys)
        return CacheJob(shown, jobs, self._records, record)

    def load(
        self,
        keys: Sequence[bytes],
        blocks: BlockIds,
        *,
        after: CacheAfter = None,
        pending: bool = False,
        parts: Parts = None,
        request: CacheRequest | None = None,
    ) -> CacheJob:
        """Load the blocks of keys that are all present and ready. The keys are not evicted until the load has ended.

        Until then do not touch the target blocks, except in work queued after `job.order_before(stream)`.

        Args:
            keys: bytes. A key may be repeated, with other target blocks each time.
            blocks: target ids, `blocks_per_slot` per key in the order of the keys (with several groups, a list for
                each). No repeats.
            after: the GPU waits for this before it overwrites a block: it must cover work that still reads the blocks.
                None: the legacy default stream, which may be refused as in `store`. Values as for
                `OffloadEngine.store`; with a `ShardedEngine` a list with one for each device.
            pending: also load keys whose `store`, or `commit` with jobs, has not ended; the GPU waits for it, the host
                does not. If such a store fails, the job's `wait` raises, and the loaded blocks must not be used.
            parts: copy the planes in parts, one after the other, for `job.order_before(stream, part=k)`: a number of
                equal parts, or a list with the indices of the planes of each part. With several groups only a number,
                which holds for each group. Groups are copied one after another; to wait for one,
                `job.jobs[group].order_before(stream, part=k)`.
            request: the open request that loads the keys; they are its keys from now on, see `CacheRequest`.

        Raises:
            MissingKeyError: a key is absent or not ready; with `pending`, absent, only reserved, or being promoted.
            LayoutError: `keys`, `blocks` or `parts` are no such lists, or an id of `blocks` repeats or is out of range.
            CapacityError: the engine has no room for the transfer.
            ClosedError: `request` has ended; the engine is closed; or this is a forked child.
            ValueError, TypeError: another argument; TypeError also for `parts` that are neither a number nor a list.
            TransferError: a stream in `after` is being captured, or the CUDA context is lost.
            DriverError: the driver failed before anything was queued.
            RuntimeError: called inside another call in the same thread.
            With one group nothing has changed then. With several, after any error but MissingKeyError the
            first may be loading: call `engine.drain` before you use the blocks.
        """
        if pending is not False:
            flag("pending", pending)
        checked, per_group = checked_ids(self.engine.layout, keys, blocks, self._weights.now.tag, targets=True)
        if parts is not None:
            check_parts(self.engine, parts)
        after = self.engine.resolve(after)
        self.engine.advance()
        return self._load((checked, per_group, after, parts, request, pending))

    @guarded
    def _load(
        self, given: tuple[list[bytes], list[Int64Array], CacheAfter, PartsLike, CacheRequest | None, bool]
    ) -> CacheJob:
        """Hold the entries and submit the transfer; `_store` lists the cases. `given` has the fields of
        `LoadArguments`.
        """
        keys, per_group, after, parts, request, pending = given
        state, engine, jobs = self._state, self.engine, tuple[Job, ...]()
        opened = None if request is None else record_of(request, state)
        record = state.propose_lease(keys, pending, True, opened)
        submitted = engine.submitted
        engine.check_room(self._groups if keys else 0)
        if not keys:
            return CacheJob((), jobs, self._records, record)
        state.begin(record)
        try:
            for group, ids in enumerate(per_group):
                slots, ids = state.slots(record.indices, group), ids.reshape(-1)
                job = engine.submit_locked(Direction.LOAD, ids, slots, group=group, after=after, parts=parts)
                jobs = (*jobs, job)
        except _REFUSALS as error:
            if not jobs and self._refused(error, submitted):
                state.end(record)
            raise
        record.jobs = jobs
        state.loading.append(record)
        state.use(keys, opened)
        shown = self._weights.plain(keys) if self._weights.names else tuple(keys)
        return CacheJob(shown, jobs, self._records, record)

    # one door: what a host needs ----------------------------------------------------------------------------------

    def keys(self, token_ids: Any, *, salt: str, extra: bytes = b"", parent: bytes | None = None) -> list[bytes]:
        """Return the keys of a sequence of tokens: 16 bytes for each `tokens_per_block * blocks_per_slot` tokens, none
        for the tokens after the last full key. This is `kvoffload.chain_keys` for the layout of this cache; arguments
        and errors (ValueError, LayoutError, TypeError) as there.
        """
        return chain_keys(token_ids, layout=self.engine.layout, salt=salt, extra=extra, parent=parent)

    def fetch(
        self,
        keys: Sequence[bytes],
        blocks: BlockIds,
        *,
        after: CacheAfter = None,
        deadline: float | None = FETCH_DEADLINE,
        tenant: str = "",
        counted: bool = True,
        parts: Parts = None,
        request: CacheRequest | None = None,
    ) -> FetchJob:
        """Load the longest leading run of keys that is faster to load than to compute, from slots or tiers. Returns at
        once; over a shared pool whose owner has tiers, once these have brought their keys, or the deadline is over.

        This is `lookup` without `max_load_blocks`, `promote` and `load` in one job. Keys in slots are always worth
        loading. Keys in tiers are if they come before the deadline, and before the model would have computed them: no
        slower tier is asked, and a fetch waits no longer than computing all keys from the first that is in no slot
        takes, by `prefill_tokens_per_second` or what was measured. Over a shared pool only the deadline counts.

        What is in the blocks of the keys after the first `job.hits` is undefined, as in all blocks if the load fails.
        If a key that was found is removed before it is loaded, there are no hits. Leave the blocks alone until the job
        is `done`, also if you `cancel` it, except in work queued after `job.order_before(stream)`.

        Args:
            keys: bytes, no repeats, in the order of the request; may be all of its keys.
            blocks: target ids for all keys, as for `load`, without repeats.
            after, parts: as for `load`. If tiers are asked, it follows what is on a stream when it is submitted, later.
            deadline: seconds from now for tiers; None: no limit (over a shared pool 60). The load of what came follows.
            tenant: whose quota and priority keys from tiers have. With `request`, leave it out: they are the request's.
            counted: whether it counts as a lookup; False if you have called `lookup` for these keys.
            request: the open request that the keys belong to, from when they are loaded. Do not end it before.

        Raises:
            LayoutError: `keys` or `blocks` repeat an element, or these or `parts` are no such lists.
            ValueError: no such tenant; `deadline` is not above 0; `request` is of another cache, or has another tenant.
            ClosedError: there are tiers, and the cache is closed. The other errors of `load` but MissingKeyError: see
                there when to call `engine.drain`. If tiers are asked, `hits`, `order_before`, `wait` may raise these.
        """
        from kvoffload.cache.tiering.promotion import FetchJob

        weights = self._weights.now
        checked, per_group = checked_ids(self.engine.layout, keys, blocks, weights.tag, targets=True, distinct=True)
        if parts is not None:
            check_parts(self.engine, parts)
        after = self.engine.resolve(after)
        if request is not None:
            with self._records.lock:
                tenant, _ = split_namespace(record_of(request, self._state).tenant_of_call(tenant))
        of_key = None if self._tiers is None else self._tiers.compute.seconds_per_key
        if of_key is not None and (missing := len(checked) - leading(self._state.table, checked)):
            wait = missing * of_key
            deadline = wait if deadline is None else min(to_wait("deadline", deadline), wait)
        promotion = self._promote(checked, weights, deadline, tenant, counted)
        load = LoadArguments(checked, per_group, after, parts, request)
        try:
            return self._chain(FetchJob(promotion, load), at_once=promotion._record.ended)
        except BaseException:
            promotion.release()
            raise

    def keep(
        self,
        keys: Sequence[bytes],
        blocks: BlockIds,
        *,
        after: CacheAfter = None,
        tenant: str = "",
        request: CacheRequest | None = None,
    ) -> CacheJob:
        """Store the keys of a request that has ended, and record its use: `store` and `touch` in one call, or with
        `request`, which this ends, `store` and `end`.

        Give it all keys of the request, once: those that are present cost a look-up. With a `request` that has stored
        others in pieces, the new ones are enough. Returns once the copies are queued: until the job is done, do not
        write the source blocks, except in work queued after `job.order_before(stream)`. Arguments and errors as for
        `store` without `all_or_nothing`: if one is raised, no use is recorded, and `request` stays open.
        """
        job = self.store(keys, blocks, after=after, tenant=tenant, request=request)
        if request is None:
            self.touch(keys)
        else:
            request.end()
        return job

    def save(
        self,
        path: str | os.PathLike[str],
        token_ids: Any,
        *,
        salt: str,
        identity: Mapping[str, str],
        extra: bytes = b"",
        deadline: float | None = 60.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Write the leading blocks of a conversation into a file, from slots and tiers. Returns how many tokens these
        hold, of those given: as many as the cache has blocks of.

        The file is written beside `path`, synced and renamed: after a crash there is the old one, or the new. Only this
        user can read it; it holds the prompt in clear. Any cache of the same model can `restore` it, whatever its
        layout. docs/session-format.md specifies it. It blocks, and holds at most a quarter of the entries at a time.

        Args:
            token_ids, salt, extra: as for `keys`. The file has a digest of salt and extra.
            identity: what the bytes depend on but the layout, by name: "model", and as you need them "revision",
                "adapters", "rope" and others. `restore` must be given the same. At most 4096 characters.
            deadline: seconds that a tier may take for each part of the file; None: no limit.
            progress: called with the tokens that are written, and with all. If it raises, nothing is left.

        Raises:
            MissingKeyError: the cache has no block of these tokens, or has used other weights meanwhile.
            LayoutError: the layout has no `block_shape`, or its shards do not divide "heads"; or as `keys`.
            ValueError, TypeError: an argument is wrong; there are more than 2**24 tokens.
            OSError: the file cannot be written; `path` is as it was, unless only its folder could not be synced.
            RuntimeError: called inside another call of the library, or in a thread of the cache.
            The other errors of `promote`.
        """
        return self._save(path, token_ids, (salt, extra, identity), deadline, progress)

    def restore(
        self,
        path: str | os.PathLike[str],
        *,
        salt: str,
        identity: Mapping[str, str],
        extra: bytes = b"",
        tenant: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> Restored:
        """Make the blocks of a file that `save` has written hits of this cache. It blocks. Returns how many tokens are
        hits now, and why no more: the file was cut, a block is damaged, the cache has no room or does not want a key
        (its policy, a quota, `store_after`), another call is storing one.

        Every block is compared with its digest before its key is visible. A file that anyone has made may have any
        bytes: restore those of people whom you would let compute for you.

        Args:
            salt, extra, identity: as given to `save`.
            tenant: whose quota and priority the keys have.
            progress: called with the tokens that are restored, and with all. If it raises, those stay.

        Raises:
            SessionFileError: it is no session file, its header is damaged, it is of a newer version, or was saved with
                another identity, salt or extra, or other weights than are in use (`use_weights`).
            LayoutError: its blocks are of another dtype, shape or number of tokens; or as `save`.
            ValueError, TypeError: an argument is wrong; there is no such tenant.
            OSError: it cannot be opened or read.
            RuntimeError: called inside another call of the library, or in a thread of the cache.
            Nothing has been loaded then. The other errors of `reserve`.
        """
        return self._restore(path, (salt, extra, identity), tenant, progress)

    def close(self, timeout: float = 10.0) -> bool:
        """Write what the tiers are to get (see `drain`), end promotions with the keys that came, close the tiers. A
        cache from `open_cache` then waits for its transfers, and closes its engine, and its device if it has opened it.

        An engine of your own stays open; look-ups, loads and stores go on working. If there were tiers, `fetch`,
        `promote`, `drain`, and `remove` and `clear` unless `below=False`, raise ClosedError from then on. Idempotent.
        In a forked child it does nothing, and returns True. The end of a `with` block calls `close()`, and does not
        tell whether that returned False.

        Args:
            timeout: seconds in total; writes that have not begun by then are given up, with 0 all.

        Returns:
            Whether everything ended within about `timeout` seconds. If False, transfers are in flight, or calls of a
            tier hang: call `close` again. Slots that such calls may touch are kept from other keys, and stay mapped.

        Raises:
            RuntimeError: called inside another call of the library in the same thread, and there are tiers, or the
                cache has its engine from `open_cache`.
            ValueError: `timeout` is no number, such as None.
            DriverError: the driver failed when an engine or device of `open_cache` was closed; call it again.
        """
        end = time.monotonic() + to_wait("timeout", timeout)
        if self._owned:
            refuse_waiting("close")
        ended = super().close(timeout)
        try:
            for close in self._owned:
                close(max(0.0, end - time.monotonic()))
        except TimeoutError:
            return False
        return ended

    # inner workings -----------------------------------------------------------------------------------------------

    def _html_options(self) -> dict[str, Any]:
        statistics = None if self.engine.devices[0].foreign else self._records.statistics()
        return {"statistics": statistics, "described": self._describe(), "tenants": self._tenants}

    def _load_promoted(self, load: LoadArguments) -> CacheJob:
        """Load keys that a promotion holds."""
        self.engine.advance()
        return self._load(load)

    def _load_after(self, promotion: Promotion, blocks: BlockIds, after: CacheAfter, parts: Parts) -> ChainedLoad:
        from kvoffload.cache.tiering.promotion import ChainedLoad

        keys, per_group = checked_ids(
            self.engine.layout, promotion.keys, blocks, promotion._record.weights.tag, targets=True
        )
        if parts is not None:
            check_parts(self.engine, parts)
        after = self.engine.resolve(after)
        self._check_open()
        return self._chain(ChainedLoad(promotion, LoadArguments(keys, per_group, after, parts, None)), at_once=False)

    def _chain(self, load: _Load, *, at_once: bool) -> _Load:
        """Have a load submitted when its promotion has ended, and return it. `at_once`: that has ended, so submit the
        load here, and raise what refuses it.
        """
        if at_once or self._tiers is None:
            load._submit(self._load_promoted)
            if at_once and load._refused is not None:
                raise load._refused
        else:
            self._tiers.post(load)
        return load

    def _refused(self, error: Exception, submitted: int) -> bool:
        """Return whether the refusal came before anything was queued. If the context was lost, or a signal handler has
        raised, copies may be queued.
        """
        return not isinstance(error, TransferError) and self.engine.submitted == submitted
