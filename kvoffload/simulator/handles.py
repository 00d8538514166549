"""Handle tables: the numbers by which a program names contexts, streams, events and modules."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from cuda.bindings import driver as cuda

from kvoffload.simulator.errors import RefusedError

INVALID_HANDLE = cuda.CUresult.CUDA_ERROR_INVALID_HANDLE


class _HasHandle(Protocol):
    handle: int


Item = TypeVar("Item", bound=_HasHandle)


class HandleTable(Generic[Item]):
    """Live objects by handle. Handles are never used twice, so a stale one is recognised."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._next = first
        self._live: dict[int, Item] = {}

    def new_handle(self) -> int:
        self._next += 16
        return self._next

    def add(self, item: Item) -> None:
        self._live[item.handle] = item

    def get(self, handle: int) -> Item:
        """The live object; raises RefusedError with INVALID_HANDLE."""
        try:
            return self._live[handle]
        except KeyError:
            raise RefusedError(INVALID_HANDLE) from None

    def is_stale(self, handle: int) -> bool:
        """Whether this was a handle of this table whose object is destroyed."""
        return self._first < handle <= self._next and handle % 16 == 0 and handle not in self._live

    def remove(self, handle: int) -> None:
        self._live.pop(handle, None)

    def __len__(self) -> int:
        return len(self._live)

    def values(self) -> list[Item]:
        return list(self._live.values())
