"""File descriptors in the lists of their owners, so that an interrupt loses none and closes none twice.

CPython runs no signal handler between two calls that one call of C makes: `list.extend` over a `map`, here.
"""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Callable
from itertools import chain, repeat, tee
from operator import itemgetter
from typing import Any


def opened(files: list[int], function: Callable[..., int], *arguments: Any) -> int:
    """Call a function of C, such as `os.open`; the descriptor that it returns is in `files`, too."""
    files.extend(map(function, *zip(arguments, strict=True)))
    return files[-1]


def received(files: list[int], connection: socket.socket, most_bytes: int) -> bytes:
    """The next datagram. A descriptor that comes along is put into `files`."""
    calls = map(connection.recvmsg, (most_bytes,), (socket.CMSG_LEN(4),), (socket.MSG_CMSG_CLOEXEC,))
    datagrams, ancillary = tee(calls)
    parts = chain.from_iterable(map(itemgetter(1), ancillary))
    files.extend(chain.from_iterable(map(array, repeat("i"), map(itemgetter(2), parts))))
    datagram: bytes = next(datagrams)[0]
    return datagram


def close_last(files: list[int], count: int, close: Callable[[int], None] = os.close) -> None:
    """Take so many out of the list, the last one first, and close each."""
    for _ in map(close, map(files.pop, [-1] * count)):
        pass
