"""BlockCache: keys to slots of an engine's pool.

A key becomes visible to `lookup` after its copy has completed, never before; a store that fails is never visible. A
slot is given to another key only when no transfer uses it. Where a call raises, nothing has changed.

    free ──store──> pending ──copy ended──> ready ──evicted──> free
                       └──copy failed──────────────────────────^
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from kvoffload.cache_jobs import CacheJob, CacheTransfer
from kvoffload.engine import OffloadEngine
from kvoffload.errors import CapacityError, LayoutError, MissingKeyError
from kvoffload.jobs import Job, Listener
from kvoffload.layout import Int64Array, as_ids
from kvoffload.metrics import CacheStatistics
from kvoffload.plan import Direction
from kvoffload.policies import Policy, make_policy

_owners: weakref.WeakKeyDictionary[OffloadEngine, weakref.ref[BlockCache]] = weakref.WeakKeyDictionary()


class _Entry:
    """One key's place: entry `index` owns slot `index * num_groups + g` of group `g`."""

    __slots__ = ("index", "pending", "pins")

    def __init__(self, index: int) -> None:
        self.index = index
        self.pending = True  # being stored
        self.pins = 0  # loads that have not ended

    @property
    def movable(self) -> bool:
        return not self.pending and self.pins == 0


class BlockCache:
    """A prefix cache over the slots of an engine, which it takes for itself. Usable from any thread.

    A key stands for `blocks_per_slot` blocks of every group of the layout. With several groups it takes one slot for
    each, and `blocks` is a sequence with one list of ids per group.

    Args:
        engine: its slots must not be used otherwise.
        policy: "lru", or an object with the methods of `policies.Policy`.

    Raises:
        CapacityError: the engine has fewer slots than groups, or belongs to another cache.
    """

    def __init__(self, engine: OffloadEngine, policy: str | Policy = "lru") -> None:
        self._engine = engine
        self._lock = engine.lock
        self._groups = engine.layout.num_groups
        self.capacity = engine.num_slots // self._groups
        if self.capacity == 0:
            raise CapacityError(f"{engine.num_slots} slots hold no key of {self._groups} groups; raise num_slots")
        if self._groups > engine.max_in_flight:
            raise CapacityError(
                f"a key of {self._groups} groups takes as many jobs, but max_in_flight is {engine.max_in_flight}"
            )
        self._policy = make_policy(policy)
        self._claim_slots()
        self._entries: dict[bytes, _Entry] = {}
        self._free: list[int] = []  # given up before
        self._doomed: set[int] = set()  # never published, and still being written
        self._never_used = 0  # entries from here on have never been used
        self._lookups = self._hits = self._stored = self._loaded = self._evicted = self._failed = 0

    def _claim_slots(self) -> None:
        with self._lock:
            other = _owners.get(self._engine, lambda: None)()
            if other is not None:
                raise CapacityError(
                    "the engine's slots belong to another BlockCache: delete that one first, or make a second engine"
                )
            _owners[self._engine] = weakref.ref(self)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are present and ready. Changes no recency: see `touch`."""
        _check_keys(keys)
        self._engine.advance()
        with self._lock:
            found = 0
            for key in keys:
                entry = self._entries.get(key)
                if entry is None or entry.pending:
                    break
                found += 1
            self._lookups += len(keys)
            self._hits += found
            return found

    def store(self, keys: Sequence[bytes], blocks: Any, after: Any = None) -> CacheJob:
        """Store the blocks of those keys that are neither present nor on their way; they can be loaded once it has
        ended.

        Never-used slots go first, then the policy gives up keys: as many as are needed or none. Keys among `keys`, keys
        being stored and keys being loaded are not given up. New keys count as used, from last to first.

        Args:
            keys: bytes, no repeats. May be a whole request's keys: what is present is skipped, and kept.
            blocks: source ids, `blocks_per_slot` per key in the order of the keys (for each group).
            after: as for `OffloadEngine.store`.

        Raises:
            CapacityError: not enough keys can be given up, or the engine has no room for the transfer.
            LayoutError, and what `OffloadEngine.store` raises. Nothing has changed in any of these cases, but for one:
                if the driver fails between two groups of one call, the keys given up for it are gone.
        """
        per_group = self._block_ids(keys, blocks)
        if len(set(keys)) != len(keys):
            raise LayoutError("keys repeats a key; each key of a store must be given once")
        self._engine.advance()
        with self._lock:
            new = [position for position, key in enumerate(keys) if key not in self._entries]
            if not new:
                return CacheJob((), ())
            self._engine.check_room(self._groups)
            victims = self._victims(len(new), set(keys))
            never_used, drawn = self._never_used, self._draw(len(new) - len(victims))
            indices = [self._entries[key].index for key in victims] + drawn
            entries = {keys[position]: _Entry(index) for position, index in zip(new, indices, strict=True)}
            transfer = CacheTransfer(partial(self._store_ended, entries))
            try:
                jobs = [
                    self._submit(Direction.STORE, group, list(entries.values()), ids[new].reshape(-1), after, transfer)
                    for group, ids in enumerate(per_group)
                ]
            except BaseException:
                if transfer.any_boarded:  # those slots are spent: they become free when the copies into them have ended
                    self._evict(victims)
                    self._doomed.update(indices)
                    transfer.submitted(failed=True)
                else:
                    self._undraw(drawn, never_used)
                raise
            self._evict(victims)
            self._publish(entries)
            transfer.submitted()
            return CacheJob(tuple(entries), tuple(jobs))

    def load(self, keys: Sequence[bytes], blocks: Any, after: Any = None) -> CacheJob:
        """Load the blocks of keys that are all present and ready. Until it has ended they are not given up.

        Counts as a use of the keys, from last to first: a prefix stays longer than what needs it.

        Args:
            keys: bytes; repeats are legal.
            blocks: target ids, `blocks_per_slot` per key in the order of the keys (for each group), no repeats.
            after: as for `OffloadEngine.load`.

        Raises:
            MissingKeyError: a key is absent or not ready.
            LayoutError, and what `OffloadEngine.load` raises. Nothing has changed in any of these cases.
        """
        per_group = self._block_ids(keys, blocks)
        self._engine.advance()
        with self._lock:
            entries = [self._ready_entry(position, key) for position, key in enumerate(keys)]
            if not entries:
                return CacheJob((), ())
            self._engine.check_room(self._groups)
            transfer = CacheTransfer(partial(self._load_ended, entries))
            for entry in entries:
                entry.pins += 1
            try:
                jobs = [
                    self._submit(Direction.LOAD, group, entries, ids.reshape(-1), after, transfer)
                    for group, ids in enumerate(per_group)
                ]
            except BaseException:
                transfer.submitted(failed=True)
                raise
            transfer.submitted()
            self.touch(keys)
            return CacheJob(tuple(keys), tuple(jobs))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note a use of those keys that are present, from last to first, so that the first is the most recent.

        Call it once per request, at its end, with all of its keys: then recency follows requests, not the order in
        which copies happened to complete.
        """
        _check_keys(keys)
        self._engine.device.check_process()
        with self._lock:
            for key in reversed(keys):
                if key in self._entries:
                    self._policy.touch(key)

    def statistics(self) -> CacheStatistics:
        """Counts now and since the cache was made."""
        self._engine.advance()
        with self._lock:
            entries = self._entries.values()
            return CacheStatistics(
                capacity=self.capacity,
                resident=sum(not entry.pending for entry in entries),
                pending=sum(entry.pending for entry in entries),
                pinned=sum(entry.pins > 0 for entry in entries),
                lookups=self._lookups,
                hits=self._hits,
                stored=self._stored,
                loaded=self._loaded,
                evicted=self._evicted,
                failed=self._failed,
            )

    def check(self) -> None:
        """Verify the cache's invariants; meant for tests and for a bad day.

        Raises:
            AssertionError: one does not hold; the message says which.
        """
        self._engine.device.check_process()
        with self._lock:
            used = [entry.index for entry in self._entries.values()] + list(self._doomed)
            every = sorted(used + self._free)
            assert every == list(range(self._never_used)), "every index is used, free or never used, exactly once"
            assert self._never_used <= self.capacity, "no more entries than capacity"
            assert set(self._policy) == set(self._entries), "the policy knows exactly the resident keys"
            assert all(entry.pins >= 0 for entry in self._entries.values()), "pins are counted"
            if self._engine.statistics().in_flight == 0:
                assert all(entry.movable for entry in self._entries.values()), "nothing is held without a transfer"
                assert not self._doomed, "no slot is held without a transfer"

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"BlockCache({len(self._entries)} of {self.capacity} keys, {type(self._policy).__name__})"

    # inner workings, under the lock -------------------------------------------------------------------------------

    def _block_ids(self, keys: Sequence[bytes], blocks: Any) -> list[Int64Array]:
        """Per group an array of shape (keys, blocks_per_slot)."""
        _check_keys(keys)
        layout = self._engine.layout
        lists = [blocks] if self._groups == 1 else list(blocks)
        if len(lists) != self._groups:
            raise LayoutError(f"blocks must hold one list of ids per group ({self._groups}), got {len(lists)}")
        per_group = []
        for group, ids in enumerate(lists):
            name = "blocks" if self._groups == 1 else f"blocks[{group}]"
            array = as_ids(name, ids, layout.groups[group].num_blocks)
            if len(array) != len(keys) * layout.blocks_per_slot:
                raise LayoutError(
                    f"{name} must hold {layout.blocks_per_slot} ids per key, {len(keys) * layout.blocks_per_slot} for "
                    f"{len(keys)} keys, got {len(array)}"
                )
            per_group.append(array.reshape(len(keys), layout.blocks_per_slot))
        return per_group

    def _victims(self, wanted: int, protected: set[bytes]) -> list[bytes]:
        """The keys to give up so that `wanted` entries are to be had; changes nothing."""
        count = wanted - len(self._free) - (self.capacity - self._never_used)
        if count <= 0:
            return []

        def may_go(key: bytes) -> bool:
            return key not in protected and self._entries[key].movable

        victims = self._policy.victims(count, may_go)
        if victims is None:
            raise CapacityError(
                f"{wanted} keys need {count} to be given up, and too few of {len(self._entries)} may go: the others "
                f"are among the keys given, or being stored or loaded (capacity {self.capacity})"
            )
        return victims

    def _draw(self, count: int) -> list[int]:
        """Take `count` entries that hold no key, never-used ones first."""
        fresh = min(count, self.capacity - self._never_used)
        drawn = list(range(self._never_used, self._never_used + fresh))
        self._never_used += fresh
        return drawn + [self._free.pop() for _ in range(count - fresh)]

    def _undraw(self, drawn: list[int], never_used: int) -> None:
        """Put back what `_draw` gave when `_never_used` was `never_used`."""
        recycled = drawn[self._never_used - never_used :]
        self._free.extend(reversed(recycled))
        self._never_used = never_used

    def _evict(self, victims: list[bytes]) -> None:
        for key in victims:
            del self._entries[key]
            self._policy.remove(key)
        self._evicted += len(victims)

    def _publish(self, entries: dict[bytes, _Entry]) -> None:
        """Make stored entries known, the first as the most recently used; `lookup` sees them when they are ready."""
        for key in reversed(entries):
            self._entries[key] = entries[key]
            self._policy.insert(key)

    def _store_ended(self, entries: dict[bytes, _Entry], failed: bool) -> None:
        """Nothing on the GPU touches the slots of these entries any more."""
        for key, entry in entries.items():
            entry.pending = False
            if entry.index in self._doomed:
                self._doomed.remove(entry.index)
                self._free.append(entry.index)
            elif failed:
                self._failed += 1
                self._policy.remove(key)
                self._free.append(self._entries.pop(key).index)
            else:
                self._stored += 1

    def _load_ended(self, entries: list[_Entry], failed: bool) -> None:
        for entry in entries:
            entry.pins -= 1
        self._loaded += 0 if failed else len(entries)

    def _ready_entry(self, position: int, key: bytes) -> _Entry:
        entry = self._entries.get(key)
        if entry is None or entry.pending:
            state = "not in the cache" if entry is None else "still being stored"
            raise MissingKeyError(f"keys[{position}] ({key.hex()[:16]}) is {state}; load only what lookup() found")
        return entry

    def _submit(
        self,
        direction: Direction,
        group: int,
        entries: list[_Entry],
        blocks: Int64Array,
        after: Any,
        listener: Listener,
    ) -> Job:
        slots = np.array([entry.index for entry in entries], dtype=np.int64) * self._groups + group
        return self._engine.submit(direction, blocks, slots, group=group, after=after, listener=listener)


def _check_keys(keys: Sequence[bytes]) -> None:
    """Raise LayoutError unless `keys` is a sequence of bytes."""
    if isinstance(keys, bytes | str):
        raise LayoutError(f"keys must be a list of keys, got one: {keys!r:.80}")
    for position, key in enumerate(keys):
        if not isinstance(key, bytes):
            raise LayoutError(f"keys[{position}] must be bytes, got {key!r:.80}")
