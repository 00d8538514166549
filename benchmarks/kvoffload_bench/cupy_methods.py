"""Methods for users of CuPy: this library on their arrays, and CuPy's own. All work is queued on CuPy's current stream.

The cache is one array (planes, blocks, elements), or a list with an array (blocks, elements) for each plane, each in a
driver allocation of its own. Block ids come from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from kvoffload.engine.job import Job
from kvoffload.layout.layout import KVLayout
from kvoffload_bench.framework_data import POISON_ELEMENT, Elements, EngineSlots, FrameworkData, FrameworkMethod

CUPY = "CuPy"
OURS = "kvoffload, one array"
OURS_LIST = "kvoffload, list of arrays"
COPIES = "list: get(out=pinned) / set, per block and plane"
PINNED = "one array: gather, get(out=pinned) / set, scatter"


class CupyMethods:
    """Methods by name, created by calling the values of `makers`. `close` closes their engines."""

    name = CUPY

    def __init__(self, data: FrameworkData) -> None:
        import cupy

        self._cupy, self._data = cupy, data
        with ExitStack() as stack:
            stack.enter_context(cupy.cuda.Device(data.lab.device.index))
            self._stream = cupy.cuda.Stream(non_blocking=True)
            stack.enter_context(self._stream)
            self._kv = cupy.zeros(data.shape, dtype=cupy.uint16)
            with cupy.cuda.using_allocator(None):  # not from a pool: each array is an allocation
                planes = [cupy.zeros(data.shape[1:], dtype=cupy.uint16) for _ in range(data.shape[0])]
            self._one, self._list = (_Cache(data, cupy, self._stream, each) for each in (list(self._kv), planes))
            self._pinned = _Pinned(data, self._stream, cupy.cuda.alloc_pinned_memory(data.nbytes))
            self._stack = stack.pop_all()

    @property
    def makers(self) -> dict[str, Callable[[], FrameworkMethod]]:
        return {
            OURS: lambda: self._ours(OURS, KVLayout.from_stacked(self._kv, plane_axis=0, block_axis=1), self._one),
            OURS_LIST: lambda: self._ours(OURS_LIST, KVLayout.from_arrays(self._list.planes), self._list),
            COPIES: self._copies,
            PINNED: self._gathers,
        }

    def _ours(self, name: str, layout: KVLayout, cache: _Cache) -> FrameworkMethod:
        blocks, slots, stream = self._data.blocks, self._data.slots, self._stream
        engine = self._stack.enter_context(self._data.engine(layout))

        def store() -> Job:
            return engine.store(blocks, slots, after=stream)

        def load() -> Job:
            job = engine.load(slots, blocks, after=stream)
            job.order_before(stream)
            cache.look()
            return job

        return FrameworkMethod(CUPY, name, cache, EngineSlots(self._data, engine), store, load)

    def _copies(self) -> FrameworkMethod:
        blocks = self._data.blocks.tolist()
        pairs = [
            (plane, block, row)
            for plane, rows in zip(self._list.planes, self._pinned.elements, strict=True)
            for block, row in zip(blocks, rows, strict=True)
        ]

        def store() -> None:
            for plane, block, row in pairs:
                plane[block].get(out=row, blocking=False)

        def load() -> None:
            for plane, block, row in pairs:
                plane[block].set(row)
            self._list.look()

        return FrameworkMethod(CUPY, COPIES, self._list, self._pinned, store, load)

    def _gathers(self) -> FrameworkMethod:
        cupy, kv, pinned, blocks = self._cupy, self._kv, self._pinned.elements, self._data.blocks

        def store() -> None:
            kv[:, cupy.asarray(blocks)].get(out=pinned, blocking=False)

        def load() -> None:
            fresh = cupy.empty(pinned.shape, dtype=cupy.uint16)
            fresh.set(pinned)
            kv[:, cupy.asarray(blocks)] = fresh
            self._one.look()

        return FrameworkMethod(CUPY, PINNED, self._one, self._pinned, store, load)

    def close(self) -> None:
        self._stream.synchronize()
        self._stack.close()


class _Cache:
    """The planes of a cache. `look` has a computation of CuPy's read one element of the last block.

    What was seen is kept until the blocks are written from here again: each look must have found the right element.
    """

    def __init__(self, data: FrameworkData, cupy: Any, stream: Any, planes: Sequence[Any]) -> None:
        self._data, self._stream, self.planes = data, stream, planes
        self._ids, self._right = cupy.asarray(data.blocks), cupy.asarray(data.right)
        self._poison = cupy.full(data.right.shape, POISON_ELEMENT, dtype=cupy.uint16)
        self._last = planes[-1][int(data.blocks[-1]), -1:]
        self._seen: list[Any] = []

    def look(self) -> None:
        """Compute with a loaded element."""
        self._seen.append(self._last.copy())

    def fill(self) -> None:
        self._write(self._right)

    def poison(self) -> None:
        self._write(self._poison)

    def _write(self, elements: Any) -> None:
        self._seen.clear()
        for plane, rows in zip(self.planes, elements, strict=True):
            plane[self._ids] = rows
        self.wait()

    def wait(self) -> None:
        self._stream.synchronize()

    def wrong(self) -> int:
        right = self._data.right
        looked_too_early = sum(int(seen.get()[0] != right[-1, -1, -1]) for seen in self._seen)
        return self._data.wrong([plane[self._ids].get() for plane in self.planes], right) + looked_too_early


class _Pinned:
    """Pinned memory of CuPy's: (planes, count, elements)."""

    def __init__(self, data: FrameworkData, stream: Any, memory: Any) -> None:
        self._data, self._stream, right = data, stream, data.right
        self.elements: Elements = np.frombuffer(memory, dtype=np.uint16, count=right.size).reshape(right.shape)

    def fill(self) -> None:
        self.elements[...] = self._data.right

    def poison(self) -> None:
        self._data.lab.poison([self.elements.reshape(-1).view(np.uint8)])

    def wait(self) -> None:
        self._stream.synchronize()

    def wrong(self) -> int:
        return self._data.wrong(self.elements, self._data.right)
