"""ShardedJob: what `ShardedEngine.store` and `load` return."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.engine.job import Job
from kvoffload.internal.types import StreamLike


class ShardedJob(Job):
    """One transfer on all devices of a ShardedEngine: a `Job`, with the differences listed here.

    It is done when the transfers of all devices have ended, and fails if one of them does. Until it is done, its blocks
    and slots are in use on every device, also after its `error` is known: see `Job`. `nbytes` is the sum over the
    devices, `seconds` of its result the longest, `error` that of the first device, in their order, that has failed,
    `method` None if the devices use different ones, and `copier` the names of all, joined by "+".
    """

    __slots__ = ()

    def order_before(  # type: ignore[override]  # a stream is of one device
        self, streams: Sequence[StreamLike], *, part: int | None = None
    ) -> None:
        """Work queued on these streams from now on starts after this transfer has ended on the stream's own device.

        A stream waits for its own device alone. A collective operation begins when the streams of all devices have
        reached it, so it follows the transfer on all of them.

        Args:
            streams: one for each device, in the order of the devices.
            part: as for `Job.order_before`.

        Raises:
            TypeError, ValueError: `streams` is no list with one stream for each device; or as `Job.order_before`.
            TransferError, CapacityError: as `Job.order_before`. The streams of the devices before the one that
                failed wait for it all the same.
        """
        self._engine.order_job_before(self._transfer, streams, part)

    def __repr__(self) -> str:
        return f"Sharded{super().__repr__()}"
