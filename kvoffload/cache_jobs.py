"""The transfers of one call to a cache: a job per group of the layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvoffload.jobs import Job, TransferResult
from kvoffload.reservations import Reservation, raise_if_aborted
from kvoffload.teardown import run_all


class CacheTransfer:
    """Listens to the jobs of one store or load, a job per group, and finishes when all of them have ended.

    The submission counts as unfinished work, too: a group's job may end before the next group's has boarded.
    """

    def __init__(self) -> None:
        self._finish: Callable[[bool], None] | None = None
        self._unfinished: set[int | None] = {None}  # job ids; None stands for the submission
        self._failed = False
        self.any_boarded = False  # whether copies may be under way

    def boarded(self, job: Job) -> None:
        self.any_boarded = True
        self._unfinished.add(job.id)

    def ended(self, job: Job) -> None:
        self._conclude(job.id, job.error is not None)

    def submitted(self, finish: Callable[[bool], None], *, failed: bool = False) -> None:
        """No further job will come. `finish` is called with whether anything failed, once all have ended."""
        self._finish = finish
        self._conclude(None, failed)

    def _conclude(self, job_id: int | None, failed: bool) -> None:
        self._failed |= failed
        self._unfinished.discard(job_id)
        if not self._unfinished and self._finish is not None:
            finish, self._finish = self._finish, None
            finish(self._failed)


class CacheJob:
    """The transfers of one `BlockCache.store` or `load`: one job per group, none if there was nothing to copy.

    Attributes:
        keys: the keys whose blocks are being copied.
        jobs: the engine's jobs.
        sources: reservations that were pending when their keys were loaded.
    """

    def __init__(self, keys: tuple[bytes, ...], jobs: tuple[Job, ...], sources: tuple[Reservation, ...] = ()) -> None:
        self.keys = keys
        self.jobs = jobs
        self.sources = sources

    @property
    def done(self) -> bool:
        """Whether all of it has ended, well or not. Asks the GPU; never blocks."""
        return all(job.done for job in self.jobs)

    def wait(self, timeout: float | None = None) -> list[TransferResult]:
        """Wait for all of it, at most `timeout` seconds for each job; a result per job.

        Raises:
            TransferError: a transfer failed, or the store of what was loaded; the others have ended, too.
            TimeoutError: time is up; the transfers go on.
        """
        results: list[TransferResult] = []
        run_all(partial(lambda job: results.append(job.wait(timeout)), job) for job in self.jobs)
        raise_if_aborted(self.sources)
        return results

    def result(self) -> list[TransferResult]:
        """The same as `wait()`."""
        return self.wait()

    def order_before(self, stream: Any) -> None:
        """Work queued on `stream` from now on starts after all of it has ended; see `Job.order_before`."""
        run_all(partial(job.order_before, stream) for job in self.jobs)

    def __repr__(self) -> str:
        return f"CacheJob({len(self.keys)} keys, {list(self.jobs)})"
