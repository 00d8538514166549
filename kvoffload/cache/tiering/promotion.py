"""Promotion: leading keys of a request on their way from tiers into slots."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

from kvoffload.cache.engines import CacheStreams, FollowsTransfers, follows_transfers
from kvoffload.cache.entries import ReservationRecord, Status
from kvoffload.cache.pools import RequestRecord
from kvoffload.cache.record_calls import RecordCalls
from kvoffload.cache.reservations import CacheJob, Lease, LoadArguments
from kvoffload.cache.tiering.below import ComputeTime, TierBelow
from kvoffload.cache.tiering.tier import TierJob
from kvoffload.cache.weights import UsedWeights, Weights
from kvoffload.engine.callbacks import Callbacks, Waitable, WhenDone
from kvoffload.errors import ClosedError, MissingKeyError
from kvoffload.internal.waiting import wait_until

_R = TypeVar("_R")
_CALL_AT_ONCE: WhenDone = Callbacks().add  # what follows a promotion without tiers, which has ended when it is made


class Tiers(Protocol):
    """The tiers of a cache, as a promotion uses them; a `TierManager`."""

    when_done: WhenDone
    wake: Callable[[], None]
    compute: ComputeTime


@dataclass(slots=True, eq=False)
class TierGet:
    """A job of one tier that works for a promotion.

    Attributes:
        positions: where the job's keys are among the promotion's.
        others: tiers asked next for keys that this one does not bring.
        deadline: when they are asked, by `time.monotonic`; None: only once the tier has answered.
        left: places in the job of keys whose outcome was not collected yet.
        begun: by `time.monotonic`.
        measured: whether its time was recorded.
    """

    below: TierBelow
    job: TierJob
    positions: list[int]
    others: Sequence[TierBelow]
    deadline: float | None
    left: list[int]
    begun: float
    measured: bool = False

    def late(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline

    def hangs(self, now: float) -> bool:
        return now - self.begun >= self.below.hung and self.below.hangs


class TierIo:
    """One key of a tier's job, which may still write an entry; a `Completion` for the index."""

    __slots__ = ("_job", "_position")

    error = None

    def __init__(self, job: TierJob, position: int) -> None:
        self._job, self._position = job, position

    @property
    def finished(self) -> bool:
        return self._job.outcomes[self._position] is not None


class PromotionRecord:
    """The manager's record of a promotion. Only its thread changes it, except for `cancelled`, `released` and `loads`.

    Attributes:
        deadline: by `time.monotonic`; None: none.
        here: for each key, whether its entry is leased, so that it can be loaded.
        gone: for each key, whether it will not come.
        ready: leading keys that can be loaded.
        records: by position, for keys on their way.
        awaited: positions of keys that another promotion brings, or a transfer stores.
        leases: hold the entries of keys that came, or were there.
        brought: how many of the leased entries tiers have filled.
        refuse_nested: raises RuntimeError inside another call, which must not wait.
        used: the cache's, which change.
        weights: the keys'.
        request: open, whose keys these are.
        tiers: by position, the name of the tier that brought the key.
        ended: whether `ready` is final.
        cancelled: whether the caller wants no more.
        released: whether nothing more is to be leased.
        loads: chained to it, and not submitted yet. Weak, so that a load whose call was interrupted holds nothing.
    """

    def __init__(
        self,
        keys: list[bytes],
        tenant: str,
        deadline: float | None,
        refuse_nested: Callable[[str], None],
        used: UsedWeights,
        weights: Weights,
        *,
        counted: bool = True,
    ) -> None:
        self.refuse_nested = refuse_nested
        self.used, self.weights = used, weights
        self.keys, self.tenant, self.deadline, self.counted = keys, tenant, deadline, counted
        self.request: RequestRecord | None = None
        self.tiers: dict[int, str] = {}
        self.here = bytearray(len(keys))
        self.gone = bytearray(len(keys))
        self.ready = self.brought = 0
        self.records: dict[int, ReservationRecord] = {}
        self.awaited: list[int] = []
        self.gets: list[TierGet] = []
        self.leases: list[Lease] = []
        self.loads: set[weakref.ref[PromotedLoad[Any]]] = set()
        self.ended = False
        self.cancelled = self.released = False

    def end_with_what_is_here(self, records: RecordCalls, least: int = 0) -> bool:
        """Hold the keys that are in slots, and end with the leading ones. For the caller's thread, without a lock.

        Returns False, without having ended, if fewer than `least` lead: one was evicted since the caller looked.
        """
        statuses, lease = records.hold_ready((self.keys, True))
        if lease is not None:
            self.leases.append(lease)
        ready = next((at for at, status in enumerate(statuses) if status is not Status.HIT), len(statuses))
        if ready < least:
            return False
        self.ready = ready
        self.count(records)
        self.end()
        return True

    def count(self, records: RecordCalls) -> None:
        """Count the promotion as a lookup. Before `end`: whoever waits for that finds it counted."""
        if self.counted:
            in_tiers = [name for position, name in self.tiers.items() if position < self.ready]
            records.note_promotion((self.keys, self.ready, in_tiers))

    def end(self) -> None:
        self.ended = True
        self.release_leases()

    def release_leases(self) -> None:
        """Release the leases if it is released and has ended, and no load needs them. For any thread."""
        if self.released and self.ended and not self.loads:
            for lease in list(self.leases):
                lease.release()
            self.leases = []
            self.brought = 0

    @property
    def outdated(self) -> bool:
        """Whether the cache has other weights by now, so that the keys are no hits."""
        return self.used.now is not self.weights

    @property
    def goes_on(self) -> bool:
        return bool(self.records or self.awaited)

    @property
    def occupied(self) -> int:
        return len(self.records) + self.brought

    def advance_ready(self) -> None:
        while self.ready < len(self.keys) and self.here[self.ready]:
            self.ready += 1

    @property
    def broken(self) -> bool:
        """Whether no key still to come can lengthen `ready`."""
        asked = self.awaited or any(get.left for get in self.gets)
        return not asked or self.ready == len(self.keys) or bool(self.gone[self.ready])


class Promotion(Waitable[int]):
    """Leading keys of a request that tiers bring into entries, as many as come in time. Made by `promote`.

    You can load the keys that came while others are on their way. They are not evicted while you hold the promotion:
    until `release`, the end of a `with` block, or until it becomes garbage. Only `remove` and `clear` of the cache take
    keys out before. A tier that fails shortens the promotion, and raises nothing. Usable from any thread, and
    awaitable: `await promotion` is `wait()` in an asyncio task.

    Attributes:
        keys: as given.
    """

    def __init__(self, record: PromotionRecord, tiers: Tiers | None, load_after: Callable[..., ChainedLoad]) -> None:
        """`tiers`: of the cache, None if it has none; `load` calls `load_after` with the promotion in front."""
        self.keys = record.used.plain(record.keys) if record.used.names else tuple(record.keys)
        self._record = record
        self._tiers = tiers
        self._when_done = _CALL_AT_ONCE if tiers is None else tiers.when_done
        self._load_after = load_after

    @property
    def ready(self) -> int:
        """How many leading keys have come, or were in slots before. You can load them until `release`, except those
        that were removed since: these still count. It only grows, and is final once `done` is True. But once the cache
        uses other weights it is 0, for good.
        """
        return 0 if self._record.outdated else self._record.ready

    @property
    def done(self) -> bool:
        """Whether the promotion has ended: no more keys will come. `finished` is the same."""
        return self._record.ended

    finished = done

    def wait(self, timeout: float | None = None) -> int:
        """Wait until no more keys will come (at the latest soon after the deadline of `promote`, or at the end of the
        cache's `close`), and return `ready`.

        Raises:
            TimeoutError: `timeout` seconds have passed (None: no limit); the promotion goes on.
            ValueError: `timeout` is no number.
            RuntimeError: called inside another call in the same thread, or in `on_event` in a thread of the cache.
            ClosedError: the cache has tiers, and this is a forked child.
        """
        self._record.refuse_nested("wait")
        wait_until(lambda: self._record.ended, timeout, f"a promotion of {len(self.keys)} keys")
        return self.ready

    def load(self, blocks: Any, *, after: Any = None, parts: Any = None) -> ChainedLoad:
        """Load the leading keys that came, once the promotion has ended. Returns at once; `wait` of the result returns
        the keys that were loaded, perhaps none, or raises the errors of what follows.

        A thread of the cache (without tiers, this call) submits the load then, as `BlockCache.load` would; no stream
        waits for a tier.

        Args:
            blocks: target ids for all keys, as for `BlockCache.load`. Leave these blocks alone until the load has
                ended; the blocks from the first missing key on are not written.
            after, parts: as for `BlockCache.load`. If `after` is a stream, the load follows the work that is on it when
                the load is submitted, perhaps long after this call.

        Raises:
            ClosedError: the promotion was released, the cache or its engine is closed, or this is a forked child.
            TypeError: it is of a `CacheIndex`, which copies nothing.
            LayoutError, and the errors of `BlockCache.load` for bad arguments. Nothing has happened then. But repeated
                `blocks`, or a stream that CUDA does not know, may be refused only later: then `wait` raises that.
        """
        if self._record.released:
            raise ClosedError("the promotion has been released: load its keys by cache.load")
        return self._load_after(self, blocks, after, parts)

    def cancel(self) -> None:
        """Bring no more keys; keys that came stay, until `release`. Returns at once. The promotion is `done` soon: it
        does not wait for calls of a tier that have begun, whose entries stay reserved until they return.
        """
        self._record.cancelled = True
        if self._tiers is not None:
            self._tiers.wake()

    def release(self) -> None:
        """Bring no more keys, and let those that came be evicted. Returns at once: calls of a tier that have begun keep
        their entries until they return; what they bring is dropped. Idempotent.

        A `load` of it that waits is not cancelled: it loads the keys that came so far, which stay until it has ended.
        """
        self._record.released = True
        self._record.release_leases()
        if not self._record.ended:
            self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "done" if self.done else "going on"
        return f"Promotion({self.ready} of {len(self.keys)} keys ready, {state})"


class PromotedLoad(Waitable[_R]):
    """A load that is submitted when the promotion of its keys has ended, and holds them until then.

    Attributes:
        submitted: whether the promotion has ended, and the load was submitted, was empty, or failed to be submitted.
    """

    _owns_promotion = False  # nothing else refers to it: the load is cancelled with it, and releases it

    def __init__(self, promotion: Promotion, arguments: LoadArguments) -> None:
        self._record: PromotionRecord | None = promotion._record
        self._arguments: LoadArguments | None = arguments
        self._tiers, self._when_done = promotion._tiers, promotion._when_done
        self._used, self._weights = promotion._record.used, promotion._record.weights
        self._hits: int | None = None  # what the caller was told
        self._job: CacheJob | None = None
        self._refused: BaseException | None = None  # why it could not be submitted
        self.submitted = False
        loads = promotion._record.loads
        loads.add(weakref.ref(self, loads.discard))

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not: nothing touches the blocks any more. (But if the layout has several groups
        and the load could not be submitted, see `BlockCache.load`.) Asks the GPU as `CacheJob.done` does, which may
        raise ClosedError, and does not wait.
        """
        return self.submitted and (self._job is None or self._job.done)

    @property
    def finished(self) -> bool:
        """Whether it is known to have ended. Does not ask the GPU."""
        return self.submitted and (self._job is None or self._job.finished)

    def _call_when_done(self, callback: Callable[[Any], object]) -> None:
        if self._job is None:
            self._when_done(self, callback)
        else:  # no thread of its own, where there are no tiers
            self._job.jobs[0]._engine.when_done(self, callback)

    def _when_submitted(self, call: str, timeout: float | None = None) -> CacheJob | None:
        """Wait until it is submitted, and return the job, None if no key came. Raises what refused the load."""
        record = self._record  # read once: the thread that submits clears it
        if record is not None:
            record.refuse_nested(call)
        wait_until(lambda: self.submitted, timeout, "a promotion with a load behind it")
        if self._refused is not None:
            raise self._refused
        return self._job

    def _loaded(self, timeout: float | None) -> tuple[bytes, ...]:
        """Wait until it has ended, and return the keys that were loaded."""
        job = self._when_submitted("wait", timeout)
        if job is None:
            return ()
        job.wait(timeout)
        return job.keys[: self._told(job)]

    def _told(self, job: CacheJob | None) -> int:
        """Return the hits for the caller, always the same: none, if the cache used other weights at the first time."""
        if self._hits is None:
            self._hits = 0 if job is None or self._used.now is not self._weights else len(job.keys)
        return self._hits

    # for the manager ----------------------------------------------------------------------------------------------

    def _submit(self, load: Callable[[LoadArguments], CacheJob] | None) -> None:
        """If the promotion has ended, load the keys that came by `load`. None: the cache is gone."""
        record, arguments, owns = self._record, self._arguments, self._owns_promotion
        if record is None or arguments is None or not (record.ended or load is None):
            return
        try:
            if owns and self._tiers is not None and record.ready < len(record.keys):
                self._tiers.compute.missed(record.keys[record.ready :])
            if record.ready and load is not None and not record.outdated and not (owns and record.cancelled):
                self._job = load(arguments.leading(record.ready))
        except BaseException as error:  # noqa: BLE001  # `wait` raises it
            if not (owns and isinstance(error, MissingKeyError)):  # removed since: a fetch then has no hits
                self._refused = error
        self._record = self._arguments = self._tiers = None
        self.submitted = True
        record.loads.discard(weakref.ref(self))
        record.released |= owns
        record.release_leases()


class ChainedLoad(PromotedLoad[tuple[bytes, ...]]):
    """A load that follows a promotion, and holds its keys until it is submitted. Made by `Promotion.load`. Usable from
    any thread, and awaitable: `await load` is `wait()` in an asyncio task.

    It goes on if you drop it. For a stream to wait for it, poll `submitted`; once that is True, call `job.order_before`
    if there is a `job`.

    Attributes:
        submitted: whether the promotion has ended, and the load was submitted, was empty, or failed to be submitted.
    """

    @property
    def job(self) -> CacheJob | None:
        """The load, once submitted. It stays None if no key came, the cache used other weights by then, or submitting
        failed; perhaps also if the cache was closed first.
        """
        return self._job

    @property
    def error(self) -> BaseException | None:
        """Why it could not be submitted, or None. (If copying fails, see `job.error`.)"""
        return self._refused

    def wait(self, timeout: float | None = None) -> tuple[bytes, ...]:
        """Wait until the promotion and the load have ended, and return the leading keys that were loaded: () if none
        came, or if the cache uses other weights by now. If the cache is closed meanwhile, these are the keys that had
        come, or none.

        Args:
            timeout: seconds for the promotion, and again for each job of the load (one for each group). None: no limit.

        Raises:
            TransferError: the load failed; its target blocks hold nothing of use. With a `timeout`, they may still be
                written until `done`.
            TimeoutError: the promotion, or then a job of the load, took more than `timeout` seconds; all go on.
            ValueError: `timeout` is no number.
            RuntimeError: called inside another call in the same thread.
            ClosedError: this is a forked child.
            The errors of `BlockCache.load`, if it could not be submitted, such as MissingKeyError for a key that was
                removed meanwhile. Nothing is loaded then; with several groups, see there.
        """
        return self._loaded(timeout)


class FetchJob(PromotedLoad[int]):
    """Keys on their way to blocks, from wherever they are. Made by `BlockCache.fetch`. Usable from any thread, and
    awaitable: `await job` is `wait()` in an asyncio task.

    The blocks of the first `hits` keys hold their bytes once `wait` has returned, or for work on a stream after
    `order_before`. What is in the other blocks is undefined, and in all of them if `wait` raises.

    If you drop it, it goes on. Until `done`, or the end of `cache.drain()`, use its blocks only in work queued after
    `order_before`.

    Attributes:
        keys: as given.
        submitted: whether `hits` is known, so that neither it nor `order_before` waits for a tier.
    """

    _owns_promotion = True

    def __init__(self, promotion: Promotion, arguments: LoadArguments) -> None:
        super().__init__(promotion, arguments)
        self.keys, self._promotion = promotion.keys, promotion

    @property
    def error(self) -> BaseException | None:
        """Why the load could not be submitted, or failed. None: no failure is known yet. `wait` raises it."""
        return self._refused if self._job is None else self._job.error

    @property
    def hits(self) -> int:
        """How many leading keys were found, and are being loaded; compute the rest. Waits until that is known: for
        tiers, and for keys that a store or another fetch brings, until the deadline at most. It does not wait if there
        are no tiers, or if all keys are ready in slots. It is 0 also in the cases that
        `wait` names.

        Raises:
            The errors of `wait`, as far as they are known.
            RuntimeError: called inside another call in the same thread while it would wait.
        """
        return self._told(self._loading("hits"))

    def wait(self, timeout: float | None = None) -> int:
        """Wait on the host until the keys are loaded, and return `hits`: 0 also if the job was cancelled before the
        load was submitted, or the cache used other weights when you first asked. If the cache is closed before the load
        is submitted, the keys that had come are loaded, or none.

        Args:
            timeout: seconds for the tiers, and again for each job of the load (one for each group). None: no limit.

        Raises:
            TransferError: the load failed: all blocks are undefined. With a `timeout`, they may still be written until
                `done`.
            TimeoutError: the tiers, or then a job of the load, took more than `timeout` seconds; all goes on.
            ValueError: `timeout` is no number.
            RuntimeError: called inside another call in the same thread.
            ClosedError: this is a forked child.
            The errors of `BlockCache.load`, if it could not be submitted; but no MissingKeyError: then there are no
                hits.
        """
        return len(self._loaded(timeout))

    def order_before(self, stream: CacheStreams | FollowsTransfers, *, part: int | None = None) -> None:
        """Make work that you queue on `stream` from now on start after the load. Like `hits`, it waits on the host
        until the load is submitted (until the deadline of `fetch` at most): no stream ever waits for a tier. Then it
        waits only for copies that are not in the driver's queues yet, up to a second for each device of each job. If
        there are no hits, it does nothing.

        If the load fails later, the stream goes on; `wait` raises its error.

        Args:
            stream: a stream; with a `ShardedEngine`, a list with one for each device. For JAX, which shows no streams,
                the `kvoffload.jax.OwnedCache`: its `arrays` follow the whole load from now on; if you read them before,
                those are deleted, so a step that would not wait for the load raises.
            part: of a load in parts, counted from 0: after this part of every job, and all parts before it.

        Raises:
            CapacityError: after these seconds copies still wait on the host; you may call it again.
            TransferError: the load has failed already, the stream is being captured, or the CUDA context is lost.
            TypeError: `stream` is no stream, or no such list.
            ValueError: there is no such part, or CUDA does not know the stream in this context.
            ClosedError: the device is closed, or this is a forked child.
            RuntimeError: called inside another call in the same thread.
            The errors of `BlockCache.load`, if it could not be submitted.
        """
        job = self._loading("order_before")
        if job is None:
            return
        if follows_transfers(stream):
            stream._follow_transfers()
        else:
            job.order_before(stream, part=part)

    def cancel(self) -> None:
        """Load nothing that is not being loaded already: for a request that has gone. Returns at once. The blocks are
        yours again once the job is `done`, which no longer waits for a tier. A load that was submitted goes on. Keys
        that came from a tier stay in the cache.
        """
        self._promotion.cancel()

    def _loading(self, call: str) -> CacheJob | None:
        """As `_when_submitted`, but raises the error of a failed load, too."""
        job = self._when_submitted(call)
        if job is not None and job.error is not None:
            raise job.error
        return job

    def __repr__(self) -> str:
        state = "done" if self.finished else "loading" if self.submitted else f"{self._promotion.ready} ready"
        return f"FetchJob({len(self.keys)} keys, {state})"
