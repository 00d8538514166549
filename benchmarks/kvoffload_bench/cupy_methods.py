"""Methods for users of CuPy: this library on their arrays, and CuPy's own. All work is queued on CuPy's current stream.

The cache is one array (planes, blocks, elements), or a list with an array (blocks, elements) for each plane, each in a
driver allocation of its own. Block ids come from the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from kvoffload.driver import address_of
from kvoffload.engine.job import Job
from kvoffload.layout.layout import KVLayout
from kvoffload_bench.framework_data import POISON_ELEMENT, Elements, EngineSlots, FrameworkData, FrameworkMethod

CUPY = "CuPy"
OURS = "kvoffload, one array"
OURS_LIST = "kvoffload, list of arrays"
COPIES = "list: get(out=pinned) / set, per block and plane"
BLOCKS = "one array: get(out=pinned) / asarray, per block"
PAGEABLE = "one array: gather, get() / asarray, scatter; pageable"
PINNED = "one array: gather, get(out=pinned) / set, scatter"
PINNED_LIST = "list: gather, get(out=pinned) / asarray, scatter, per plane"


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
            on_gpu = _OnGpu(
                self._stream,
                cupy.asarray(data.blocks),
                cupy.asarray(data.right),
                cupy.full(data.right.shape, POISON_ELEMENT, dtype=cupy.uint16),
            )
            self._one = _OneArray(data, on_gpu, cupy.zeros(data.shape, dtype=cupy.uint16))
            with cupy.cuda.using_allocator(None):  # not from a pool: each array is an allocation
                planes = [cupy.zeros(data.shape[1:], dtype=cupy.uint16) for _ in range(data.shape[0])]
            self._list = _ListOfArrays(data, on_gpu, planes)
            pinned = [cupy.cuda.alloc_pinned_memory(data.nbytes) for _ in range(2)]
            self._by_plane = _Pinned(data, self._stream, pinned[0], data.right)
            self._by_block = _Pinned(data, self._stream, pinned[1], data.right_by_block)
            self._stack = stack.pop_all()

    @property
    def makers(self) -> dict[str, Callable[[], FrameworkMethod]]:
        return {
            OURS: lambda: self._ours(OURS, KVLayout.from_stacked(self._one.kv, plane_axis=0, block_axis=1), self._one),
            OURS_LIST: lambda: self._ours(OURS_LIST, KVLayout.from_arrays(self._list.planes), self._list),
            COPIES: self._copies,
            BLOCKS: self._blocks,
            PAGEABLE: self._pageable,
            PINNED: self._pinned,
            PINNED_LIST: self._pinned_list,
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
        planes, pinned, blocks = self._list.planes, self._by_plane.elements, self._data.blocks.tolist()

        def store() -> None:
            for plane, rows in zip(planes, pinned, strict=True):
                for block, row in zip(blocks, rows, strict=True):
                    plane[block].get(out=row, blocking=False)

        def load() -> None:
            for plane, rows in zip(planes, pinned, strict=True):
                for block, row in zip(blocks, rows, strict=True):
                    plane[block].set(row)
            self._list.look()

        return FrameworkMethod(CUPY, COPIES, self._list, self._by_plane, store, load)

    def _blocks(self) -> FrameworkMethod:
        cupy, kv, pinned, blocks = self._cupy, self._one.kv, self._by_block.elements, self._data.blocks.tolist()

        def store() -> None:
            for block, rows in zip(blocks, pinned, strict=True):
                kv[:, block].get(out=rows, blocking=False)

        def load() -> None:
            for block, rows in zip(blocks, pinned, strict=True):
                kv[:, block] = cupy.asarray(rows)
            self._one.look()

        return FrameworkMethod(CUPY, BLOCKS, self._one, self._by_block, store, load)

    def _pageable(self) -> FrameworkMethod:
        cupy, kv, blocks = self._cupy, self._one.kv, self._data.blocks
        host = _Pageable(self._data)

        def store() -> None:
            host.elements = kv[:, cupy.asarray(blocks)].get()

        def load() -> None:
            kv[:, cupy.asarray(blocks)] = cupy.asarray(host.elements)
            self._one.look()

        return FrameworkMethod(CUPY, PAGEABLE, self._one, host, store, load)

    def _pinned(self) -> FrameworkMethod:
        cupy, kv, pinned, blocks = self._cupy, self._one.kv, self._by_plane.elements, self._data.blocks

        def store() -> None:
            kv[:, cupy.asarray(blocks)].get(out=pinned, blocking=False)

        def load() -> None:
            fresh = cupy.empty(pinned.shape, dtype=cupy.uint16)
            fresh.set(pinned)
            kv[:, cupy.asarray(blocks)] = fresh
            self._one.look()

        return FrameworkMethod(CUPY, PINNED, self._one, self._by_plane, store, load)

    def _pinned_list(self) -> FrameworkMethod:
        cupy, planes, pinned, blocks = self._cupy, self._list.planes, self._by_plane.elements, self._data.blocks

        def store() -> None:
            ids = cupy.asarray(blocks)
            for plane, rows in zip(planes, pinned, strict=True):
                plane[ids].get(out=rows, blocking=False)

        def load() -> None:
            ids = cupy.asarray(blocks)
            for plane, rows in zip(planes, pinned, strict=True):
                plane[ids] = cupy.asarray(rows)
            self._list.look()

        return FrameworkMethod(CUPY, PINNED_LIST, self._list, self._by_plane, store, load)

    def close(self) -> None:
        self._stream.synchronize()
        self._stack.close()


class _OnGpu(NamedTuple):
    """What a cache is filled with: by `right` or by `poison`, at the blocks `ids`."""

    stream: Any
    ids: Any
    right: Any
    poison: Any


class _Cache(ABC):
    """What the two kinds of cache share: one element of the last block, looked at by a computation of CuPy's.

    What was seen is kept until the blocks are written from here again: each look must have found the right element.
    """

    def __init__(self, data: FrameworkData, on_gpu: _OnGpu, last_plane: Any) -> None:
        self._data, self._on_gpu = data, on_gpu
        self._last = last_plane[int(data.blocks[-1]), -1:]
        self._seen: list[Any] = []

    def look(self) -> None:
        """Compute with a loaded element."""
        self._seen.append(self._last.copy())

    def fill(self) -> None:
        self._renew(self._on_gpu.right)

    def poison(self) -> None:
        self._renew(self._on_gpu.poison)

    def _renew(self, elements: Any) -> None:
        self._seen.clear()
        self._write(elements)
        self.wait()

    def wait(self) -> None:
        self._on_gpu.stream.synchronize()

    def wrong(self) -> int:
        right = self._data.right
        looked_too_early = sum(int(seen.get()[0] != right[-1, -1, -1]) for seen in self._seen)
        return self._data.wrong(self._read(), right) + looked_too_early

    @abstractmethod
    def _write(self, elements: Any) -> None:
        """Queue it: (planes, count, elements)."""

    @abstractmethod
    def _read(self) -> Sequence[Elements]:
        """The same, on the host."""


class _OneArray(_Cache):
    def __init__(self, data: FrameworkData, on_gpu: _OnGpu, kv: Any) -> None:
        self.kv = kv
        super().__init__(data, on_gpu, kv[-1])

    def _write(self, elements: Any) -> None:
        self.kv[:, self._on_gpu.ids] = elements

    def _read(self) -> Sequence[Elements]:
        return list(self.kv[:, self._on_gpu.ids].get())


class _ListOfArrays(_Cache):
    def __init__(self, data: FrameworkData, on_gpu: _OnGpu, planes: list[Any]) -> None:
        self.planes = planes
        super().__init__(data, on_gpu, planes[-1])

    def _write(self, elements: Any) -> None:
        for plane, rows in zip(self.planes, elements, strict=True):
            plane[self._on_gpu.ids] = rows

    def _read(self) -> Sequence[Elements]:
        return [plane[self._on_gpu.ids].get() for plane in self.planes]


class _Pinned:
    """Pinned memory of CuPy's; `right` says whether by plane or by block."""

    def __init__(self, data: FrameworkData, stream: Any, memory: Any, right: Elements) -> None:
        self._data, self._stream, self._right = data, stream, right
        self.elements: Elements = np.frombuffer(memory, dtype=np.uint16, count=right.size).reshape(right.shape)

    def fill(self) -> None:
        self.elements[...] = self._right

    def poison(self) -> None:
        self._data.poison(map(address_of, self.elements.reshape(len(self._data.blocks), -1)))

    def wait(self) -> None:
        self._stream.synchronize()

    def wrong(self) -> int:
        return self._data.wrong(self.elements, self._right)


class _Pageable:
    """Ordinary memory, allocated by each store."""

    def __init__(self, data: FrameworkData) -> None:
        self._data = data
        self.elements = data.right.copy()

    def fill(self) -> None:
        self.elements = self._data.right.copy()

    def poison(self) -> None:
        """What the next store gets may be the memory that this one frees."""
        self.elements[...] = POISON_ELEMENT
        self.elements = np.empty((0, 0, 0), dtype=np.uint16)

    def wait(self) -> None:
        """A store has ended when it returns."""

    def wrong(self) -> int:
        return self._data.wrong(self.elements, self._data.right)
