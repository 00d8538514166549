"""The thread of a member of a shared pool: it finds a new owner, and tells the owner of transfers that have ended."""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from typing import Any

from kvoffload.errors import ClosedError
from kvoffload.internal.checks import shown
from kvoffload.internal.log import LOGGER
from kvoffload.pool.pool_memory import close_files

RETRY_SECONDS = 1.0  # between attempts to find a new owner
SETTLE_SECONDS = 0.002  # between looks at transfers in flight
LINGER_SECONDS = 0.01  # between looks after that, so that calls that follow soon need not wake the thread
_LINGERS = 10  # looks


def wake(wakeup: list[int]) -> None:
    for descriptor in wakeup:
        os.eventfd_write(descriptor, 1)


def forget(wakeup: list[int], connections: list[socket.socket]) -> None:
    """End the thread of a member that is garbage, and its connection: an interrupt may have lost it."""
    wake(wakeup)
    close_files(wakeup)
    hang_up(connections)


def hang_up(connections: list[socket.socket]) -> None:
    """Close these sockets, also one that an interrupt has left half made, and empty the list."""
    for connection in connections:
        socket.SocketType.close(connection)
    connections.clear()


def watch(pool: weakref.ref[Any], files: list[int]) -> None:
    """Run the thread of a member: sleep until transfers are in flight, or the owner has ended, or it is forgotten.

    Args:
        files: a wakeup of its own, which it takes out and closes; empty if the thread's start was interrupted.
    """
    busy, quiet = False, _LINGERS
    if not files:
        return
    wakeup = files.pop()
    while True:
        member = pool()
        if member is None or member._closed:
            os.close(wakeup)
            return
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        connection = member._socket
        if connection is not None and (descriptor := connection.fileno()) >= 0:
            poll.register(descriptor, select.POLLRDHUP)
        wait = LINGER_SECONDS if quiet < _LINGERS else RETRY_SECONDS if member._owes else 10 * RETRY_SECONDS
        wait = SETTLE_SECONDS if busy else wait
        member._woken |= wait <= LINGER_SECONDS  # it looks soon
        del member, connection
        events = dict(poll.poll(wait * 1000))
        if wakeup in events:
            os.eventfd_read(wakeup)
            if len(events) == 1 and not busy:  # the caller's thread is in the middle of its call: not beside that
                busy, quiet = True, 0
                continue
        member = pool()
        if member is None:
            continue
        member._woken = False  # before it looks: whatever begins from now on wakes it again
        try:
            busy = member._tend()
        except ClosedError:
            busy = False
        except Exception as error:  # noqa: BLE001  # a thread that ends would leave keys pending
            LOGGER.warning("the thread of %s: %s", member, shown(error))
            busy = False
            time.sleep(SETTLE_SECONDS)
        quiet = 0 if busy else quiet + 1
