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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvoffload.cache.tiering.job import Outcome, TierJob

Run = Callable[[Sequence[int]], list[Outcome]]
"""Does the work of some positions of a job, and returns the outcome of each."""

READS_PER_WRITE = 16  # as long as both wait
_MOST_OLD_KEYS = 4096


@dataclass(slots=True, eq=False)
class Work:
    """Keys of a job that are worked on together, neighbours in it.

    Attributes:
        job, positions: the keys.
        run: does it, given those positions that have no outcome when it begins.
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
    """Keys that are put."""

    @property
    def keys(self) -> tuple[bytes, ...]:
        return self.job.keys[self.positions.start : self.positions.stop]


@dataclass(slots=True, eq=False)
class Removal(Work):
    """Attributes: keys: that are removed; None: all."""

    keys: frozenset[bytes] | None

    def concerns(self, write: Write) -> bool:
        """Whether it removes a key that is put."""
        return self.keys is None or not self.keys.isdisjoint(write.keys)

    def concerned(self, write: Write) -> list[int]:
        """Positions of the keys of a write that it removes."""
        keys = write.job.keys
        return [at for at in write.positions if self.keys is None or keys[at] in self.keys]


class WorkQueues:
    """What waits and what is being carried out.

    Attributes:
        reads, writes, removals: what waits, oldest first.
        read_keys, write_keys: of how many keys.
        running: what was taken and has not been finished: one for each busy thread.
    """

    def __init__(self) -> None:
        self.reads = deque[Work]()
        self.writes = deque[Write]()
        self.removals = deque[Removal]()
        self.read_keys = self.write_keys = 0
        self.running: list[Work] = []
        self._reads_in_a_row = 0
        self._written_keys = set[bytes]()  # those of all writes that wait, and of some that did

    def add_reads(self, works: Sequence[Work]) -> None:
        """Queue them."""
        self.reads.extend(works)
        self.read_keys += _keys_of(works)

    def add_writes(self, works: Sequence[Write]) -> None:
        """Queue them."""
        if len(self._written_keys) > 2 * self.write_keys + _MOST_OLD_KEYS:
            self._written_keys = {key for work in self.writes for key in work.keys}
        for work in works:
            self._written_keys.update(work.keys)
        self.writes.extend(works)
        self.write_keys += _keys_of(works)

    def take(self) -> Work | None:
        """What may begin now, which counts as running from here on; None if nothing may."""
        write_first = self._reads_in_a_row >= READS_PER_WRITE
        work: Work | None = self._take_removal() or (self._take_write() if write_first else None)
        if work is None and self.reads:
            work = self.reads.popleft()
            self.read_keys -= len(work.positions)
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
        return [work for work in self.writes if concerned.concerns(work)]

    def drop_ended(self) -> None:
        """Forget reads and writes that wait and whose keys have ended."""
        self.reads = deque(work for work in self.reads if work.waits)
        self.writes = deque(work for work in self.writes if work.waits)
        self.read_keys, self.write_keys = _keys_of(self.reads), _keys_of(self.writes)

    def clear(self) -> None:
        """Forget all that waits."""
        self.reads.clear()
        self.writes.clear()
        self.removals.clear()
        self.read_keys = self.write_keys = 0

    def waiting(self) -> Iterator[Work]:
        """All that waits."""
        yield from self.removals
        yield from self.reads
        yield from self.writes

    def _take_removal(self) -> Removal | None:
        for at, work in enumerate(self.removals):
            if not work.waits or not any(isinstance(each, Write) and work.concerns(each) for each in self.running):
                del self.removals[at]
                return work
        return None

    def _take_write(self) -> Write | None:
        removals = [*self.removals, *(each for each in self.running if isinstance(each, Removal))]
        if any(each.keys is None for each in removals):
            return None
        busy = {key for each in self.running if isinstance(each, Write) for key in each.keys}
        for at, work in enumerate(self.writes):
            if busy.isdisjoint(work.keys) and not any(each.concerns(work) for each in removals):
                del self.writes[at]
                self.write_keys -= len(work.positions)
                return work
        return None


def _keys_of(works: Iterable[Work]) -> int:
    return sum(len(work.positions) for work in works)
