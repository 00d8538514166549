"""Shard: the engine of one device of a ShardedEngine, whose submissions are in three steps."""

from __future__ import annotations

import threading
from typing import Any

from kvoffload.device.current import make_current
from kvoffload.device.device import Device
from kvoffload.device.streams import raise_for_stream, refuse_capturing
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.preparation import Requests
from kvoffload.engine.request import Limits
from kvoffload.engine.transfer import Transfer
from kvoffload.engine.wait_streams import Followed
from kvoffload.errors import DriverError
from kvoffload.layout.layout import KVLayout
from kvoffload.sharded.record import fail_unqueued


class Shard(OffloadEngine):
    """An OffloadEngine that shares its lock with others, and reports nothing: the ShardedEngine does.

    The steps of a submission are called under the lock, each for all shards before the next one: `check`, `prepare`,
    `launch`.
    """

    def __init__(self, layout: KVLayout, *, device: Device, lock: threading.RLock, **options: Any) -> None:
        super().__init__(layout, device=device, **options)
        self.lock = lock  # nothing is in flight yet that the other one would guard
        self._parts.tracker.most_reports = 0

    @property
    def limits(self) -> Limits:
        """What the arguments of transfers are checked against."""
        return self._limits

    def follow(self, requests: Requests) -> Followed:
        """The streams that a transfer follows, while it is referred to. The lock must not be held."""
        sources = requests[0].sources
        return self._follow_here(sources) if requests[0].arrays else Followed(sources)

    def check_stream(self, stream: int, name: str) -> None:
        """Refuse a stream of another device: it could be made to wait for this one's transfers, but then the stream of
        this device would not.

        Raises:
            ValueError: this device's context does not know it; the message names it `name`.
            TransferError: it is being captured.
        """
        in_flight = self._parts.in_flight
        markers = in_flight.markers
        with self.device.current(), self.lock:
            if self._closed:  # so the transfer has ended, and nothing waits for it
                return
            self._repair()
            refuse_capturing(self._driver, stream, name)
            in_flight.consistent = False
            marker = markers.idle.pop() if markers.idle else markers.make()
            try:
                self._driver.event_record(marker, stream)
            except DriverError as error:
                raise_for_stream(error, stream, name)
            finally:  # an interrupt before this leaves it to the repair
                markers.idle.append(marker)
                in_flight.consistent = True

    def check(self, requests: Requests, streams: tuple[int, ...]) -> None:
        """Refuse what cannot be submitted now. Raises what `store` raises."""
        try:
            with make_current(self._driver, self._context, False):
                self._check_submission(requests, streams)
        except DriverError as error:
            self._mark_lost(error)
            raise

    def prepare(self, requests: Requests, streams: tuple[int, ...], number: int) -> Transfer:
        """A transfer with that id that is ready to be put in flight, with its markers recorded.

        It may still be refused: CUDA does not know a stream, or the driver fails. Nothing is in flight then.
        """
        try:
            with make_current(self._driver, self._context, False):
                transfer = self._new_transfer(number, requests)
                self._record_markers(transfer, streams)
                return transfer
        except DriverError as error:
            self._mark_lost(error)
            raise

    def launch(self, requests: Requests, transfer: Transfer) -> None:
        """Put a prepared transfer in flight. A driver error fails it, and does not raise."""
        try:
            with make_current(self._driver, self._context, False):
                self._enqueue(requests, transfer)
        except DriverError as error:  # the context could not be made current: it is in no queue
            fail_unqueued(transfer, error)
            if error.sticky:
                self._parts.tracker.mark_lost(error)

    def track(self) -> None:
        """Take note of transfers that have ended; under the lock."""
        self._track()

    def has_queued(self, transfer: Transfer) -> bool:
        """Whether a transfer is in flight here, or has ended here just now."""
        return transfer in self._parts.in_flight.of(transfer.direction).transfers
