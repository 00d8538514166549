"""Nothing stays open: contexts, steps that all run, even if some fail, and descriptors that no interrupt loses.

Descriptors are in lists of their owners. CPython runs no signal handler between the calls that one call of C makes, as
`list.extend` over a `map` does: so each is in its list, or does not exist, and none is closed twice.
"""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import chain, repeat, tee
from operator import itemgetter
from typing import Any, Self


class Closing:
    """An object that is closed at the end of a `with` block."""

    __slots__ = ()
    close: Callable[..., object]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Undoing(Closing):
    """An object whose end undoes what the constructor has noted in `_undo`."""

    _undo: ExitStack

    def close(self) -> None:
        self._undo.close()


def run_all(steps: Iterable[Callable[[], None]]) -> None:
    """Run every step, also after one has failed; then raise the first error."""
    first: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001  # the first is raised once all is done
            first = first or error
    if first is not None:
        raise first


def opened(files: list[int], function: Callable[..., int], *arguments: Any) -> int:
    """Call a function of C, such as `os.open`, and append the descriptor that it returns to `files`."""
    files.extend(map(function, *zip(arguments, strict=True)))
    return files[-1]


def received(files: list[int], connection: socket.socket, most_bytes: int) -> bytes:
    """Receive a datagram. A descriptor that comes along is appended to `files`."""
    calls = map(connection.recvmsg, (most_bytes,), (socket.CMSG_LEN(4),), (socket.MSG_CMSG_CLOEXEC,))
    datagrams, ancillary = tee(calls)
    parts = chain.from_iterable(map(itemgetter(1), ancillary))
    files.extend(chain.from_iterable(map(array, repeat("i"), map(itemgetter(2), parts))))
    datagram: bytes = next(datagrams)[0]
    return datagram


def close_last(files: list[int], count: int, close: Callable[[int], None] = os.close) -> None:
    """Close the last `count` descriptors of the list, the last one first, and take each out of it."""
    for _ in map(close, map(files.pop, [-1] * count)):
        pass
