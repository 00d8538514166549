"""Tiers below the slots of ranks: what two engines store into shared slots comes back through a disk, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Bytes
from tiering import SECONDS, key, keys

import kvoffload
from kvoffload import NO_WAIT, CacheIndex, DeviceBuffer, KVLayout, OffloadEngine, SharedSlots, Status
from kvoffload.testing import poison
from kvoffload.tiers import DiskTier

pytestmark = pytest.mark.timeout(300)

CAPACITY, NUM_BLOCKS = 8, 16


@dataclass
class Rank:
    """An engine over slots that it shares, and the device memory of its blocks."""

    engine: OffloadEngine
    slots: SharedSlots
    planes: list[kvoffload.Plane]

    @property
    def buffer(self) -> DeviceBuffer:
        buffer = self.planes[0].owner
        assert isinstance(buffer, DeviceBuffer)
        return buffer

    def write(self, contents: Sequence[Bytes]) -> None:
        """Give the first blocks these bytes, plane after plane."""
        image = self.buffer.to_numpy()
        for block, content in enumerate(contents):
            for plane, part in zip(self.planes, content.reshape(len(self.planes), -1), strict=True):
                image[self._span(plane, block)] = part
        self.buffer.copy_from(image)

    def read(self, count: int) -> list[Bytes]:
        """The bytes of the first blocks."""
        image = self.buffer.to_numpy()
        return [np.concatenate([image[self._span(plane, block)] for plane in self.planes]) for block in range(count)]

    def _span(self, plane: kvoffload.Plane, block: int) -> slice:
        start = plane.address - self.buffer.address + block * plane.block_stride
        return slice(start, start + plane.block_bytes)


@dataclass
class Server:
    """The index of the scheduler, which maps the slots of the ranks, and the ranks' engines."""

    index: CacheIndex
    ranks: list[Rank]

    def contents(self, rank: int, numbers: Sequence[int]) -> list[Bytes]:
        """What the blocks of these keys hold in a rank."""
        nbytes = sum(plane.block_bytes for plane in self.ranks[rank].planes)
        return [np.random.default_rng([number, rank]).integers(0, 256, nbytes, dtype=np.uint8) for number in numbers]

    def store(self, numbers: Sequence[int]) -> None:
        """Compute these keys in every rank, and store them."""
        with self.index.reserve(keys(numbers)) as reservation:
            chosen = [numbers.index(int(name[3:])) for name in reservation.keys]
            jobs = []
            for place, rank in enumerate(self.ranks):
                rank.write(self.contents(place, numbers))
                jobs.append(rank.engine.store(chosen, reservation.indices, after=NO_WAIT))
            for job in jobs:
                job.wait(SECONDS)

    def load(self, numbers: Sequence[int]) -> None:
        """Promote these keys, load them in every rank, and compare every byte.

        At most half of the slots hold what is promoted, so they are at most so many.
        """
        with self.index.promote(keys(numbers)) as promotion:
            assert promotion.wait(SECONDS) == len(numbers)
            with self.index.acquire(keys(numbers)) as lease:
                for place, rank in enumerate(self.ranks):
                    poison(found := rank.buffer.to_numpy())
                    rank.buffer.copy_from(found)
                    job = rank.engine.load(lease.indices, list(range(len(numbers))), after=NO_WAIT)
                    job.wait(SECONDS)
                    pairs = zip(rank.read(len(numbers)), self.contents(place, numbers), numbers, strict=True)
                    wrong = [number for found, expected, number in pairs if not np.array_equal(found, expected)]
                    assert not wrong, f"rank {place} has wrong bytes of {wrong}"


@contextmanager
def server(device: kvoffload.Device, folder: Path, name: str, **options: Any) -> Iterator[Server]:
    """Two ranks with blocks of other sizes, on one device, and an index over their slots and a disk."""
    folder.chmod(0o700)
    nbytes = 512 if device.simulated else 64 << 10
    with ExitStack() as stack:
        ranks = []
        for place, planes in enumerate((8, 4)):
            memory = device.allocate_planes(planes, block_bytes=nbytes, num_blocks=NUM_BLOCKS)
            layout = KVLayout([memory])
            slots = stack.enter_context(SharedSlots(CAPACITY, layout.slot_bytes))
            slots.offer(f"{name}/{place}")
            engine = OffloadEngine(layout, device=device, host_memory=slots.host_memory, staging_bytes=0)
            rank = Rank(stack.enter_context(engine), slots, memory)
            stack.callback(rank.buffer.close)
            ranks.append(rank)
        pools = []
        for place in range(2):
            with SharedSlots.receive(f"{name}/{place}", timeout=SECONDS) as received:
                pools.append(received.array)
        layout_digest = blake2b(repr([pool.shape for pool in pools]).encode(), digest_size=16).digest()
        tier = DiskTier(folder / "records", nbytes=64 << 20, identity="a model", **options)
        index = CacheIndex(
            len(pools[0]), pools=pools, tiers=[tier], layout=layout_digest, write="through", policy="lru"
        )
        stack.callback(lambda: index.close(SECONDS))
        yield Server(index, ranks)
        index.check()


@pytest.fixture
def name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.node.name} {tmp_path}"


def test_evicted_keys_come_back_from_the_disk_with_their_bytes(
    each_device: kvoffload.Device, tmp_path: Path, name: str
) -> None:
    numbers = list(range(3 * CAPACITY))
    rounds = [numbers[at : at + CAPACITY] for at in range(0, len(numbers), CAPACITY)]
    with server(each_device, tmp_path, name) as bench:
        for each in rounds:
            bench.store(each)
            assert bench.index.drain(SECONDS)
        assert bench.index.status(keys(rounds[0])) == [Status.MISS] * CAPACITY, "evicted by the rounds behind it"
        assert bench.index.locate([*keys(numbers), key(99)]) == ["disk"] * 16 + ["host"] * 8 + ["missing"]
        for at in range(0, len(numbers), CAPACITY // 2):
            bench.load(numbers[at : at + CAPACITY // 2])
        bench.load([21, 3, 12, 8])
        [tier] = bench.index.tier_statistics()
        assert (tier.written, tier.not_written, tier.dropped, tier.not_found) == (len(numbers), 0, 0, 0)
        assert tier.promoted >= len(numbers) - CAPACITY


def test_slots_that_tiers_fill_are_loaded_and_stored_again(
    each_device: kvoffload.Device, tmp_path: Path, name: str
) -> None:
    """The disk reads into registered memory while engines store to other slots of it, and load from others."""
    rng = np.random.default_rng(2)
    with server(each_device, tmp_path, name) as bench:
        known: set[int] = set()
        for _ in range(6 if each_device.simulated else 24):
            new = [int(number) for number in rng.permutation(40)[:4] if number not in known]
            promotion = bench.index.promote(keys(sorted(known)[:2]))
            if new:
                bench.store(new)
            known |= set(new)
            assert promotion.wait(SECONDS) == min(2, len(known - set(new)))
            promotion.release()
            assert bench.index.drain(SECONDS)
            bench.load([int(number) for number in rng.permutation(sorted(known))[:4]])
