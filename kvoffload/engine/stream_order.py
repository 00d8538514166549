"""Waits of the callers' streams for transfers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from kvoffload.device.streams import refuse_capturing
from kvoffload.driver import Driver
from kvoffload.engine.job import TransferRecord, describe
from kvoffload.engine.launcher import Launcher
from kvoffload.engine.queues import InFlight
from kvoffload.engine.transfer import Transfer
from kvoffload.errors import CapacityError
from kvoffload.internal.waiting import wait_until

_QUEUEING_SECONDS = 1.0  # how long a caller waits for room in the driver's queues


class StreamOrder:
    """Makes streams wait for transfers in flight."""

    def __init__(self, driver: Driver, in_flight: InFlight, launcher: Launcher) -> None:
        self._driver = driver
        self._in_flight = in_flight
        self._launcher = launcher

    def latest(self) -> list[Transfer]:
        """The latest unfinished transfer of each direction; those before it end before it. Under the engine's lock."""
        return [queue.transfers[-1] for queue in self._in_flight.both if queue.transfers]

    def wait_for(self, transfer: Transfer, stream: int, part: int | None) -> None:
        """Have `stream` wait for a queued transfer, or a part of it. Under the engine's lock.

        Raises:
            TransferError: the stream is being captured.
        """
        refuse_capturing(self._driver, stream, "stream")
        if transfer.finished:
            return
        self._in_flight.consistent = False
        if part is None:
            self._launcher.wait_for_transfer(stream, transfer)
        else:
            self._launcher.wait_for_part(stream, transfer, part)
        self._in_flight.consistent = True


def await_queueing(transfer: Transfer, part: int | None, advance: Callable[[], None]) -> None:
    """Wait until all of a transfer, or of a part, is queued; that is at once, unless the driver's queues are full.

    The engine's lock must not be held.

    Raises:
        CapacityError: for a second there was no room.
    """

    def queued() -> bool:
        if not (transfer.enqueued or transfer.finished):
            advance()
        return transfer.enqueued or (part is not None and transfer.part > part) or transfer.finished

    try:
        wait_until(queued, _QUEUEING_SECONDS, "queueing")
    except TimeoutError:
        raise CapacityError(
            f"{describe(transfer)} still waits on the host: the driver's queues are full and do not move; poll() until "
            "some end"
        ) from None


def as_part(part: Any, transfer: TransferRecord) -> int:
    """`part` as the number of one of a transfer's parts.

    Raises:
        ValueError: it is none.
    """
    try:
        number = operator.index(part)
    except TypeError:
        number = -1
    if isinstance(part, bool) or not 0 <= number < transfer.num_parts:
        raise ValueError(
            f"part must be None or an integer in [0, {transfer.num_parts}), got {part!r}: {describe(transfer)} was "
            f"submitted in {transfer.num_parts} parts, see `load(..., parts=)`"
        )
    return number
