"""What `BlockCache.store` and `load` return: a job per group of the layout."""

from __future__ import annotations

from functools import partial

from kvoffload.cache.reservations import ReservationRecord
from kvoffload.engine.job import Job, TransferResult
from kvoffload.internal.teardown import run_all
from kvoffload.internal.types import StreamLike


class CacheJob:
    """The transfers of one `BlockCache.store` or `load`: one job per group, none if there was nothing to copy.

    Attributes:
        keys: the keys whose blocks are being copied.
        jobs: the engine's jobs.
    """

    def __init__(self, keys: list[bytes], jobs: tuple[Job, ...], sources: tuple[ReservationRecord, ...] = ()) -> None:
        self.keys = tuple(keys)
        self.jobs = jobs
        self._sources = sources  # what was pending when it was loaded

    @property
    def done(self) -> bool:
        """Whether all of it has ended, well or not. Asks the GPU; never blocks."""
        return all(job.done for job in self.jobs)

    def wait(self, timeout: float | None = None) -> list[TransferResult]:
        """Wait for all of it, at most `timeout` seconds for each job; a result per job.

        Raises:
            TransferError: a transfer failed, or the store of what was loaded; the others have ended, too.
            TimeoutError: `timeout` seconds have passed; the transfers go on.
        """
        results: list[TransferResult] = []
        run_all(partial(lambda job: results.append(job.wait(timeout)), job) for job in self.jobs)
        for source in self._sources:
            source.raise_if_failed()
        return results

    def result(self) -> list[TransferResult]:
        """The same as `wait()`."""
        return self.wait()

    @property
    def num_parts(self) -> int:
        """In how many parts each of the jobs is copied; see `BlockCache.load`."""
        return self.jobs[0].num_parts if self.jobs else 1

    def order_before(self, stream: StreamLike, part: int | None = None) -> None:
        """Work queued on `stream` from now on starts after all of it has ended; see `Job.order_before`.

        Args:
            part: of a load in parts: after this part of every job has ended.
        """
        run_all(partial(job.order_before, stream, part) for job in self.jobs)

    def __repr__(self) -> str:
        return f"CacheJob({len(self.keys)} keys, {list(self.jobs)})"
