"""Caches in layouts of many kinds, simulated, with conversations whose bytes follow from tokens and weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from coded import normal
from helpers import Bytes

import kvoffload
from kvoffload import NO_WAIT, BlockCache, KVLayout, OffloadEngine, ShardedEngine, ShardedLayout
from kvoffload.testing import SimulatedDriver

TOKENS, HEADS, DIM, PLANES = 4, 8, 64, 2  # of a block; a head is the least that a codec takes
AXES = ("tokens", "heads", "dim")
TERMS: dict[str, Any] = {"salt": "pepper", "identity": {"model": "m", "revision": "1"}}
SECONDS = 30.0
POISON = 0xB7


class Kind(NamedTuple):
    """How blocks lie on the device and in slots. `heads`: of each device; `dim`: of the first group."""

    arrays: str = "block-major"  # or "plane-major", "separate"
    axes: tuple[str, ...] = AXES
    factor: int = 1
    codec: Any = "raw"
    heads: tuple[int, ...] = (HEADS,)
    groups: int = 1
    slot_order: Any = None
    dtype: str = "bfloat16"
    dim: int = DIM
    tokens: int = TOKENS

    def shapes(self, heads: int) -> list[tuple[int, ...]]:
        """The extents of a block of each group on a device, in the order of memory."""
        sizes = {"tokens": self.tokens, "heads": heads, "dim": self.dim}
        wide = {**sizes, "dim": 2 * self.dim}
        return [tuple((wide if group else sizes)[name] for name in self.axes) for group in range(self.groups)]


@dataclass
class World:
    """A cache over arrays of a kind. `arrays`: of each device and group, what lies in device memory."""

    kind: Kind
    cache: BlockCache[Any]
    arrays: list[list[list[kvoffload.DeviceArray]]]
    devices: list[kvoffload.Device]
    blocks: int

    @property
    def slots(self) -> tuple[Any, ...]:
        slots = self.cache.engine.slots
        return slots if isinstance(slots, tuple) else (slots,)

    def ids(self, blocks: Sequence[int]) -> Any:
        return list(blocks) if self.kind.groups == 1 else [list(blocks)] * self.kind.groups

    def memory(self, blocks: Sequence[int], values: Sequence[npt.NDArray[Any]]) -> list[list[list[Bytes]]]:
        """What device memory holds with `values`, whole blocks of each group, in these blocks, and poison elsewhere."""
        kind, found, begin = self.kind, [], 0
        for heads in kind.heads:
            of_device = []
            for group, shape in enumerate(kind.shapes(heads)):
                image = np.full((self.blocks, PLANES, *shape), POISON, values[group].dtype)
                part = values[group][:, :, :, begin : begin + heads]
                image[list(blocks)] = part.transpose(0, 1, *(2 + AXES.index(name) for name in kind.axes))
                if kind.arrays == "separate":
                    of_device.append([image[:, plane] for plane in range(PLANES)])
                else:
                    of_device.append([image if kind.arrays == "block-major" else image.swapaxes(0, 1)])
            found.append([[np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in of] for of in of_device])
            begin += heads
        return found

    def write(self, memory: list[list[list[Bytes]]]) -> None:
        for array, image in self._each(memory):
            array.buffer.copy_from(image)

    def check(self, memory: list[list[list[Bytes]]]) -> None:
        for array, image in self._each(memory):
            assert (array.buffer.to_numpy() == image).all()

    def _each(self, memory: list[list[list[Bytes]]]) -> Iterator[tuple[kvoffload.DeviceArray, Bytes]]:
        for arrays, images in zip(self.arrays, memory, strict=True):
            for group, of_group in zip(arrays, images, strict=True):
                yield from zip(group, of_group, strict=True)

    def store(self, tokens: Any, blocks: Sequence[int] | None = None, weights: str = "", **terms: Any) -> list[bytes]:
        """Store a conversation, from these blocks of the device, and wait; its keys."""
        keys = self.keys(tokens, **terms)
        blocks = range(len(keys) * self.kind.factor) if blocks is None else blocks
        self.write(self.memory(blocks, self.values(tokens, weights)))
        self.cache.store(keys, self.ids(blocks), after=NO_WAIT).wait(SECONDS)
        return keys

    def check_load(self, tokens: Any, blocks: Sequence[int], weights: str = "") -> None:
        """Load a conversation into these blocks, and compare all device memory."""
        values = self.values(tokens, weights)
        self.write(self.memory([], [each[:0] for each in values]))
        self.cache.load(self.keys(tokens), self.ids(blocks), after=NO_WAIT).wait(SECONDS)
        self.check(self.memory(blocks, values))

    def keys(self, tokens: Any, **terms: Any) -> list[bytes]:
        return self.cache.keys(tokens, **{"salt": TERMS["salt"], **terms})

    def save(self, path: Any, tokens: Any, **options: Any) -> int:
        return self.cache.save(path, tokens, **{**TERMS, **options})

    def restore(self, path: Any, **options: Any) -> kvoffload.Restored:
        return self.cache.restore(path, **{**TERMS, **options})

    def values(self, tokens: Any, weights: str = "") -> list[npt.NDArray[Any]]:
        return values_of(self.kind, tokens, weights, self.kind.factor)

    def resident(self) -> dict[bytes, int]:
        """The keys that are hits or pending, with tags of weights, and their entries."""
        return dict(self.cache._state.table.of)

    def held(self) -> tuple[int, int, int]:
        """Leases, entries of reservations that are open, and entries that anything holds."""
        self.cache.lookup([])  # sees the end of what became garbage
        table = self.cache._state.table
        return len(table.leases), len(table.writable), len(table.holds)


def values_of(kind: Kind, tokens: Any, weights: str = "", factor: int = 1) -> list[npt.NDArray[Any]]:
    """The whole blocks of each group, (blocks, planes, tokens, heads, dim): each from its tokens and those before."""
    tokens = np.asarray(tokens)
    count = len(tokens) // (kind.tokens * factor) * factor
    found, heads = [], sum(kind.heads)
    for group in range(kind.groups):
        shape = (count, PLANES, kind.tokens, heads, kind.dim * (1 + (group > 0)))
        values = np.empty(shape, np.uint16 if kind.dtype == "bfloat16" else np.uint8)
        for block in range(count):
            text = tokens[: (block + 1) * kind.tokens].astype("<u4").tobytes() + weights.encode() + bytes([group])
            random = np.random.default_rng(int.from_bytes(blake2b(text, digest_size=8).digest(), "little"))
            if kind.dtype == "bfloat16":
                values[block] = normal(random, values[block].size).reshape(shape[1:])
            else:
                values[block] = random.integers(0, 256, shape[1:])
        found.append(values)
    return found


def _layout(kind: Kind, device: kvoffload.Device, heads: int, blocks: int) -> tuple[KVLayout, list[Any]]:
    described: dict[str, Any] = {"tokens_per_block": kind.tokens, "block_axes": kind.axes}
    described |= {"blocks_per_slot": kind.factor, "slot_order": kind.slot_order, "on_default_stream": True}
    layouts, arrays = [], []
    for shape in kind.shapes(heads):
        if kind.arrays == "separate":
            arrays.append([device.empty((blocks, *shape), kind.dtype) for _ in range(PLANES)])
            layouts.append(KVLayout.from_arrays(arrays[-1], **described))
        else:
            first = (blocks, PLANES) if kind.arrays == "block-major" else (PLANES, blocks)
            arrays.append([device.empty((*first, *shape), kind.dtype)])
            axes = first.index(PLANES), first.index(blocks)
            layouts.append(KVLayout.from_stacked(arrays[-1][0], plane_axis=axes[0], block_axis=axes[1], **described))
    layout = layouts[0]
    if kind.groups > 1:
        planes = [each.groups[0].planes for each in layouts]
        layout = KVLayout(planes, dtype=kind.dtype, block_shape=kind.shapes(heads), **described)
    return (layout if kind.codec == "raw" else layout.with_codec(kind.codec)), arrays


@contextmanager
def world(kind: Kind, *, seed: int = 0, capacity: int = 8, blocks: int = 24, **options: Any) -> Iterator[World]:
    """A cache for so many keys, with poisoned slots. `options` are the cache's."""
    driver = SimulatedDriver(device_count=len(kind.heads), seed=seed, deadlock_seconds=0.3)
    with ExitStack() as stack:
        devices = [
            stack.enter_context(kvoffload.open_device(index, backend=driver)) for index in range(len(kind.heads))
        ]
        made = [_layout(kind, *each, blocks) for each in zip(devices, kind.heads, strict=True)]
        how: dict[str, Any] = {"num_slots": capacity * kind.groups}
        how["staging_bytes"] = 0 if kind.codec == "raw" else 1 << 20
        engine: Any
        if len(devices) == 1:
            engine = stack.enter_context(OffloadEngine(made[0][0], device=devices[0], **how))
        else:
            engine = stack.enter_context(
                ShardedEngine(ShardedLayout([each for each, _ in made]), devices=devices, **how)
            )
        cache = BlockCache(engine, **{"policy": "lru", **options})
        stack.callback(partial(cache.close, SECONDS))
        found = World(kind, cache, [arrays for _, arrays in made], devices, blocks)
        for slots in found.slots:
            slots[:] = POISON
        yield found
        if not engine.closed:
            cache.check()


SMALL = Kind(heads=(2,), dim=4, dtype="uint8")  # 64 bytes a block


def talk(number: int, blocks: int = 8, same: int = 0, kind: Kind = SMALL) -> npt.NDArray[np.int64]:
    """The tokens of a conversation; the first `same` blocks are those of all."""
    tokens = np.arange(blocks * kind.tokens, dtype=np.int64)
    tokens[same * kind.tokens :] += 1000 * number
    return tokens
