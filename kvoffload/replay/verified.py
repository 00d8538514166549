"""A block cache under test: a second engine writes blocks before stores and reads them back after loads.

    store   pattern of the key -> staging slot -> device block -> (the cache) -> slot
    load    poison -> device block;  slot -> (the cache) -> device block -> staging slot -> compared with the pattern

Some loaded blocks are also read back plane by plane with synchronous copies, which do not use the planner.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, ParamSpec, TypeVar

import numpy as np

from kvoffload.cache.block_cache import BlockCache
from kvoffload.cache.entries import Status
from kvoffload.cache.policies import DEFAULT_POLICY, Policy, make_policy
from kvoffload.cache.reservations import CacheJob
from kvoffload.cache.tiering.attaching import WriteName
from kvoffload.cache.tiering.promotion import Promotion
from kvoffload.device.device import Device
from kvoffload.device.pinned import Progress
from kvoffload.device.streams import NO_WAIT
from kvoffload.driver import address_of
from kvoffload.engine.engine import OffloadEngine
from kvoffload.internal.models import ModelGeometry
from kvoffload.internal.patterns import KeyPatterns
from kvoffload.internal.teardown import Undoing
from kvoffload.internal.types import Int64Array
from kvoffload.internal.waiting import wait_until
from kvoffload.layout.layout import KVLayout
from kvoffload.terminal.console import bandwidth
from kvoffload.tiers import Tier

_STAGING_BYTES = 128 << 20
_MAX_STAGING_KEYS = 256
_POISON = 0xA5
_PROMOTION_SECONDS = 30.0
SAMPLE_EVERY = 64  # one loaded block of so many is also read plane by plane

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass
class Counts:
    """Counts of requests served so far; blocks are the cache's, one per key.

    `store_seconds` and `load_seconds` are on the device's clock, added up: where transfers overlap, more than the time
    that passed. `promotion_seconds` (of promotions, from begin to end) and `call_seconds` (inside the cache's calls, by
    request) are the host's. `requests_refused` counts requests with blocks that were not stored, because too few others
    could be evicted.
    """

    requests: int = 0
    requests_refused: int = 0
    blocks_requested: int = 0
    blocks_hit: int = 0
    blocks_stored: int = 0
    bytes_stored: int = 0
    bytes_loaded: int = 0
    verified_blocks: int = 0
    sampled_blocks: int = 0
    corrupt_blocks: int = 0
    blocks_promoted: int = 0
    promotion_seconds: float = 0.0
    store_seconds: float = 0.0
    load_seconds: float = 0.0
    call_seconds: list[float] = field(default_factory=list)


class _Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def call(self, function: Callable[_P, _R], /, *arguments: _P.args, **options: _P.kwargs) -> _R:
        begin = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            self.seconds += time.perf_counter() - begin


class VerifiedCache(Undoing):
    """A `BlockCache` over planes of its own, with every byte of every load checked. A context manager.

    Args:
        longest: keys of the longest request; each lane has device blocks for so many, at most `capacity`.
        in_flight: requests that may be unfinished at a time, each in a lane of its own.
        make_tier: returns a tier for the cache to own, given the bytes of a record. None: no tier.
    """

    def __init__(
        self,
        device: Device,
        geometry: ModelGeometry,
        *,
        capacity: int,
        longest: int,
        blocks_per_key: int = 1,
        policy: str = DEFAULT_POLICY,
        in_flight: int = 1,
        seed: int = 0,
        make_tier: Callable[[int], Tier] | None = None,
        write: WriteName = "admitted",
        progress: Progress | None = None,
    ) -> None:
        self._device = device
        self._factor = blocks_per_key
        self._lanes = in_flight
        self._places = max(1, min(longest, capacity))  # of a lane
        num_blocks = in_flight * self._places * blocks_per_key
        self.layout = KVLayout(
            [
                device.allocate_planes(count, block_bytes=geometry.block_bytes, num_blocks=num_blocks)
                for count in geometry.planes_per_group
            ],
            blocks_per_slot=blocks_per_key,
            dtype="bfloat16",
            tokens_per_block=geometry.tokens_per_block,
            block_axes=("tokens", "heads", "dim"),
        )
        self._groups = range(self.layout.num_groups)
        self.bytes_per_key = geometry.bytes_per_block * blocks_per_key
        # room for copies that hold many operations: each takes places in the streams' queues
        self._batch = max(1, min(self._places, _MAX_STAGING_KEYS, _STAGING_BYTES // self.layout.slot_bytes))
        self._staging = OffloadEngine(self.layout, device=device, num_slots=self._batch + 1)
        self._staging.slots[self._batch] = _POISON
        self.engine = OffloadEngine(
            self.layout, device=device, num_slots=capacity * self.layout.num_groups, progress=progress
        )
        self._may_decline = type(make_policy(policy, capacity)).make_room is not Policy.make_room
        tiers = () if make_tier is None else (make_tier(self.layout.slot_bytes * self.layout.num_groups),)
        self._tiered = bool(tiers)
        self.cache = BlockCache(self.engine, policy=policy, tiers=tiers, write=write)  # type: ignore[arg-type]
        self._patterns = KeyPatterns(self.layout.groups[0].payload_bytes, seed)
        self._random = np.random.default_rng(seed)
        self.counts = Counts()

    def fields(self) -> dict[str, Any]:
        """Return the counts for JSON; on a GPU with the bandwidth of stores and loads on its clock."""
        counts, done = self.counts, self.cache.statistics()
        fields: dict[str, Any] = {
            "blocks_requested": counts.blocks_requested,
            "blocks_hit": counts.blocks_hit,
            "blocks_stored": counts.blocks_stored,
            "blocks_evicted": done.evicted,
            "blocks_declined": done.declined,
            "bytes_stored": counts.bytes_stored,
            "bytes_loaded": counts.bytes_loaded,
            "verified_blocks": counts.verified_blocks,
            "corrupt_blocks": counts.corrupt_blocks,
        }
        if not self._device.simulated:
            fields["store_gb_per_s"] = bandwidth(counts.bytes_stored, counts.store_seconds)
            fields["load_gb_per_s"] = bandwidth(counts.bytes_loaded, counts.load_seconds)
        return fields

    def serve(self, keys: Sequence[bytes]) -> int:
        """Serve one request: load and verify the leading keys that are present, store the rest, touch all. Returns the
        hits.
        """
        before = self.counts.blocks_hit
        for job in self.steps(keys):
            job.wait()
        return self.counts.blocks_hit - before

    def serve_all(self, requests: Sequence[Sequence[bytes]], progress: Progress) -> None:
        """Serve requests in order, up to `in_flight` at a time. `progress`: called with (requests ended, requests in
        all).
        """
        ended = count(1)
        overlap(self.steps, requests, self._lanes, lambda: progress(next(ended), len(requests)))

    def steps(self, keys: Sequence[bytes], lane: int = 0) -> Iterator[CacheJob | Promotion]:
        """Serve one request on the device blocks of a lane. Yields the jobs that it waits for; resume it when they have
        ended. Others may be served meanwhile, on other lanes.
        """
        counts, clock = self.counts, _Clock()
        counts.requests += 1
        counts.blocks_requested += len(keys)
        used = keys[: self.cache.capacity]
        if not used:
            return
        places = lane * self._places + self._random.permutation(self._places)[: len(used)]
        hits = clock.call(self.cache.lookup, used)
        if self._tiered:
            hits = yield from self._promote(used, places, hits, clock)
        elif hits:
            yield from self._load(used[:hits], places[:hits], clock)
        counts.blocks_hit += hits
        yield from self._store(used, places, clock)
        clock.call(self.cache.touch, used)
        counts.call_seconds.append(clock.seconds)

    def _promote(
        self, keys: Sequence[bytes], places: Int64Array, found: int, clock: _Clock
    ) -> Generator[CacheJob | Promotion, None, int]:
        """Load the leading keys that are in slots (`found`, now) or come from the tier; returns how many."""
        begin = time.perf_counter()
        unique = list(dict.fromkeys(keys))
        promotion = clock.call(self.cache.promote, unique, deadline=_PROMOTION_SECONDS)
        try:
            yield promotion
            self.counts.promotion_seconds += time.perf_counter() - begin
            here = set(unique[: promotion.ready])
            hits = next((place for place, key in enumerate(keys) if key not in here), len(keys))
            self.counts.blocks_promoted += max(0, hits - found)
            if hits:
                yield from self._load(keys[:hits], places[:hits], clock)
        finally:
            clock.call(promotion.release)
        return hits

    def _load(self, keys: Sequence[bytes], places: Int64Array, clock: _Clock) -> Iterator[CacheJob]:
        for start in range(0, len(keys), self._batch):
            self._poison(places[start : start + self._batch])
        job = clock.call(self.cache.load, keys, self._per_group(places), after=NO_WAIT)
        yield job
        seconds, nbytes = _finish(job)
        self.counts.load_seconds += seconds
        self.counts.bytes_loaded += nbytes
        for start in range(0, len(keys), self._batch):
            section = slice(start, start + self._batch)
            self._verify(keys[section], places[section])

    def _store(self, keys: Sequence[bytes], places: Int64Array, clock: _Clock) -> Iterator[CacheJob]:
        """Store the keys that are absent and not being stored for another request. The call names all keys, so that no
        key of the request is evicted for another.
        """
        position = {key: index for index, key in reversed(list(enumerate(keys)))}
        unique = list(dict.fromkeys(keys))
        known = zip(unique, self.cache.status(unique), strict=True)
        absent = [key for key, status in known if status is Status.MISS]
        if not absent:
            return
        for start in range(0, len(absent), self._batch):
            chunk = absent[start : start + self._batch]
            self._write(chunk, places[[position[key] for key in chunk]])
        where = places[[position[key] for key in unique]]
        job = clock.call(self.cache.store, unique, self._per_group(where), after=NO_WAIT)
        stored = set(job.keys)
        assert stored <= set(absent), "the cache stores nothing that it holds"
        complete = self._may_decline or len(stored) == len(absent)
        assert complete or self._lanes > 1, "the cache stores all that it did not hold"
        if not complete:  # the rest found no room: other requests pin what could be evicted
            self.counts.requests_refused += 1
        yield job
        seconds, nbytes = _finish(job)
        self.counts.blocks_stored += len(job.keys)
        self.counts.store_seconds += seconds
        self.counts.bytes_stored += nbytes

    # the other side -----------------------------------------------------------------------------------------------

    def _write(self, keys: Sequence[bytes], places: Int64Array) -> None:
        for group in self._groups:
            self._patterns.fill(self._staging.slots[: len(keys)], keys, group)
            slots = np.arange(len(keys))
            self._staging.load(slots, self._blocks(places), group=group, after=NO_WAIT).wait()

    def _poison(self, places: Int64Array) -> None:
        slots = np.full(len(places), self._batch)
        for group in self._groups:
            self._staging.load(slots, self._blocks(places), group=group, after=NO_WAIT).wait()

    def _verify(self, keys: Sequence[bytes], places: Int64Array) -> None:
        wrong: set[int] = set()
        for group in self._groups:
            self._staging.slots[: len(keys)] = ~np.uint8(_POISON)
            self._staging.store(self._blocks(places), np.arange(len(keys)), group=group, after=NO_WAIT).wait()
            wrong.update(self._patterns.wrong(self._staging.slots[: len(keys)], keys, group))
        for index in np.flatnonzero(self._random.integers(0, SAMPLE_EVERY, len(keys)) == 0):
            self.counts.sampled_blocks += 1
            if not self._sample(keys[int(index)], int(places[index])):
                wrong.add(int(index))
        self.counts.verified_blocks += len(keys)
        self.counts.corrupt_blocks += len(wrong)

    def _sample(self, key: bytes, place: int) -> bool:
        """Return whether the blocks of one key are right, read plane by plane and block by block with synchronous
        copies.
        """
        for index, group in enumerate(self.layout.groups):
            found = np.empty(group.payload_bytes, dtype=np.uint8)
            places = zip(group.planes, group.host_offsets.tolist(), group.host_steps.tolist(), strict=True)
            for plane, offset, step in places:
                for sub_block in range(self._factor):
                    begin = offset + sub_block * step
                    address = plane.address + (place * self._factor + sub_block) * plane.block_stride
                    part = found[begin : begin + plane.block_bytes]
                    with self._device.current():
                        self._device.driver.copy_to_host(address_of(part), address, part.nbytes)
            if not np.array_equal(found, self._patterns.expected(key, index)):
                return False
        return True

    def _blocks(self, places: Int64Array) -> Int64Array:
        return (places[:, np.newaxis] * self._factor + np.arange(self._factor)).reshape(-1)

    def _per_group(self, places: Int64Array) -> Any:
        blocks = self._blocks(places)
        return blocks if len(self._groups) == 1 else [blocks] * len(self._groups)

    def close(self) -> None:
        """Close both engines, and the tier. Idempotent."""
        self.cache.close()
        self._patterns.close()
        self.engine.close()
        self._staging.close()


def _finish(job: CacheJob) -> tuple[float, int]:
    results = job.wait()
    return sum(result.seconds for result in results), sum(result.nbytes for result in results)


# several requests at a time -------------------------------------------------------------------------------------------


def overlap(
    start: Callable[[Any, int], Iterator[Any]], requests: Iterable[Any], lanes: int, ended: Callable[[], None]
) -> None:
    """Start requests in order, at most `lanes` at a time, and resume each when the job that it waits for has ended.

    Args:
        start: called with a request and the number of a free lane; yields the jobs that the request waits for: objects
            with `done`.
        ended: called after each request.
    """
    free = deque(range(lanes))
    waiting: dict[int, tuple[Iterator[Any], Any]] = {}  # by lane, a request and the job that it waits for
    remaining = iter(requests)

    def resume(lane: int, steps: Iterator[Any]) -> None:
        job = next(steps, None)
        if job is not None:
            waiting[lane] = steps, job
        else:
            free.append(lane)
            ended()

    while True:
        beginning = list(islice(remaining, len(free)))
        for request in beginning:
            lane = free.popleft()
            resume(lane, start(request, lane))
        if waiting:
            wait_until(lambda: any(job.done for _, job in waiting.values()), None, "a request of the replay")
            for lane in [lane for lane, (_, job) in waiting.items() if job.done]:
                resume(lane, waiting.pop(lane)[0])
        elif not beginning:
            return
