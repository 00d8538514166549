"""Queues of runs of keys, and the heads of these queues, from which keys are evicted; see `prefix`. Changes nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import filterfalse
from math import inf
from typing import Any, TypeAlias

from kvoffload.cache.policies.base import Protected
from kvoffload.cache.policies.reuse import EDGES

BATCH = 128  # the most keys that are looked at together

Run: TypeAlias = Any  # `prefix.Run`, which imports this module
Notes: TypeAlias = dict[Any, Any]  # of an open request: its latest run of each number of uses
Queue: TypeAlias = OrderedDict[Run, None]
Bound: TypeAlias = tuple[float, int]


class LowerBounds:
    """The chain worth of the first run of each queue, which no later run is below.

    It changes when another run comes first, or the age of that run comes to another range: until then it is kept.
    """

    def __init__(self) -> None:
        self._chain_worths: list[list[float]] | None = None
        self._known: list[tuple[int, float, float]]  # by kind: of a run of this time, until this moment, its bound

    def of(self, queues: list[Queue], chain_worths: list[list[float]], now: int) -> list[Bound]:
        """The bound and the kind of each queue that is not empty."""
        if chain_worths is not self._chain_worths:
            self._chain_worths, self._known = chain_worths, [(0, 0, 0.0)] * len(queues)
        found: list[Bound] = []
        for kind, queue in enumerate(queues):
            if not queue:
                continue
            time = next(iter(queue)).time
            known_time, until, bound = self._known[kind]
            if time != known_time or now >= until:
                place = bisect_right(EDGES, now - time)
                until = time + EDGES[place] if place < len(EDGES) else inf
                bound = chain_worths[kind][place - 1]
                self._known[kind] = time, until, bound
            found.append((bound, kind))
        return found


class Heads:
    """The head of each queue, from which keys are evicted.

    Within a queue the chain worth falls with age, so that of the first run is a lower bound of its head's: of a queue
    that is not the lowest by that bound, no key is looked at.

    Args:
        chain_worths: by kind and range of ages; see `ReuseModel`.
        now: in blocks, from which ages are counted.
        bounds: see `LowerBounds`.
        walk: a function: the keys of a queue that may be evicted, see `walk`.
    """

    def __init__(
        self,
        queues: list[Queue],
        chain_worths: list[list[float]],
        now: int,
        bounds: list[Bound],
        walk: Callable[[Queue], Iterator[tuple[Run, list[bytes]]]],
    ) -> None:
        self._queues = queues
        self._walk = walk
        self._chain_worths = chain_worths
        self._now = now
        self._bounds = bounds
        self._heads: dict[int, _Head] = {}

    def lowest(self) -> _Head | None:
        """The head of the lowest chain worth, advanced to keys that may be evicted; None if none has any."""
        bounds, heads = self._bounds, self._heads
        while bounds:
            bound = min(bounds)
            kind = bound[1]
            head = heads.get(kind) or heads.setdefault(kind, _Head(self._walk(self._queues[kind])))
            if not head.advance():
                bounds.remove(bound)
                continue
            worth = self._chain_worths[kind][bisect_right(EDGES, self._now - head.run.time) - 1]
            if worth == bound[0]:
                return head
            bounds[bounds.index(bound)] = worth, kind
        return None


class _Head:
    """The keys of one queue that may be evicted, one batch after another. Changes nothing."""

    def __init__(self, batches: Iterator[tuple[Run, list[bytes]]]) -> None:
        self._batches = batches
        self._keys: list[bytes] = []
        self.run: Run

    def advance(self) -> bool:
        """Advance to the next keys that may be evicted, of this run or a later one; False if there are none."""
        if not self._keys:
            found = next(self._batches, None)
            if found is None:
                return False
            self.run, self._keys = found
        return True

    def take(self, count: int) -> list[bytes]:
        """Up to `count` of them."""
        taken, self._keys = self._keys[:count], self._keys[count:]
        return taken


def walk(
    run_of: dict[bytes, Run], protected: Protected, request: Notes | None, size: int, queue: Queue
) -> Iterator[tuple[Run, list[bytes]]]:
    """The keys of a queue that may be evicted: run by run, the deepest key first. `size`: of the first batch."""
    for run in queue:
        if request is not None and run.request is request:
            continue  # without looking at its keys, which are all protected
        end = len(run.keys)
        while end > 0:
            begin = max(0, end - size)
            live = [key for key in reversed(run.keys[begin:end]) if run_of.get(key) is run]
            end, size = begin, min(2 * size, BATCH)
            found = list(filterfalse(protected, live))
            if found:
                yield run, found
