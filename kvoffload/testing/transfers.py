"""Transfers byte by byte: patterns, a naive transfer, leak checks, the conformance of copiers."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from kvoffload.device.buffers import DeviceBuffer
from kvoffload.device.device import Device
from kvoffload.device.streams import NO_WAIT
from kvoffload.engine.engine import OffloadEngine
from kvoffload.errors import LayoutError
from kvoffload.internal.checks import at_least
from kvoffload.internal.types import UInt8Array
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Plane, SlotOrder
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import COPIERS, CopierName

POISON = 0xB7  # what `poison` writes: neither 0 nor what fresh or freed simulated memory holds


# bytes ----------------------------------------------------------------------------------------------------------------


def pattern(key: object, nbytes: int) -> UInt8Array:
    """Return a new array, uint8, (nbytes,), whose bytes depend only on `repr(key)`: the same in every process and on
    every machine.

    Different keys give unrelated bytes, so that a block in the wrong place shows at once. A longer array
    for the same key begins with the bytes of the shorter one. ValueError: `nbytes` is no integer of at least 0.
    """
    digest = hashlib.shake_128(repr(key).encode()).digest(at_least("nbytes", nbytes, 0))
    return np.frombuffer(digest, dtype=np.uint8).copy()


def poison(array: UInt8Array, *, value: int = POISON) -> None:
    """Overwrite a host array with one byte, 0 to 255, in place, so that you can tell which bytes later transfers leave
    unwritten. It waits for no transfer: call it while none uses the array.
    """
    array[...] = value


def scramble(buffer: DeviceBuffer, seed: int) -> UInt8Array:
    """Fill GPU memory with random bytes, and return a host copy: uint8, (nbytes,). They are there when this returns.

    It waits for no transfer and no stream but the legacy default stream: if others use the memory, wait for them first.
    The same seed gives the same bytes. Raises ClosedError and DriverError as `DeviceBuffer.copy_from` does.
    """
    content = np.random.default_rng(seed).integers(0, 256, buffer.nbytes, dtype=np.uint8)
    buffer.copy_from(content)
    return content


# the reference --------------------------------------------------------------------------------------------------------


def naive_transfer(
    layout: KVLayout,
    direction: Direction | str,
    *,
    blocks: Sequence[int],
    slots: Sequence[int],
    memory: Mapping[int, UInt8Array],
    pool: UInt8Array,
    group: int = 0,
    first_sub_block: int = 0,
) -> None:
    """Make a transfer's copies in host arrays, in place, by a loop over blocks and planes: the reference for transfers.

    Args:
        layout: gives the addresses and sizes of blocks. It must have no codec.
        direction: "store" copies from `memory` to `pool`, "load" back; it is not checked.
        blocks, slots: block numbers, and the slots for them, `layout.blocks_per_slot` blocks in each, in order. Repeats
            are not refused, and a negative slot counts from the end of `pool`.
        memory: device memory: for the base address of each allocation its bytes, uint8, 1-D.
        pool: the slots, uint8, (num_slots, layout.slot_bytes).
        group: the layout's group that the blocks belong to.
        first_sub_block: place of the first block in the first slot.

    Raises:
        LayoutError: the layout has a codec.
        AssertionError: `memory` lacks bytes of a block.
        IndexError: a slot does not exist, or there are too few. In these two cases some bytes may have been copied.
    """
    if any(codec != "raw" for codec in layout.codecs):
        raise LayoutError(f'layout must have codec="raw", got {layout.codecs}: naive transfers copy blocks as they are')
    factor = layout.blocks_per_slot
    for index, block in enumerate(blocks):
        number, sub_block = divmod(first_sub_block + index, factor)
        planes, blocks_are_whole = layout.groups[group].planes, layout.groups[group].slot_order == "block-major"
        start = sub_block * sum(plane.block_bytes for plane in planes) if blocks_are_whole else 0
        for plane in planes:
            on_device = _device_bytes(memory, plane.address + block * plane.block_stride, plane.block_bytes)
            place = start if blocks_are_whole else start + sub_block * plane.block_bytes
            on_host = pool[slots[number], place : place + plane.block_bytes]
            target, source = (on_host, on_device) if direction == Direction.STORE else (on_device, on_host)
            target[:] = source
            start += plane.block_bytes if blocks_are_whole else factor * plane.block_bytes


def _device_bytes(memory: Mapping[int, UInt8Array], address: int, nbytes: int) -> UInt8Array:
    for base, content in memory.items():
        if base <= address and address + nbytes <= base + len(content):
            return content[address - base : address - base + nbytes]
    raise AssertionError(f"{nbytes} bytes at {address:#x} are in none of the allocations given")


class Mirror:
    """Host copies of an engine's slots and of device memory, on which `expect` repeats each transfer.

    Create it while the engine is idle. Call `expect` for each transfer, in the order of their submission, and `check`
    when the engine is idle again: it compares every byte, padding and guard bytes included.

    Args:
        engine: its pool is copied. One device only, and a layout without a codec: `expect` refuses that.
        buffers: all device memory of the layout, and any other that must not change. Keep them open until `check`.

    Attributes:
        memory: the copy of each buffer, by its address. If you write to device memory yourself, write the same here.
        pool: the copy of the slots; likewise.

    Raises:
        ClosedError, DriverError: a buffer is closed, or the driver failed.
    """

    def __init__(self, engine: OffloadEngine, buffers: Sequence[DeviceBuffer]) -> None:
        self._engine = engine
        self._buffers = tuple(buffers)
        self.memory = {buffer.address: buffer.to_numpy() for buffer in buffers}
        self.pool = engine.slots.copy()

    def expect(
        self,
        direction: Direction | str,
        blocks: Sequence[int],
        slots: Sequence[int],
        *,
        group: int = 0,
        first_sub_block: int = 0,
    ) -> None:
        """Repeat a transfer on the mirror's copies of slots and device memory, on the host. Call it once for each
        transfer, in the order of submission, before `check`; the transfer need not have ended. Blocks come first, then
        slots, for a load, too.

        Raises:
            LayoutError: the engine's layout has a codec.
            AssertionError: a block is in none of the buffers.
            IndexError: a slot does not exist, or there are too few.
        """
        naive_transfer(
            self._engine.layout,
            direction,
            blocks=blocks,
            slots=slots,
            memory=self.memory,
            pool=self.pool,
            group=group,
            first_sub_block=first_sub_block,
        )

    def check(self) -> None:
        """Compare the engine's pool and the device memory with the copies, every byte. It waits for no transfer:
        `drain` the engine first.

        Raises:
            AssertionError: they differ; the message says how many bytes, and the first one.
            ClosedError, DriverError: a buffer is closed, or the driver failed.
        """
        _check_same("the slot pool", self._engine.slots, self.pool)
        for buffer in self._buffers:
            _check_same(f"device memory at {buffer.address:#x}", buffer.to_numpy(), self.memory[buffer.address])


def _check_same(what: str, actual: UInt8Array, expected: UInt8Array) -> None:
    wrong = np.flatnonzero(actual.reshape(-1) != expected.reshape(-1))
    if len(wrong):
        at = np.unravel_index(int(wrong[0]), actual.shape)
        where = ", ".join(str(int(index)) for index in at)
        raise AssertionError(
            f"{what} differs in {len(wrong)} of {actual.size} bytes, first at [{where}]: "
            f"{int(actual[at])} instead of {int(expected[at])}"
        )


# leaks ----------------------------------------------------------------------------------------------------------------


@contextmanager
def leak_check(device: Device) -> Iterator[None]:
    """Fail if more resources are in use after a `with` block than before. If the block raises, nothing is counted.

    Counted: objects that the device owns, open file descriptors (where /proc lists them) and threads of the whole
    process; on a simulated device also all that its driver's `leaks` counts, of all devices. Engines created inside
    the block must be closed or garbage by its end. It waits for no transfer: `drain` engines that you drop.

    Raises:
        AssertionError: something is left over; the message has both counts.
    """
    before = _count(device)
    yield
    after = _count(device)
    grown = {kind: (before.get(kind, 0), count) for kind, count in after.items() if count > before.get(kind, 0)}
    if grown:
        counts = ", ".join(f"{kind}: {old} before, {new} after" for kind, (old, new) in grown.items())
        raise AssertionError(f"left over: {counts}")


def _count(device: Device) -> dict[str, int]:
    gc.collect()
    if not device.closed:
        device.reclaim()
    counts = {"threads": threading.active_count(), "things the device owns": device.owned}
    if os.path.isdir("/proc/self/fd"):
        counts["file descriptors"] = len(os.listdir("/proc/self/fd"))
    if device.simulator is not None:
        counts |= device.simulator.leaks()
    return counts


def check_clean_close(device: Device, *, timeout: float = 30.0) -> None:
    """Close a simulated device and its engines; check that nothing undefined happened, no guard byte changed, and
    nothing is left in its driver, which no other open device may share.

    Raises:
        AssertionError: the device is not simulated, and stays as it is. Or one of these checks failed: the device is
            closed then, unless its driver is `strict`, which raises at once, perhaps before the device is closed.
        TimeoutError: transfers were still running after `timeout` seconds in total; the device stays open.
        Other errors of `Device.close`.
    """
    simulator = device.simulator
    assert simulator is not None, "check_clean_close needs a simulated device"
    simulator.check_guards()
    device.close(timeout)
    assert simulator.violations == [], simulator.violations
    left = {kind: count for kind, count in simulator.leaks().items() if count}
    assert left == {}, f"left over after close: {left}"


# conformance ----------------------------------------------------------------------------------------------------------


class ConformanceCase(NamedTuple):
    """One check that `check_copier_conformance` made.

    Attributes:
        layout: what its layout is like, in words.
        blocks_per_slot: of the layout.
        copier: its name.
        nbytes: payload of all its transfers, stores and loads together.
    """

    layout: str
    blocks_per_slot: int
    copier: str
    nbytes: int


def check_copier_conformance(
    device: Device, copiers: Sequence[CopierName] | None = None, *, seed: int = 0
) -> list[ConformanceCase]:
    """Store and load through every copier, over layouts of every kind, and compare every byte with a naive loop.

    Takes about a second and 8 MiB on a GPU; longer the first time, when kernels are compiled, and on a simulated
    device, where they are interpreted.

    Args:
        device: any open device. It stays open; what the checks allocate is freed, except after an error.
        copiers: names; None: all that can run on this device.
        seed: for the bytes and the ids.

    Returns:
        The checks made.

    Raises:
        AssertionError: a copier moved other bytes than the loop, touched a byte that it should not have, or failed.
        ValueError, CapabilityError: a copier is unknown, or cannot run on this device.
        TimeoutError: the transfers of one check took longer than 60 seconds.
        Other errors of `Device.allocate` and `OffloadEngine`, such as CapacityError and ClosedError.
    """
    names = copiers
    if names is None:  # whether a kernel can run is known for certain when an engine has loaded one
        with device.allocate(64) as buffer:
            layout = KVLayout([[Plane(buffer.address, block_bytes=64, num_blocks=1, owner=buffer)]])
            with OffloadEngine(layout, device=device, num_slots=1) as engine:
                names = [name for name in COPIERS if name not in engine.missing_copiers]
    cases = []
    for kind, make in _LAYOUTS.items():
        for factor in (1, 3, 8) if kind == _INTERLEAVED else (1, 3):
            for copier in names:
                nbytes = _check_copier(device, make, factor, copier, seed)
                cases.append(ConformanceCase(kind, factor, copier, nbytes))
    return cases


def _check_copier(
    device: Device,
    make: Callable[[Device], tuple[list[Plane], list[DeviceBuffer]]],
    factor: int,
    copier: CopierName,
    seed: int,
) -> int:
    chance = np.random.default_rng(seed)
    planes, buffers = make(device)
    for buffer in buffers:
        scramble(buffer, seed)
    order: SlotOrder | None = "block-major" if copier == "pack" else None  # else it carries one block a slot
    layout = KVLayout([planes], blocks_per_slot=factor, slot_order=order)
    num_slots = 16
    # a ring of a few blocks: pieces wait for each other, and the ring is gone round
    staging_bytes = 8 * max(512, layout.groups[0].bytes_per_block) if copier == "pack" else 0
    with OffloadEngine(layout, device=device, num_slots=num_slots, staging_bytes=staging_bytes) as engine:
        poison(engine.slots)
        mirror = Mirror(engine, buffers)
        nbytes = 0
        for first_sub_block in range(factor):
            count = min(planes[0].num_blocks, num_slots * factor - first_sub_block)
            places = layout.slots_for(count, first_sub_block=first_sub_block)
            blocks = chance.permutation(planes[0].num_blocks)[:count]
            blocks[: count // 2].sort()  # neighbours, so that some rows merge
            slots = chance.permutation(num_slots)[:places]
            for ids in (blocks,) if first_sub_block else (blocks, chance.permutation(blocks)):
                for direction, each in ((Direction.STORE, ids), (Direction.LOAD, ids[::-1])):
                    job = engine.submit(
                        direction, each, slots, first_sub_block=first_sub_block, after=NO_WAIT, copier=copier
                    )
                    mirror.expect(direction, each.tolist(), slots.tolist(), first_sub_block=first_sub_block)
                    nbytes += job.nbytes
            engine.drain(timeout=60)
            failed = [result.error for result in engine.poll() if result.error is not None]
            assert not failed, f"{copier}: {failed[0]}"
        mirror.check()
    for buffer in buffers:
        buffer.close()
    return nbytes


_Memory = tuple[list[Plane], list[DeviceBuffer]]
_MARGIN = 256  # guard bytes around every plane
_BLOCKS = 12  # of a plane: a simulated device interprets kernels, which takes 20 ms for 64 KiB


def _planes(
    device: Device,
    block_bytes: int = 4096,
    padding: int = 0,
    order: Callable[[int], Any] = range,
    num_blocks: int = _BLOCKS,
    count: int = 6,
    interleaved: bool = False,
) -> _Memory:
    stride = block_bytes * count if interleaved else block_bytes + padding
    pitch = block_bytes if interleaved else stride * num_blocks + _MARGIN
    buffer = device.allocate(max(pitch * count, stride * num_blocks + _MARGIN) + _MARGIN)
    addresses = [buffer.address + _MARGIN + index * pitch for index in order(count)]
    of_all: dict[str, Any] = {"block_bytes": block_bytes, "num_blocks": num_blocks, "block_stride": stride}
    return [Plane(address, owner=buffer, **of_all) for address in addresses], [buffer]


def _separate(device: Device, *sizes: int) -> _Memory:
    buffers = [device.allocate(size * _BLOCKS + 2 * _MARGIN) for size in sizes]
    planes = [
        Plane(buffer.address + _MARGIN, block_bytes=size, num_blocks=_BLOCKS, owner=buffer)
        for size, buffer in zip(sizes, buffers, strict=True)
    ]
    return planes, buffers


_INTERLEAVED = "interleaved planes"
_LAYOUTS: dict[str, Callable[[Device], _Memory]] = {
    "slab": _planes,
    "slab of 18 KiB blocks": lambda device: _planes(device, block_bytes=18 << 10, num_blocks=5, count=3),
    "slab with padding": lambda device: _planes(device, block_bytes=1536, padding=512),
    "slab of blocks aligned to 8 bytes": lambda device: _planes(device, block_bytes=1000, count=3),
    "slab of blocks aligned to 4 bytes": lambda device: _planes(device, block_bytes=1004, padding=4, count=3),
    "slab of odd blocks with padding": lambda device: _planes(device, block_bytes=1001, padding=22, count=2),
    "slab in shuffled order": lambda device: _planes(device, order=lambda count: [3, 0, 5, 1, 4, 2][:count]),
    "separate allocations of several sizes": lambda device: _separate(device, 4096, 1024, 48),
    "separate allocations of odd sizes": lambda device: _separate(device, 160, 17, 1),
    _INTERLEAVED: lambda device: _planes(device, block_bytes=1024, count=5, interleaved=True),
}
