"""What a store was asked when the first records of a put were about to be written: whether it has any of the others.

One question for all keys of a put, before any of their bytes are on the way: a store with one thread, such as Valkey,
answers the questions that come later behind the values that it is receiving.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvoffload.cache.tiering.job import TierJob

Ask = Callable[[Sequence[bytes]], Sequence[bool]]


class _Question:
    """Of one job. Attributes: asking: taken while the store is asked; found: keys that it has, None before."""

    def __init__(self) -> None:
        self.asking = threading.Lock()
        self.found: frozenset[bytes] | None = None
        self.error: BaseException | None = None


class Questions:
    """Which keys of each put the store has. Usable from any thread.

    Args:
        ask: asks the store which of these keys it has; may raise.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._of: dict[TierJob, _Question] = {}

    def has(self, keys: Sequence[bytes], job: TierJob) -> list[bool]:
        """Whether the store had each of these keys of the job, when the first call for the job asked for all of them.

        Calls at the same time wait for its answer. They raise ConnectionError if `ask` raises, so that no call lasts
        longer than one question; the next call asks again.
        """
        with self._lock:
            question = self._of.setdefault(job, _Question())
        with question.asking:
            if question.error is not None:
                raise ConnectionError("the store did not say which records it has") from question.error
            if question.found is None:
                try:
                    there = self._ask(job.keys)
                except BaseException as error:
                    question.error = error
                    self.forget(job)
                    raise
                question.found = frozenset(key for key, known in zip(job.keys, there, strict=True) if known)
        return [key in question.found for key in keys]

    def forget(self, job: TierJob) -> None:
        """The job has ended."""
        with self._lock:
            self._of.pop(job, None)

    def forget_all(self) -> None:
        """Records have been deleted: puts that are under way ask again."""
        with self._lock:
            self._of.clear()
