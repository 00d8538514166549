"""A shared pool in place of host memory of one's own: the replicas of a model on one host share slots and hits.

Each worker joins the pool and copies for itself, into and out of its part of each row. The scheduler joins beside its
workers, as one member with them, and asks the pool's owner for keys and entries. An entry is a chunk of one group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload.cache.entries import LeaseRecord
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.statistics import CacheEvent, CacheStatistics
from kvoffload.cache.tiering import CacheTierStatistics
from kvoffload.layout.layout import KVLayout
from kvoffload.pool.pooled_state import PoolRecordCalls
from kvoffload.pool.shared_pool import SharedPool
from kvoffload.vllm.identity import connector_for, identity_of, layout_digest, note_of

_LONGEST_WAIT = 300.0  # seconds for the owner, which may have to allocate the memory first, and for the workers
_REPORT_SECONDS = 1.0  # between questions for the pool's gauges


class _Rows(NamedTuple):
    """A `RowLayout`: a row has a slot of each worker."""

    fingerprint: bytes
    slot_bytes: int
    num_groups: int


class PoolOfEngine:
    """The pool of kvoffload_pool. Made in every process.

    Args:
        path: of the owner's socket.
        identity: of the weights, see `identity_of`.
    """

    def __init__(self, path: str, config: OffloadingConfig, identity: str | None) -> None:
        why = "with vLLM's own connector other engines would load the bytes of a store that failed"
        self._connector = connector_for("kvoffload_pool", why)
        self._path, self._config, self._identity = path, config, identity
        self._pool: SharedPool | None = None

    def attach(self, layout: KVLayout) -> SharedPool:
        """Join as a worker, whose slots are the result's `host_memory`. Raises errors of `SharedPool.attach`."""
        config, workers = self._config, self._config.parallel.world_size
        identity = identity_of(self._connector, config, self._identity)
        rows = _Rows(layout_digest(config, [note_of(layout)] * workers), layout.slot_bytes, workers)
        engine = (config.engine_id, config.parallel.rank)
        return SharedPool.attach(self._path, rows, identity=identity, engine=engine, timeout=_LONGEST_WAIT)

    def workers_are_there(self) -> bool:
        """Join as the scheduler, if all workers have joined."""
        try:
            self._pool = self._join(0.2)
        except TimeoutError:
            return False
        return True

    @property
    def capacity(self) -> int:
        """Chunks that the pool holds; 0: not known yet."""
        return 0 if self._pool is None else self._pool.capacity

    def promotions(self) -> PooledLookups:
        """Make the lookups of the manager, which joins at its first use, if `workers_are_there` has not."""
        return PooledLookups(lambda: self._pool or self._join(_LONGEST_WAIT))

    def _join(self, timeout: float) -> SharedPool:
        engine, workers = self._config.engine_id, self._config.parallel.world_size
        return SharedPool.beside(self._path, engine, workers, timeout=timeout)


@dataclass(slots=True, eq=False)
class LookupState:
    """State of one request, kept in vLLM's `ReqContext` by its type.

    Attributes:
        owner: several managers may see one context.
        answers: of this step.
        counted: keys that statistics have counted, until its load begins.
    """

    owner: PooledLookups
    answers: dict[OffloadKey, LookupResult] = field(default_factory=dict)
    counted: set[OffloadKey] = field(default_factory=set)


class PooledLookups:
    """Answers the scheduler's lookups from a pool. Only vLLM's scheduler thread uses it.

    vLLM asks key by key, and each question to the owner takes 20 us and more. So at a request's first key in a step the
    owner is asked for all keys of the request in one message, and holds those that are ready until the end of the step,
    in which vLLM begins to load them: no other engine can evict them before, and the load asks nobody.

    HIT_PENDING is the answer for keys that this engine is storing. Those that another engine is storing are a MISS: it
    may have stopped, and no request waits for another engine.

    Args:
        open_pool: joins the pool, at the manager's first use.
    """

    def __init__(self, open_pool: Callable[[], SharedPool]) -> None:
        self._open_pool = open_pool
        self._pool: SharedPool | None = None
        self._active: set[LookupState] = set()
        self._held: list[LeaseRecord] = []  # hits of this step
        self._latest: CacheStatistics | None = None
        self._report_at = 0.0

    def open(self, on_event: Callable[[CacheEvent], None] | None) -> CacheIndex:
        """Join the pool, and open an index over it. `on_event` hears nothing: which keys other engines evict is not
        known here.
        """
        self._pool = self._open_pool()
        self._index = CacheIndex(self._pool)
        return self._index

    def lookup(self, index: CacheIndex, key: OffloadKey, context: ReqContext) -> LookupResult:
        """Return HIT, HIT_PENDING or MISS. Statistics count each key once for a request."""
        state: LookupState | None = context.get_state(LookupState)
        if state is None or state.owner is not self:
            state = LookupState(self)
            context.set_state(state)
        if key not in state.answers:
            self._ask(index, state, key, context)
        result = state.answers[key]
        if result is not LookupResult.HIT_PENDING and key not in state.counted:
            index.records.recorder.note_lookup((key,), int(result is LookupResult.HIT))
            state.counted.add(key)
        return result

    def _ask(self, index: CacheIndex, state: LookupState, key: OffloadKey, context: ReqContext) -> None:
        """Ask for this key, and for all others of the request that vLLM has named so far. A load shares one lease, so
        that must have all that are ready, also if some were asked for before.
        """
        answers, named = state.answers, getattr(context, "_offload_key_positions", ())
        keys: dict[bytes, None] = dict.fromkeys([key, *named])
        self._active.add(state)
        ready, storing = _records(index).hold_each((list(keys), self._held))
        hit, pending, miss = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS
        for each in keys:
            answers[OffloadKey(each)] = hit if each in ready else pending if each in storing else miss

    def source_of(self, key: OffloadKey, context: ReqContext) -> CacheHitSource:
        del key, context
        return CacheHitSource.HOST

    def advance(self) -> None:
        """End a step."""
        for lease in self._held:
            self._index.records.release(lease)
        self._held.clear()
        for state in self._active:
            state.answers.clear()
        self._active.clear()

    def release(self, context: ReqContext) -> None:
        """Count the request's keys anew: it has begun to load, or has finished."""
        state = context.get_state(LookupState)
        if state is not None and state.owner is self:
            state.counted.clear()

    def clear(self, index: CacheIndex) -> None:
        """Give this engine keys of its own, in the same pool: from now on it has no hits of what was stored before, nor
        of what other replicas store.

        vLLM resets for new weights, for example. Nothing tells which weights the other replicas have now: they may
        still store chunks of the old ones. Theirs stay, since for them they are right.
        """
        self.advance()
        _records(index).part(None)

    def statistics(self, index: CacheIndex) -> CacheStatistics:
        """Return statistics at most a second old: vLLM asks in each step, and the owner knows the gauges."""
        now = time.monotonic()
        if self._latest is None or now >= self._report_at:
            self._latest, self._report_at = index.statistics(), now + _REPORT_SECONDS
        return self._latest

    def tier_statistics(self) -> tuple[CacheTierStatistics, ...]:
        return ()

    def close(self) -> None:
        """Leave the pool. What this engine was storing is not used again before its workers have ended."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


def _records(index: CacheIndex) -> PoolRecordCalls:
    assert isinstance(index.records, PoolRecordCalls)
    return index.records
