"""Rigs for tests of BlockCache: a simulated device, planes with numbered blocks, an engine, and tiers below."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from helpers import COPY_ENGINE_ONLY, Bytes, simulated
from tier_classes import DictTier

import kvoffload
from kvoffload import NO_WAIT, KVLayout, OffloadEngine
from kvoffload.cache.block_cache import BlockCache
from kvoffload.cache.tiering.tier_manager import TierManager
from kvoffload.driver import address_of
from kvoffload.internal.types import UInt8Array
from kvoffload.layout.coding import CodecName
from kvoffload.tiers import Tier, TierCapabilities, TierJob, TierStatistics

SECONDS = 20.0  # that anything may take
DESCRIBED: dict[str, Any] = {"dtype": "uint8", "tokens_per_block": 4, "block_axes": ("tokens",)}


def aligned(entries: int, nbytes: int = 4096) -> UInt8Array:
    """Memory of slots, as shared memory has it: from a multiple of 4096 on."""
    raw = np.zeros(entries * nbytes + 4096, np.uint8)
    start = -raw.__array_interface__["data"][0] % 4096
    return raw[start : start + entries * nbytes].reshape(entries, nbytes)


def key(number: int) -> bytes:
    return b"key %12d" % number


def keys(numbers: Iterable[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def until(condition: Callable[[], Any], what: str = "it") -> None:
    """Wait for another thread."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what} has not happened in {SECONDS} seconds"
        time.sleep(1e-3)


@dataclass
class Bench:
    """A device with planes, and what is over them. A block of number `n` holds `content(n)` in all planes."""

    device: kvoffload.Device
    planes: list[list[kvoffload.Plane]]
    engine: OffloadEngine
    cache: BlockCache[OffloadEngine]

    @property
    def manager(self) -> TierManager:
        found = self.cache._tiers
        assert found is not None
        return found

    def content(self, number: int, nbytes: int, salt: int) -> Bytes:
        """As `content_of`; with a codec, exponents that it holds."""
        found = content_of(number, nbytes, salt)
        if self.engine.layout.codecs[0] == "raw":
            return found
        return (found.view(np.uint16) & np.uint16(0x83FF) | np.uint16(0x3C00)).view(np.uint8)

    def write(self, block: int, number: int) -> None:
        with self.device.current():
            for group, planes in enumerate(self.planes):
                for place, plane in enumerate(planes):
                    content = self.content(number, plane.block_bytes, 10 * group + place)
                    at = plane.address + block * plane.block_stride
                    self.device.driver.copy_to_device(at, address_of(content), plane.block_bytes)

    def spoil(self, block: int) -> None:
        """Write bytes that no codec holds."""
        for plane in self.planes[0]:
            content = np.random.default_rng(block).integers(0, 256, plane.block_bytes, dtype=np.uint8)
            with self.device.current():
                at = plane.address + block * plane.block_stride
                self.device.driver.copy_to_device(at, address_of(content), plane.block_bytes)

    def holds(self, block: int, number: int) -> bool:
        """Whether every byte of a block is that of the content with this number."""
        return all(
            np.array_equal(self.read(plane, block), self.content(number, plane.block_bytes, 10 * group + place))
            for group, planes in enumerate(self.planes)
            for place, plane in enumerate(planes)
        )

    def read(self, plane: kvoffload.Plane, block: int) -> Bytes:
        found = np.empty(plane.block_bytes, np.uint8)
        with self.device.current():
            at = plane.address + block * plane.block_stride
            self.device.driver.copy_to_host(address_of(found), at, plane.block_bytes)
        return found

    def blocks(self, ids: Sequence[int]) -> Any:
        """For the cache's calls."""
        return list(ids) if len(self.planes) == 1 else [list(ids)] * len(self.planes)

    def store(self, numbers: Sequence[int]) -> None:
        """Store keys with the contents of their numbers, from blocks 0 on, and wait."""
        for block, number in enumerate(numbers):
            self.write(block, number)
        self.cache.store(keys(numbers), self.blocks(range(len(numbers))), after=NO_WAIT).wait(SECONDS)

    def written(self, numbers: Sequence[int]) -> None:
        """Store keys, have the tiers take them, and remove them from the slots alone."""
        for start in range(0, len(numbers), self.cache.capacity):
            part = numbers[start : start + self.cache.capacity]
            self.store(part)
            assert self.cache.drain(SECONDS)
            self.cache.clear(below=False)

    def check_loaded(self, numbers: Sequence[int]) -> None:
        """Load keys that are in slots, and compare every byte."""
        blocks = list(range(len(numbers)))
        for block in blocks:
            self.write(block, 16_777_213)
        self.cache.load(keys(numbers), self.blocks(blocks), after=NO_WAIT).wait(SECONDS)
        wrong = [number for block, number in zip(blocks, numbers, strict=True) if not self.holds(block, number)]
        assert not wrong, f"wrong bytes: {wrong}"


def content_of(number: int, nbytes: int, salt: int = 0) -> Bytes:
    """`nbytes` that differ from those of all other numbers below 2**24."""
    content = np.arange(nbytes, dtype=np.uint32) * (2 * salt + 3) + np.uint32((number * 7919 + salt) % (1 << 32))
    content = (content >> 3).astype(np.uint8)
    content[:4] = np.frombuffer(number.to_bytes(4, "little"), np.uint8)
    return content


@contextmanager
def tiered(
    *tiers: Tier,
    capacity: int = 8,
    seed: int = 0,
    groups: int = 1,
    blocks: int = 32,
    on_event: Any = None,
    policy: Any = "lru",
    write: Any = "through",
    device: kvoffload.Device | None = None,
    block_bytes: int = 64,
    codec: CodecName = "raw",
    **options: Any,
) -> Iterator[Bench]:
    """A cache over some tiers; closed afterwards. `options` are the cache's. Without tiers: over a DictTier;
    without a device: a simulated one. In planes of group g a block has `(g + 1) * block_bytes`, with a codec
    `(g + 1) * 512`.
    """
    device = device or simulated(seed, "no-batch")
    described, how = DESCRIBED, COPY_ENGINE_ONLY
    if codec != "raw":
        block_bytes, described, how = 512, {**DESCRIBED, "dtype": "bfloat16"}, {"staging_bytes": 1 << 16}
    with device:
        planes = [
            device.allocate_planes(2, block_bytes=block_bytes * (group + 1), num_blocks=blocks)
            for group in range(groups)
        ]
        layout = KVLayout(planes, codec=codec, **described)
        engine = OffloadEngine(layout, device=device, num_slots=capacity * groups, **how)
        with engine:
            cache = BlockCache(
                engine, policy=policy, tiers=list(tiers) or [DictTier()], on_event=on_event, write=write, **options
            )
            try:
                yield Bench(device, planes, engine, cache)
                if not engine.closed:
                    cache.check()
            finally:
                for tier in tiers:
                    heal = getattr(tier, "heal", None) or getattr(tier, "permit", None)
                    if heal is not None:
                        heal()
                assert cache.close(SECONDS)


class RaisingTier(Tier):
    """Raises in every method that `raising` names; the others do nothing, well."""

    def __init__(self, raising: set[str], error: Callable[[], BaseException] = lambda: OSError("broken")) -> None:
        self.name = "raising"
        self.capabilities = TierCapabilities(durable=False, shared=False, local_index=True)
        self.raising = raising
        self.error = error
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.raising:
            raise self.error()

    def attach(self, pools: Sequence[UInt8Array], layout: bytes | None) -> None:  # noqa: ARG002
        self._call("attach")

    def put(self, keys: Any, entries: Any, **options: Any) -> TierJob:  # noqa: ARG002
        self._call("put")
        return TierJob(keys, entries).settle_waiting(kvoffload.tiers.Outcome.DONE)

    def get(self, keys: Any, entries: Any, **options: Any) -> TierJob:  # noqa: ARG002
        self._call("get")
        return TierJob(keys, entries).settle_waiting(kvoffload.tiers.Outcome.MISSING)

    def exists(self, keys: Any, **options: Any) -> TierJob:  # noqa: ARG002
        self._call("exists")
        return TierJob(keys).settle_waiting(kvoffload.tiers.Outcome.MISSING)

    def remove(self, keys: Any, **options: Any) -> TierJob:  # noqa: ARG002
        self._call("remove")
        return TierJob(keys).settle_waiting(kvoffload.tiers.Outcome.DONE)

    def clear(self, **options: Any) -> TierJob:  # noqa: ARG002
        self._call("clear")
        return TierJob([b""]).settle_waiting(kvoffload.tiers.Outcome.DONE)

    def contains(self, keys: Any) -> list[bool]:
        self._call("contains")
        return [True] * len(keys)

    def statistics(self) -> TierStatistics:
        self._call("statistics")
        return TierStatistics()

    def drain(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        self._call("drain")
        return True

    def close(self, timeout: float = 10.0) -> bool:  # noqa: ARG002
        self._call("close")
        return True
