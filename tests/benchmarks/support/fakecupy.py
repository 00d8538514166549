"""As much of CuPy as `bench interop` uses, in numpy on a simulated device.

An operation waits until what was queued on the stream before has ended, and then happens at once; a `get` that does not
block happens when the stream is synchronised. `get`, `set` and `asarray` refuse what CuPy refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvoffload


class FakeStream:
    """A stream of the simulated device, and what CuPy has queued on it."""

    def __init__(self, device: kvoffload.Device) -> None:
        self._device = device
        self._queued: list[Callable[[], None]] = []
        with device.current():
            self._handle = device.driver.stream_create(0)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def reach(self) -> None:
        """Let everything end that transfers were ordered before."""
        with self._device.current():
            self._device.driver.stream_synchronize(self._handle)

    def queue(self, work: Callable[[], None]) -> None:
        self._queued.append(work)

    def synchronize(self) -> None:
        self.reach()
        for work in self._queued:
            work()
        self._queued.clear()

    def destroy(self) -> None:
        with self._device.current():
            self._device.driver.stream_destroy(self._handle)


class FakeArray(np.ndarray[Any, Any]):
    """An array of CuPy's; `stream` is the current one."""

    stream: FakeStream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.__array_interface__, "version": 3, "stream": None}

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> Any:
        assert (stream, order) == (None, "C")
        self.stream.reach()
        content = np.array(self)
        target = np.empty(self.shape, self.dtype) if out is None else out
        assert type(target) is np.ndarray
        assert (target.shape, target.dtype) == (self.shape, self.dtype)
        assert target.flags.c_contiguous
        self.stream.queue(lambda: np.copyto(target, content))
        if blocking:
            self.stream.synchronize()
        return target

    def set(self, array: Any, stream: Any = None) -> None:
        assert stream is None
        assert type(array) is np.ndarray
        assert (array.shape, array.dtype) == (self.shape, self.dtype)
        assert self.flags.c_contiguous
        self[...] = fake(self.stream, array)

    def copy(self, order: Any = "C") -> FakeArray:
        self.stream.reach()
        return fake(self.stream, np.array(self, order=order))

    def __getitem__(self, key: Any) -> Any:
        self.stream.reach()
        found = super().__getitem__(key)
        return fake(self.stream, found) if isinstance(found, np.ndarray) else found

    def __setitem__(self, key: Any, value: Any) -> None:
        assert isinstance(value, FakeArray)
        self.stream.reach()
        super().__setitem__(key, value)


def fake(stream: FakeStream, array: Any) -> FakeArray:
    """A view as an array of CuPy's."""
    view: FakeArray = np.asarray(array).view(FakeArray)
    view.stream = stream
    return view


@contextmanager
def fake_cupy(device: kvoffload.Device) -> Iterator[SimpleNamespace]:
    """The module; what it has allocated is freed at the end."""
    with ExitStack() as stack:
        stream = FakeStream(device)
        stack.callback(stream.destroy)

        def zeros(shape: tuple[int, ...], dtype: Any) -> FakeArray:
            memory = device.empty(shape, dtype)
            stack.callback(memory.buffer.close)
            array = fake(stream, np.from_dlpack(memory))
            array.fill(0)
            return array

        yield SimpleNamespace(
            uint16=np.uint16,
            zeros=zeros,
            empty=lambda shape, dtype: fake(stream, np.empty(shape, dtype)),
            full=lambda shape, value, dtype: fake(stream, np.full(shape, value, dtype)),
            asarray=lambda array: fake(stream, array.copy()),
            cuda=SimpleNamespace(
                Stream=lambda non_blocking: stream if non_blocking else None,
                Device=lambda _: ExitStack(),
                using_allocator=lambda _: ExitStack(),
                alloc_pinned_memory=bytearray,
            ),
        )
