"""KeyCache: the part that BlockCache and CacheIndex share: which keys have entries, and the tiers below.

Its calls, and what each is for:

    lookup, lookup_many  count the leading keys that can be loaded: asked before a request runs
    status, status_of    tell hits from pending and missing keys: for hosts that go key by key
    locate               name the place of each key, a tier's too: to choose between hosts
    reserve              take entries for missing keys, evicting others; `commit` or `abort` ends it
    acquire              hold the entries of ready keys while you read their slots; `release` ends it
    touch                tell the policy that a request has ended: uses follow requests, not copies
    open_request         store and load a request in pieces, none of which evicts another one
    hint                 tell the cache what a session is about to do
    use_weights          say which weights the blocks are computed with from now on
    promote              bring keys from tiers into entries, ahead of the request that loads them
    remove, clear        make keys missing here and in the tiers, since their bytes must not be found again
    drain, close         wait for transfers and for what the tiers are to get

BlockCache adds `store` and `load`, which copy blocks; CacheIndex adds `load`, which only tells the policies.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, SupportsIndex

from kvoffload.cache.engines import CacheEngine
from kvoffload.cache.entries import Status, check_keys, watch
from kvoffload.cache.policies import DEFAULT_POLICY, PolicyChoice
from kvoffload.cache.pools import Pools, ReuseFilter, Tenant
from kvoffload.cache.record_calls import RecordCalls, guarded, locked
from kvoffload.cache.reservations import CacheRequest, Lease, Reservation, record_of
from kvoffload.cache.sessions import ACTIONS, LONGEST_TTL, Action, Hint, HintAnswer, default_ttl
from kvoffload.cache.state import CacheState
from kvoffload.cache.statistics import CacheEvent, CacheStatistics, StatisticsRecorder
from kvoffload.cache.weights import UsedWeights, Weights, check_weights
from kvoffload.errors import ClosedError
from kvoffload.internal.checks import as_timeout, at_least, flag, shown, to_wait
from kvoffload.internal.nesting import refuse_nested
from kvoffload.internal.teardown import Closing
from kvoffload.internal.waiting import wait_until

if TYPE_CHECKING:  # what is imported where there are tiers
    from kvoffload.cache.tiering.attaching import TierPlan
    from kvoffload.cache.tiering.below import CacheTierStatistics
    from kvoffload.cache.tiering.promotion import ChainedLoad, Promotion
    from kvoffload.cache.tiering.tier_manager import TierManager

_MISS, _HIT, _PENDING = Status  # looking them up in the class takes as long as all the rest of a call
_AGAIN = "make an engine and a cache, or call open_cache again"
FETCH_DEADLINE = 1.0  # seconds
_HOST, _WAITS, _MISSING = "host", "pending", "missing"


class Membership(Protocol):
    """A `kvoffload.SharedPool`, as a cache over it sees it."""

    @property
    def capacity(self) -> int: ...

    def open(
        self, engine: CacheEngine | None, recorder: Callable[[int], StatisticsRecorder], weights: UsedWeights, /
    ) -> tuple[CacheState, RecordCalls]:
        """Return the state and the calls of a cache whose truth the pool's owner has."""


class KeyCacheOptions(NamedTuple):
    """What the user chooses for every kind of cache; see `BlockCache`."""

    policy: PolicyChoice
    tenants: Mapping[str, Tenant] | None
    store_after: int
    max_load_blocks: int | None
    on_event: Callable[[CacheEvent], None] | None


class KeyCache(Closing):
    """The part of a prefix cache that moves no bytes between a device and the host. Usable from any thread.

    Look-ups made inside another call in the same thread (see `internal.nesting`) answer from the truth and count
    nothing.

    Args:
        engine: asked before each call whether it is usable; None: no engine.
        below: the tiers that the class is about to attach; None: none.
        pool: the membership in a shared pool, whose owner has the index; None: the index is here.
    """

    _check_usable: Callable[[], None] | None = None  # before a call the engine is asked, and checks it

    def __init__(
        self,
        capacity: SupportsIndex,
        options: KeyCacheOptions,
        *,
        engine: CacheEngine | None = None,
        below: TierPlan | None = None,
        pool: Membership | None = None,
    ) -> None:
        self.capacity = at_least("capacity", capacity, 0)
        if self.capacity > 1 << 32:
            raise ValueError(
                f"capacity must be at most {1 << 32}, got {capacity}; lower it, or the engine's pool_bytes or num_slots"
            )
        policy, tenants, store_after, most_hits, on_event = options
        self._most_hits = None if most_hits is None else at_least("max_load_blocks", most_hits, 1)
        self._weights = weights = UsedWeights()
        if callable(on_event):
            on_event = weights.telling(on_event)
        if below is not None:
            policy, on_event = below.policy(policy), below.hook(on_event)
        check = None if engine is None else engine.check_process
        self._pool = pool
        if pool is None:
            pools = Pools(policy, {} if tenants is None else tenants, self.capacity)
            reuse_filter = ReuseFilter(store_after, self.capacity)
            recorder = StatisticsRecorder(self.capacity, on_event)
            self._state = CacheState(self.capacity, pools, reuse_filter, recorder, engine, weights)
            self._records = RecordCalls(self._state, check)
        else:
            if policy != DEFAULT_POLICY or tenants or store_after or below is not None:
                raise ValueError(
                    "policy, tenants and tiers are for a shared pool's owner: give them to `kvoffload pool serve`, or "
                    "to a PoolOwner, and leave them out here; with a shared pool there is no store_after"
                )
            if not hasattr(pool, "open"):
                raise TypeError(f"pool must be a SharedPool, got {shown(pool)}")
            self._state, self._records = pool.open(engine, partial(StatisticsRecorder, on_event=on_event), weights)
        self._state.owner, self._state.has_tiers = weakref.ref(self), below is not None
        self._asks = engine
        # hits of one key need no lock where they call nothing
        self._unlocked = pool is None and engine is None and on_event is None
        self._tiers: TierManager | None = None

    # asking -------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys can be loaded, at most `max_load_blocks`. Counts as a request, not as a use (see
        `touch`).

        The first key that is not ready in a slot ends the count: a missing one, a pending one, or one that only a tier
        has (see `promote`). Nothing holds the keys: one that is evicted before you load it raises MissingKeyError then.

        Raises:
            LayoutError: `keys` is not a list of bytes.
            ClosedError: the engine is closed, or this is a forked child.
        """
        if self._asks is not None:
            self._look()
        return self._records.look_up(([check_keys(keys, tag=self._weights.now.tag)], self._most_hits))[0]

    def lookup_many(self, requests: Sequence[Sequence[bytes]]) -> list[int]:
        """Look up several requests in one call, and return the hits of each. Raises as `lookup`."""
        if self._asks is not None:
            self._look()
        tag = self._weights.now.tag
        return self._records.look_up(([check_keys(keys, tag=tag) for keys in requests], self._most_hits))

    def status(self, keys: Sequence[bytes]) -> list[Status]:
        """Return whether each key is missing, a hit or pending. Counts nothing; works with a closed engine, too."""
        self._advance()
        return self._records.status(check_keys(keys, tag=self._weights.now.tag))

    def status_of(self, key: bytes) -> Status:
        """Return whether one key is missing, a hit or pending. Counts as `lookup([key])` does; `status` counts nothing.

        A HIT means that the bytes are in the entry. MISS and PENDING count as a miss in statistics and events; only a
        MISS counts towards `store_after`.

        Raises:
            LayoutError: `key` is not bytes.
            ClosedError: the engine is closed.
        """
        # A key that is ready is a hit, whatever waits to be settled. So a hit needs no lock, unless a call of another
        # thread changes the index while it is read. Such a call counts in `changes` before it clears `working`, and
        # `working` is read first: if neither shows a call, there was none. A hit takes 0.14 us then instead of 0.44.
        state = self._state
        if tag := self._weights.now.tag:
            key = check_keys([key], tag=tag)[0]
        changes, table = state.changes, state.table
        if (
            self._unlocked
            and type(key) is bytes
            and key in table.of
            and key not in table.pending
            and state.consistent
            and not state.working
            and state.changes == changes
        ):
            recorder = state.recorder
            recorder.lookups += 1
            recorder.hits += 1
            return _HIT
        if self._asks is not None:
            self._look()
        return self._records.status_of(key if type(key) is bytes else check_keys([key])[0])

    def locate(self, keys: Sequence[bytes]) -> list[str]:
        """Return where each key is: "host" (can be loaded), "pending" (reserved, being stored or promoted), the name of
        a tier, or "missing"; "unknown" if only asking a tier would tell, as `promote` does. Waits for no tier. A hint:
        the key may be evicted, or a tier may lose it. Counts nothing. Knows nothing of the tiers of a shared pool.
        """
        self._advance()
        statuses = self._records.status(checked := check_keys(keys, tag=self._weights.now.tag))
        places = [_HOST if status is _HIT else _WAITS if status is _PENDING else _MISSING for status in statuses]
        return places if self._tiers is None else self._tiers.locate(checked, places)

    # using --------------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record that a request with these keys has ended. Call it once per request, with all of its keys in order,
        found or not: recency and frequency then follow requests, not copies. For an open request call its `end`.

        Raises:
            LayoutError: `keys` is not a list of bytes.
            RuntimeError: called inside another call of the cache.
        """
        used = list(dict.fromkeys(check_keys(keys, tag=self._weights.now.tag)))
        self._records.touch(used)
        if self._tiers is not None:
            self._tiers.post(tuple(used))

    def open_request(self, *, tenant: str = "", session: str | None = None) -> CacheRequest:
        """Open a request that stores and loads its keys in pieces: see `CacheRequest`.

        End it by its `end`, or use it in `with`.

        Args:
            tenant: whose quota and priority its keys have.
            session: the conversation or agent that the request belongs to, any name; each tenant has its own. From then
                on ages are measured in time, too, and `hint` concerns the session. A wrong name costs hits, no bytes.

        Raises:
            ValueError: the cache has no such tenant.
            TypeError: `session` is not a string.
            RuntimeError: called inside another call of the cache.
        """
        if session is not None and not isinstance(session, str):
            raise TypeError(f"session must be a string or None, got {session!r:.80}")

        return self._records.open_request((tenant, session, None if self._tiers is None else self._tiers.post))

    def hint(
        self, action: Action, *, session: str, tenant: str = "", ttl: float | None = None, due: float | None = None
    ) -> HintAnswer:
        """Tell the cache what a session is about to do. It may help, never fails a request, and never changes bytes.

        "retain": the session comes back. Until a request that continues its latest one has ended, or `ttl` or twice
            `due` is over, its keys go after all others of their priority. During an open request of the session it
            concerns that request, whose new keys then displace keys of lower promises; else the latest request. A
            session may retain twice as many keys as it has promised and then asked for in time, less twice those that
            it promised in vain; older promises count less. So the first promise retains nothing, but is remembered.
            All promises get the part of the entries that requests with one have of all keys asked for, one tenant half
            of the entries if there are several. While all other keys have less than an eighth of the entries, requests
            without a promise that find no room displace retained keys.
        "release": the session ends, now or with its open request. What it alone stored and used goes before all others.
        "demote": the session waits for long. The same keys are written to tiers; those that a tier has then go first.
        "prefetch": the session comes back soon. Keys of its latest request that only tiers have come into entries. With
            `due`, if the session has promised to come back, they are retained until then, as by "retain".

        Args:
            session, tenant: those given to `open_request`.
            ttl: seconds, above 0. "retain": at most ten minutes count, with `due` a day. "prefetch": its deadline.
                None: 300, or twice `due` if that is more.
            due: seconds until the session is expected, if that is known: of the retained keys those due last go first.
                Without it they go before the ones that have one.

        Returns:
            What was done, and why not more: no request has named the session, say, or a quota allows only "prefetch".

        Raises:
            ValueError, TypeError: no such action or tenant; `ttl` or `due` is not above 0; `session` is not a string.
            ClosedError: "demote" and "prefetch" in a closed cache; a forked child.
            RuntimeError: called inside another call of the cache.
        """
        if action not in ACTIONS:
            raise ValueError(f"action must be one of {', '.join(ACTIONS)}, got {action!r:.80}")
        if not isinstance(session, str):
            raise TypeError(f"session must be a string, got {session!r:.80}")
        for name, seconds in (("due", due), ("ttl", ttl)):
            if seconds is not None and not to_wait(name, seconds) > 0:
                raise ValueError(f"{name} must be seconds above 0, got {seconds!r:.80}")
        if action in ("demote", "prefetch"):
            self._check_open()
        self._state.pools.tenant(tenant)
        weights = self._weights.now
        tenant = weights.namespace(tenant)
        due = None if due is None else to_wait("due", due)
        hint = Hint(action, session, tenant, default_ttl(due) if ttl is None else to_wait("ttl", ttl), due)
        answer, keys, request = self._records.hint((hint, self._tiers is not None))
        if keys and self._tiers is not None and action == "demote":
            self._tiers.demote(tuple(keys), tenant, request)
        elif keys and self._tiers is not None:
            from kvoffload.cache.tiering.promotion import PromotionRecord

            until = time.monotonic() + min(hint.ttl, LONGEST_TTL)
            record = PromotionRecord(keys, tenant, until, self._refusing(), self._weights, weights, counted=False)
            record.request, record.released = request, True  # it holds nothing
            self._tiers.promote(record)
        return answer

    def use_weights(self, name: str) -> None:
        """Say which weights the model has from now on. No key that was stored under another name is a hit of this cache
        any more, from slots, tiers, stores or a shared pool, until that name is given again, also after a restart.
        Meanwhile such keys give way before all others. Takes as long for any number of keys.

        Call it between the last computation with the old weights and the first with the new ones. A store in flight is
        published under the old name. Promotions have no hits any more, nor has a fetch whose hits nobody has read; one
        whose hits were read is loaded, for you to throw away. Open requests, which depend on both, store nothing more.

        Args:
            name: at most 512 characters, no NUL, the same for the same weights wherever a tier or pool is shared. "" is
                the name before the first call.

        Raises:
            TypeError, ValueError: no such text. RuntimeError: called inside another call. ClosedError: a forked child.
        """
        if check_weights(name) != self._weights.told:
            self._weights.told = None
            locked(self._records, lambda state: state.use_weights(name))
            if self._tiers is not None:
                self._tiers.keep_weights(self._weights.in_use)
            self._weights.told = name

    def reserve(
        self,
        keys: Sequence[bytes],
        *,
        tenant: str = "",
        all_or_nothing: bool = False,
        request: CacheRequest | None = None,
    ) -> Reservation:
        """Reserve entries for the keys that are neither present nor pending. (`BlockCache.store` also copies.)

        Free entries are used first. Then keys are evicted, but none of `keys`, and none that is pending, leased or
        loaded. If there are too few, the first missing keys get them and the others are declined. You then fill
        `reservation.slots(group)` of every group, by `engine.store`, through `engine.slots` or otherwise, and call
        `reservation.commit(job)` or `abort()`.

        Args:
            keys: bytes, no repeats, in the order of the request: each needs the ones before. May be all keys of the
                request: present ones are skipped, and kept.
            tenant: whose quota and priority they have; with `request`, leave it out.
            all_or_nothing: raise CapacityError instead of declining a missing key, for whatever reason.
            request: the open request that `keys` belong to. `keys` may be only its new ones, or all so far.

        Raises:
            CapacityError: with `all_or_nothing`, a missing key would be declined.
            LayoutError: `keys` repeats a key, or is not a list of bytes.
            ValueError: the cache has no such tenant; its policy chose keys that must not be evicted; or `request` is of
                another cache, or of another tenant than `tenant`.
            ClosedError: the engine is closed, or `request` has ended.
            TransferError: the CUDA context is lost.
            RuntimeError: called inside another call of the cache.
            In all these cases nothing has changed, but over a shared pool `request` may have got the keys.
        """
        if self._asks is not None:
            self._asks.advance()
            self._asks.check_usable()
        weights = self._weights.now
        checked = check_keys(keys, repeats=False, tag=weights.tag)
        tenant = weights.namespace(tenant, request)
        return self._reserve((checked, tenant, flag("all_or_nothing", all_or_nothing), request))

    @guarded
    def _reserve(self, given: tuple[list[bytes], str, bool, CacheRequest | None]) -> Reservation:
        keys, tenant, all_or_nothing, request = given
        state = self._state
        opened = None if request is None else record_of(request, state)
        record = state.propose(keys, tenant, all_or_nothing, opened, False)
        handle = Reservation(self._records, record)
        watch(handle, record, state.abandoned.append)
        state.publish(record)
        state.fill(record)
        return handle

    def acquire(self, keys: Sequence[bytes], *, pending: bool = False) -> Lease:
        """Hold the entries of keys that are all present and ready, until the lease is released. Counts nothing.

        Args:
            keys: bytes; repeats are legal.
            pending: also take pending keys of a `store`, or of a `commit` with jobs; of a pool's, those of this cache.
                Before work on `stream` reads the slots, call `lease.order_before(stream)`, or `lease.wait()`.

        Raises:
            MissingKeyError: a key is absent or not ready; nothing has changed.
            LayoutError: `keys` is not a list of bytes.
            RuntimeError: called inside another call of the cache.
        """
        self._advance()
        return self._records.acquire((check_keys(keys, tag=self._weights.now.tag), flag("pending", pending)))

    # tiers --------------------------------------------------------------------------------------------------------

    def promote(
        self, keys: Sequence[bytes], *, deadline: float | None = 10.0, tenant: str = "", counted: bool = True
    ) -> Promotion:
        """Bring leading keys from tiers into entries, as many as come in time. Returns at once; over a shared pool
        whose owner has tiers, when it has ended.

        Call it for requests that are about to run: until you release it, it holds all of its keys that are in entries.
        Keys that tiers bring take at most half of the entries, for all promotions together; further ones do not come.
        When it ends, statistics and events count it as a `lookup` that found its leading keys that are ready; so call
        one of the two per request. Without tiers it has ended on return, with the leading keys that are ready.

        Args:
            keys: bytes, no repeats, in the order of a request; may be all of its keys.
            deadline: seconds from now, after which it ends with the keys that came; None: no limit (over a shared pool
                60). A tier gets half of the time left if tiers after it may have the same keys.
            tenant: whose quota and priority the promoted keys have.
            counted: whether it counts as a lookup of its keys; False for a host that looks them up by `status_of`.

        Raises:
            LayoutError: `keys` repeats a key, or is not a list of bytes.
            ValueError: the cache has no such tenant; `deadline` is not above 0.
            ClosedError: the cache or its engine is closed.
            RuntimeError: called inside another call of the cache, by a policy for example.
        """
        refuse_nested(self._state.lock, "promote")
        weights = self._weights.now
        checked = check_keys(keys, repeats=False, tag=weights.tag)
        return self._promote(checked, weights, deadline, tenant, counted)

    def _promote(
        self, keys: list[bytes], weights: Weights, deadline: float | None, tenant: str, counted: bool
    ) -> Promotion:
        """`promote` for keys of these weights that were checked. The caller is in no call of the cache."""
        from kvoffload.cache.tiering.promotion import Promotion, PromotionRecord

        wait = deadline  # the default of `fetch`, and those of the other arguments, need no check
        if deadline is not None and deadline is not FETCH_DEADLINE:
            wait = to_wait("deadline", deadline)
            if not wait > 0:
                raise ValueError(f"deadline must be seconds above 0 from now, or None, got {deadline!r:.80}")
        if counted is not True:
            flag("counted", counted)
        if tenant != "":
            self._state.pools.tenant(tenant)
        self._check_open()
        until, tiers = None if wait is None else time.monotonic() + wait, self._tiers
        namespace = weights.namespace(tenant) if weights.tag else tenant
        record = PromotionRecord(keys, namespace, until, self._refusing(), self._weights, weights, counted=counted)
        if tiers is None:
            self._records.bring(keys, wait)
            record.end_with_what_is_here(self._records)
        else:
            tiers.promote(record)
        return Promotion(record, tiers, self._load_after)

    def _load_after(self, promotion: Promotion, blocks: Any, after: Any, parts: Any) -> ChainedLoad:
        del blocks, after, parts
        raise TypeError(f"{promotion!r} is of an index, which copies nothing: acquire its keys, and load their slots")

    def tier_statistics(self) -> list[CacheTierStatistics]:
        """Return counts of the work that the cache has given to each of its tiers, in order. Never blocks."""
        if self._asks is not None:
            self._asks.check_process()
        return [] if self._tiers is None else self._tiers.statistics()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until every fetch, load and store that has begun has ended, also one whose job an interrupt has lost:
        its blocks are yours again. Then wait until the keys chosen so far are written to the tiers, durably if a tier
        is durable. It does not wait for keys that a tier does not take, because it fails or is full.

        Returns:
            False if `timeout` seconds in total (None: no limit) have passed, or a tier could not drain; all goes on.

        Raises:
            ClosedError: the cache, if it has tiers, or its engine is closed; or this is a forked child.
            ValueError: `timeout` is no number.
            RuntimeError: called inside another call of the cache or of a tier, or by `on_event` in the tiers' thread.
        """
        self._check_open()
        timeout, tiers = as_timeout(timeout), self._tiers
        self._refusing()("drain")
        end = None if timeout is None else time.monotonic() + timeout
        # The loads first: one of them may be submitted in between, and is then in flight.
        jobs: list[Any] = [*(() if tiers is None else tiers.loads()), *locked(self._records, CacheState.all_in_flight)]
        try:
            wait_until(lambda: all(job.done for job in jobs), timeout, "transfers of a cache")
        except TimeoutError:
            return False
        return tiers is None or tiers.drain(None if end is None else max(0.0, end - time.monotonic()))

    def _refusing(self) -> Callable[[str], None]:
        """Return the function that refuses a call, by its name, if it would wait inside another call."""
        return partial(refuse_nested, self._state.lock) if self._tiers is None else self._tiers.refuse_nested

    def remove(self, keys: Sequence[bytes], *, below: bool = True) -> int:
        """Remove keys of the weights in use: on return they are missing, here and durably in the tiers, until they are
        stored anew. Over a shared pool, for all its members; but if its owner does not answer, or a tier of its fails,
        this returns 0 and raises nothing, and they may still be there.

        A load, store or promotion of them that is going on ends as usual, and does not bring them back. An entry that
        is in use becomes free when its lease, transfer or reservation ends.

        Args:
            below: also from the tiers; else only here.

        Returns:
            How many keys were present or pending here.

        Raises:
            LayoutError: `keys` is not a list of bytes.
            TierError: a tier failed, or did not answer within 60 seconds, so it may still have them. Here and in the
                other tiers they are gone.
            ClosedError: with `below`, the cache has tiers, and it or its engine is closed; nothing has changed.
            RuntimeError: called inside another call of the cache; nothing has changed.
        """
        return self._remove_from_all(list(dict.fromkeys(check_keys(keys, tag=self._weights.now.tag))), below)

    def clear(self, *, below: bool = True) -> int:
        """Remove all keys of all weights, here and, unless `below=False`, in the tiers. Returns how many there were
        here. Processes that share a tier, or the pool, lose its keys, too. Waits, answers and raises (TierError,
        ClosedError, RuntimeError) as `remove` does.
        """
        return self._remove_from_all(None, below)

    def _remove_from_all(self, keys: list[bytes] | None, below: bool) -> int:
        """`keys`: no repeats; None: all."""
        if flag("below", below) and self._tiers is not None:
            self._check_open()
            return self._tiers.remove(keys, lambda: self._remove_from_all(keys, False))
        self._advance()
        return self._records.remove((keys, below))

    def close(self, timeout: float = 10.0) -> bool:
        """Write what the tiers are to get (see `drain`), end promotions with the keys that came, close the tiers.

        Look-ups, reservations and leases go on working; `promote`, `drain`, and `remove` and `clear` unless
        `below=False`, raise ClosedError from then on. Idempotent. Without tiers it does nothing, and returns True.

        Args:
            timeout: seconds in total; writes that have not begun by then are given up, with 0 all.

        Returns:
            Whether everything ended within about `timeout` seconds. If False, calls of a tier hang; their entries are
            kept from other keys, and must stay mapped, until those calls return: call `close` again to ask.

        Raises:
            RuntimeError: with tiers, called inside another call of the cache.
            ValueError: with tiers, `timeout` is no number.
        """
        foreign = self._asks is not None and self._asks.devices[0].foreign  # the threads are in the parent
        return self._tiers is None or foreign or self._tiers.close(timeout)

    # looking ------------------------------------------------------------------------------------------------------

    def statistics(self) -> CacheStatistics:
        """Return counts since the cache was created, and how many keys it, or its shared pool, holds now."""
        self._advance()
        return self._records.statistics()

    def check(self) -> None:
        """Raise AssertionError, whose message says where, unless derived state, and the keys that each policy knows,
        agree with the truth (see GLOSSARY). For tests: it looks at every key.
        """
        self._advance()
        self._records.check(None)

    def __len__(self) -> int:
        return self._records.size()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._describe()})"

    def _describe(self) -> str:
        """Return the state in one line. Takes no lock, so it may be called from anywhere."""
        table = self._state.table
        counts = f"{len(table.pending)} pending, {len(table.leases)} leases"
        if self._pool is not None:
            return f"{counts}; {self._pool}"
        tiers = "" if self._tiers is None else f"; tiers {[below.tier.name for below in self._tiers.tiers]}"
        return f"{len(table)} of {self.capacity} keys, {counts}; {self._state.pools}{tiers}"

    # inner workings -----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Have the engine find out which transfers have ended."""
        if self._asks is not None:
            self._asks.advance()

    def _look(self) -> None:
        assert self._asks is not None, "else the caller does not call this"
        if self._asks.closed:
            raise ClosedError(f"the engine of the cache is closed, so nothing can be loaded: {_AGAIN}")
        self._asks.advance()

    def _check_open(self) -> None:
        closed = self._tiers is not None and self._tiers.closed
        if self._asks is None:
            if closed:
                raise ClosedError("the index is closed: make another one")
            return
        self._asks.check_process()
        if closed or self._asks.closed:
            raise ClosedError(f"the {'cache' if closed else 'engine of the cache'} is closed: {_AGAIN}")
