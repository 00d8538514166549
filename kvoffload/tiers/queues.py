"""What a tier's threads do next. No locks here: the tier's lock is held for every call.

    what waits       begins when
    a read           at once; reads, questions and flushes are one queue
    a removal        no write of its keys is being carried out; before reads
    a write          no write of its key is being carried out, and no removal of its key waits or is being carried out

Reads come before writes, but after 16 of them comes a write: entries that are put stay occupied until they are
written. Work whose keys have all ended may begin at any time: it does nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvoffload.tiers.job import Outcome, TierJob

Run = Callable[[], list[Outcome]]
"""Does some work, and returns the outcome of each of its positions."""

READS_PER_WRITE = 16  # as long as both wait
_MOST_OLD_KEYS = 4096


@dataclass(slots=True, eq=False)
class Work:
    """One or all keys of a job.

    Attributes:
        job, positions: the keys.
        run: does it.
    """

    job: TierJob
    positions: range
    run: Run

    @property
    def waits(self) -> bool:
        """Whether a key has no outcome yet."""
        return None in self.job.outcomes[self.positions.start : self.positions.stop]


@dataclass(slots=True, eq=False)
class Write(Work):
    """Attributes: key: that is put."""

    key: bytes


@dataclass(slots=True, eq=False)
class Removal(Work):
    """Attributes: keys: that are removed; None: all."""

    keys: frozenset[bytes] | None

    def concerns(self, key: bytes) -> bool:
        return self.keys is None or key in self.keys


class WorkQueues:
    """What waits and what is being carried out.

    Attributes:
        reads, writes, removals: what waits, oldest first.
        running: what was taken and has not been finished: one for each busy thread.
    """

    def __init__(self) -> None:
        self.reads = deque[Work]()
        self.writes = deque[Write]()
        self.removals = deque[Removal]()
        self.running: list[Work] = []
        self._reads_in_a_row = 0
        self._written_keys = set[bytes]()  # those of all writes that wait, and of some that did

    def add_writes(self, works: Sequence[Write]) -> None:
        """Queue them."""
        if len(self._written_keys) > 2 * len(self.writes) + _MOST_OLD_KEYS:
            self._written_keys = {work.key for work in self.writes}
        self._written_keys.update(work.key for work in works)
        self.writes.extend(works)

    def take(self) -> Work | None:
        """What may begin now, which counts as running from here on; None if nothing may."""
        write_first = self._reads_in_a_row >= READS_PER_WRITE
        work: Work | None = self._take_removal() or (self._take_write() if write_first else None)
        if work is None and self.reads:
            work = self.reads.popleft()
        work = work or self._take_write()
        if work is not None:
            self._reads_in_a_row = 0 if isinstance(work, Write) or not self.writes else self._reads_in_a_row + 1
            self.running.append(work)
        return work

    def finish(self, work: Work) -> None:
        """It is not being carried out any more."""
        self.running = [each for each in self.running if each is not work]

    def waiting_writes(self, concerned: Removal) -> list[Write]:
        """Writes that wait, of the keys of a removal."""
        if concerned.keys is not None and self._written_keys.isdisjoint(concerned.keys):
            return []
        return [work for work in self.writes if concerned.concerns(work.key)]

    def drop_ended(self) -> None:
        """Forget reads and writes that wait and whose keys have ended."""
        self.reads = deque(work for work in self.reads if work.waits)
        self.writes = deque(work for work in self.writes if work.waits)

    def clear(self) -> None:
        """Forget all that waits."""
        self.reads.clear()
        self.writes.clear()
        self.removals.clear()

    def waiting(self) -> Iterator[Work]:
        """All that waits."""
        yield from self.removals
        yield from self.reads
        yield from self.writes

    def _take_removal(self) -> Removal | None:
        for at, work in enumerate(self.removals):
            if not work.waits or not any(isinstance(each, Write) and work.concerns(each.key) for each in self.running):
                del self.removals[at]
                return work
        return None

    def _take_write(self) -> Write | None:
        removals = [*self.removals, *(each for each in self.running if isinstance(each, Removal))]
        if any(each.keys is None for each in removals):
            return None
        busy = {each.key for each in self.running if isinstance(each, Write)}
        for at, work in enumerate(self.writes):
            if work.key not in busy and not any(each.concerns(work.key) for each in removals):
                del self.writes[at]
                return work
        return None
