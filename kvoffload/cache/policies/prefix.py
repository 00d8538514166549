"""The default policy: keeps the keys worth most, prefixes longer than the keys that need them, and declines poor ones.

Keys of one request that were used equally often form a *run*. It knows when they were used, and lies in the queue of
its kind (see `reuse.py`), ordered by time. A request that stores its keys in pieces adds to its runs, which move to the
end of their queues. So the oldest of each kind stand at the heads of eleven queues, victims come from the head with the
lowest chain worth (in LRU's order: the least recently used one), and within a run the deepest key goes first:

    kind 0   run(t=310: e) run(t=402: j) ...        used once, the end of a request
    kind 1   run(t=310: b c d) run(t=402: g h i)    used once           <- goes from d to b
    ...
    kind 10  run(t=402: a)                          used six times or more

A key that is used again moves to a new run; the old run drops it when its turn comes. Where LRU's order would have
found more, the model says so (see `reuse.py`), and the same queues give that order.

Ages are counted in blocks asked for; once requests name sessions, in milliseconds, too: people and tools take as long
to answer when the cache is idle.

Assumptions: uses depend on how often and how long ago a block was used before, and whether it was its request's last,
by a rule that changes slowly; nothing else is assumed. Blocks that a request shares with no other are not worth
storing, once the model has seen that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, filterfalse, groupby, islice
from math import inf
from typing import Any, TypeAlias

from kvoffload.cache.policies.base import Policy, Protected, RequestCalls, RequestPolicy, Room
from kvoffload.cache.policies.reuse import EDGES, KIND_OF, KINDS, MOST_USES, ReuseModel, Survivors, kind_of

FEWEST_REMEMBERED = 24_576  # keys that are not resident, half of them at times: far beyond a small cache's own reach
_REMEMBERED_SHARE = 16  # in a large cache: the capacity divided by this
_SAMPLE = 4_096  # runs of one kind that are looked at in a round of learning
BATCH = 128  # the most keys that are looked at together
SHORTEST_ROUND = 8_192  # blocks asked for between two rounds of learning; at least the capacity

Notes: TypeAlias = dict[Any, Any]  # of an open request: its latest run of each number of uses
Bound: TypeAlias = tuple[float, int]


class Run:
    """Keys of one request with one number of uses; the deepest last."""

    __slots__ = ("counted", "keys", "kind", "live", "recent", "request", "time", "uses")

    def __init__(self, uses: int, kind: int, time: int, counted: bool, request: Notes | None = None) -> None:
        self.uses = uses
        self.kind = kind
        self.time = time
        self.counted = counted  # whether the use by the unfinished request is among `uses`
        self.keys: list[bytes] = []
        self.live = 0  # those of `keys` that are resident and have not moved on
        self.recent = 0  # how many keys of this use, resident or not, LRU would hold
        self.request = request  # the notes of the open request that has inserted or loaded them


Queue: TypeAlias = OrderedDict[Run, None]


class Prefix(Policy):
    """Evicts the key of least worth, where a key is worth at least as much as any that needs it; O(1) amortised.

    When the cache is full, it declines a new key that is worth no more than the keys it would displace, also one that
    it has never seen. It declines nothing before it has learned, nor while LRU would find more.

    Args:
        capacity: keys of the cache.
        declines: False: admits all new keys. Give that above tiers, which get only keys in slots; `policy="prefix"`
            does so by itself.
    """

    declines_with_room = False

    def __init__(self, capacity: int, *, declines: bool = True) -> None:
        self._declines = declines
        self._model = ReuseModel(capacity)
        self._queues: list[Queue] = [OrderedDict() for _ in range(KINDS)]
        self._run_of: dict[bytes, Run] = {}
        self._recency = Recency(capacity)
        self._gone = _Ghosts(max(FEWEST_REMEMBERED, capacity // _REMEMBERED_SHARE))
        self._round = max(SHORTEST_ROUND, capacity)
        self._now = 0  # blocks asked for, and milliseconds
        self._asked = 0  # blocks
        self._next_round = self._round
        self._seconds: float | None = None

    def insert(self, keys: Sequence[bytes]) -> None:
        self._use(keys, counted=True, ends=True)

    def load(self, keys: Sequence[bytes]) -> None:
        self._use(keys, counted=True, ends=False)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._use(keys, counted=False, ends=True)

    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        if evicted and keys:
            self._recency.room = len(self)
        for run, same in _neighbours(list(map(self._run_of.pop, keys)), keys):
            if evicted:
                self._remember(same, run)
            else:
                self._recency.leave(run, len(same))
            self._leave(run, len(same))

    def at(self, seconds: float, promised: float) -> None:
        """Measure ages in time, too, from now on."""
        self._model.promised, self._model.in_time = promised, True
        if self._seconds is not None:
            self._now += max(0, int(1e3 * seconds) - int(1e3 * self._seconds))
        self._seconds = seconds

    def for_request(self, notes: Notes) -> RequestPolicy:
        use = partial(self._use, counted=True, ends=False, request=notes)  # no key is its end until `touch` says so
        return RequestCalls(use, use, partial(self.make_room, request=notes))

    def victims(self, count: int, protected: Protected) -> list[bytes] | None:
        space = self.make_room((), -count, protected)
        return None if space is None else space.victims

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.victims(len(self), lambda _: False) or ())

    def __len__(self) -> int:
        return len(self._run_of)

    def __repr__(self) -> str:
        return f"Prefix({len(self)} keys, {len(self._gone)} remembered, {self._asked} blocks asked for)"

    # uses ---------------------------------------------------------------------------------------------------------

    def _use(  # noqa: C901  # one pass over the keys: a call for each case would cost every key one
        self, keys: Sequence[bytes], *, counted: bool, ends: bool, request: Notes | None = None
    ) -> None:
        """Move keys to runs of this moment. `counted`: an unfinished request uses them; else one has ended.

        With `ends` the last key is the end of a request. Keys that are not resident become so if `counted`. The keys of
        an open request (`request`: its notes) join the runs of its earlier keys. The cases of each part of `keys`:

        1. New: neither resident nor remembered. Its first use.
        2. Resident, and an unfinished request's use was counted; now that request has ended: no new use.
        3. Resident or remembered otherwise: one use more, which the model is told.

        Keys still not resident go to the ghosts. Old runs lose keys last: `_leave` sees by new runs which moved on.
        """
        fresh: dict[tuple[int, int, bool], Run] = {}
        absent: list[tuple[list[bytes], Run]] = []
        asked, last = 0, keys[-1] if ends and keys else None
        found, run_of = self._by_run(keys), self._run_of
        olds = () if request is None else {old for _, old, _ in found}
        for resident, old, part in found:
            uses, recent = 1, 0 if old is None else self._recency.leave(old, len(part))
            if old is not None and resident and old.counted and not counted:  # case 2
                uses = old.uses
            else:
                asked += len(part)
                if old is not None:  # case 3
                    uses = min(old.uses + 1, MOST_USES)
                    self._model.reused(old.kind, self._now - old.time, len(part), resident, recent)
            stays = resident or counted
            # A request's end has a kind of its own: often partly filled, it is then not asked for again.
            for is_end, same in ((False, part),) if part[-1] is not last else ((False, part[:-1]), (True, part[-1:])):
                if not same:
                    continue
                kind = KIND_OF[uses][is_end]
                run = fresh.get((uses, kind, stays))
                if run is None:
                    run = Run(uses, kind, self._now, counted) if request is None else self._joined(request, uses, olds)
                    fresh[uses, kind, stays] = run
                run.recent += len(same)
                if stays:
                    for key in same:
                        run_of[key] = run
                    run.keys += same
                else:
                    absent.append((same, run))
        for resident, old, part in found:
            if resident and old is not None:
                self._leave(old, len(part))
        self._recency.use(fresh.values(), len(keys), goes_on=counted)
        for same, run in absent:
            self._remember(same, run)
        # Runs of ghosts have no keys, and stay out of the queues; an open request's runs move to the recent end.
        for run in fresh.values():
            if run.keys:
                run.live = len(run.keys)
                self._queues[run.kind][run] = None
                self._queues[run.kind].move_to_end(run)
        self._now, self._asked = self._now + asked, self._asked + asked
        if self._asked >= self._next_round:
            self._learn()

    def _by_run(self, keys: Sequence[bytes]) -> list[tuple[bool, Run | None, list[bytes]]]:
        """Split keys into neighbours: resident ones of one run, remembered ones of one run, unknown ones.

        The remembered ones are forgotten.
        """
        found: list[tuple[bool, Run | None, list[bytes]]] = []
        for run, same in _neighbours(list(map(self._run_of.get, keys)), keys):
            if run is not None:
                found.append((True, run, same))
                continue
            gone = self._gone.recall(same)
            if gone is None:
                found.append((False, None, same))
            else:
                found += [(False, old, absent) for old, absent in _neighbours(gone, same)]
        return found

    def _joined(self, request: Notes, uses: int, olds: Collection[Run | None]) -> Run:
        """Return the run that keys of an open request with so many uses join.

        1. The run of its earlier keys, if that still lies in its queue, and all of its keys are in it.
        2. Else a new run. A key that left the old one may come back, and a run must not have it twice; `olds`: runs
           that keys are leaving now.
        """
        run = request.get(uses)
        if run is None or run in olds or run.live != len(run.keys) or run not in self._queues[run.kind]:
            run = request[uses] = Run(uses, KIND_OF[uses][False], self._now, True, request)
        run.time = self._now
        return run

    def _leave(self, run: Run, count: int) -> None:
        run.live -= count
        if run.live == 0:
            run.keys = []
        while run.keys and self._run_of.get(run.keys[-1]) is not run:
            run.keys.pop()
        queue = self._queues[run.kind]
        while queue and not next(iter(queue)).live:
            queue.popitem(last=False)

    def _remember(self, keys: list[bytes], run: Run) -> None:
        for old, count in self._gone.remember(keys, run):
            self._model.lost(old.kind, self._now - old.time, count)
            self._recency.leave(old, count)

    def _learn(self) -> None:
        """Have the model learn from all blocks that wait; in a long queue every `step`-th run stands for its
        neighbours.
        """
        self._next_round = self._asked + self._round
        waiting = [Survivors(run.kind, self._now - run.time, count) for run, count in self._gone.survivors()]
        for kind, queue in enumerate(self._queues):
            self._queues[kind] = living = OrderedDict.fromkeys(run for run in queue if run.live)
            for run in living:
                if 2 * run.live < len(run.keys):
                    run.keys = [key for key in run.keys if self._run_of.get(key) is run]
            step = max(1, len(living) // _SAMPLE)
            some = islice(living, 0, None, step)
            waiting += [Survivors(run.kind, self._now - run.time, run.live * step) for run in some]
        self._model.learn(waiting)

    # evicting -----------------------------------------------------------------------------------------------------

    def make_room(
        self, newcomers: Sequence[bytes], room: int, protected: Protected, request: Notes | None = None
    ) -> Room | None:
        """Decide as `Policy.make_room` does, and change nothing. If `room` is negative, `-room` more keys are evicted.
        `request`: the notes of an open request, for which `for_request` calls this; None: the keys are a whole request.

        1. One key has to go, and the first candidate may: found without iterators, in a third of the time.
        2. Otherwise: take victims from the lowest head until there is room. The last newcomers are declined while they
           are worth no more than the next victim.
        """
        admitted, victims = len(newcomers), list[bytes]()
        worths = self._worths(newcomers, ends=request is None)
        bounds = lower_bounds(self._queues, self._model.chain_worths, self._now)
        if admitted - room == 1 and bounds:
            run: Run = next(iter(self._queues[min(bounds)[1]]))
            key = run.keys[-1] if run.keys else b""
            if self._run_of.get(key) is run and (request is None or run.request is not request) and not protected(key):
                if worths and worths[-1] <= self._model.worth(run.kind, self._now - run.time):
                    return Room(admitted - 1, victims)
                return Room(admitted, [key])
        walks = partial(walk, self._run_of, protected, request, max(1, min(admitted - room, BATCH)))
        heads = self._heads(bounds, walks)
        while admitted - room > len(victims):
            head, keys = next(heads, (None, []))
            displaced_worth = -1.0 if head is None else self._model.worth(head.kind, self._now - head.time)
            while admitted and worths[admitted - 1] <= displaced_worth and admitted - room > len(victims):
                admitted -= 1
            if head is None:
                return None
            count = admitted - room - len(victims)
            victims += keys[:count]
            del keys[:count]
        return Room(admitted, victims)

    def _heads(
        self, bounds: list[Bound], walks: Callable[[Queue], Iterator[tuple[Run, list[bytes]]]]
    ) -> Iterator[tuple[Run, list[bytes]]]:
        """Yield the run of the lowest chain worth, with keys that may be evicted; the caller takes keys out of the list
        before it asks for the next. Keys of a queue are looked at only if its bound is the lowest.

        1. The queue with the lowest bound has no such key left: it drops out.
        2. Its head is worth the bound itself: that is the lowest.
        3. Its head is worth more: the bound rises to that, and the lowest is looked for again.
        """
        chain_worths, now = self._model.chain_worths, self._now
        walk_of: dict[int, Iterator[tuple[Run, list[bytes]]]] = {}
        head_of: dict[int, tuple[Run, list[bytes]]] = {}
        while bounds:
            bound = min(bounds)
            kind = bound[1]
            if kind not in head_of or not head_of[kind][1]:
                mine = walk_of.get(kind) or walk_of.setdefault(kind, walks(self._queues[kind]))
                head = next(mine, None)
                if head is None:
                    bounds.remove(bound)
                    continue
                head_of[kind] = head
            run, _ = head_of[kind]
            worth = run.time if chain_worths is None else chain_worths[kind][bisect_right(EDGES, now - run.time) - 1]
            if worth == bound[0]:
                yield head_of[kind]
            else:
                bounds[bounds.index(bound)] = worth, kind

    def _worths(self, newcomers: Sequence[bytes], ends: bool) -> list[float]:
        """Return the worth of newcomers on arrival; with `ends` the last is the end of its request."""
        if not newcomers or not self._declines:
            return [inf] * len(newcomers)
        known, worth_of = self._gone.glance(newcomers), self._model.worth_on_arrival
        if known is None:
            uses, worths = [0], [worth_of(KIND_OF[1][False])] * len(newcomers)
        else:
            uses = [0 if run is None else run.uses for run in known]
            worth = {before: worth_of(kind_of(1 + before, False)) for before in set(uses)}
            worths = list(map(worth.__getitem__, uses))
        if ends:
            worths[-1] = worth_of(kind_of(1 + uses[-1], True))
        return worths


class Recency:
    """What LRU would hold: the keys used last. It counts them by run, whether they are resident or not; O(runs).

    Attributes:
        room: the keys that it holds.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._runs: Queue = OrderedDict()  # the oldest first
        self._held = 0

    def leave(self, run: Run, count: int) -> int:
        """Take so many keys, used again or gone, out of a run. Returns how many of these LRU would hold."""
        held = min(count, run.recent)
        run.recent -= held
        self._held -= held
        if held and not run.recent:
            del self._runs[run]
        return held

    def use(self, runs: Collection[Run], count: int, *, goes_on: bool) -> None:
        """Count so many keys, which are used now, in these runs. The oldest ones beyond `room` go when their request
        ends: while it goes on, its keys stay, however old they are, and twice as many are held.
        """
        for run in runs:
            self._runs[run] = None
            self._runs.move_to_end(run)
        self._held += count
        if goes_on and self._held <= 2 * self.room:
            return
        while self._held > self.room:
            self.leave(next(iter(self._runs)), self._held - self.room)


class _Ghosts:
    """Keys that are not resident, with their last run: at least half of `most`, the latest.

    Two generations: when the young one is full, the old one is dropped as a whole, without looking at its keys.
    """

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._young: dict[bytes, Run] = {}
        self._old: dict[bytes, Run] = {}

    def glance(self, keys: Sequence[bytes]) -> list[Run | None] | None:
        """Return the run of each key, None for keys not remembered; None if no key is."""
        young, old = self._young, self._old
        if young.keys().isdisjoint(keys) and old.keys().isdisjoint(keys):
            return None
        return [young.get(key) or old.get(key) for key in keys]

    def recall(self, keys: Sequence[bytes]) -> list[Run | None] | None:
        """Do as `glance`, and forget the keys."""
        runs = self.glance(keys)
        if runs is not None:
            for key in keys:
                self._young.pop(key, None)
                self._old.pop(key, None)
        return runs

    def remember(self, keys: Sequence[bytes], run: Run) -> list[tuple[Run, int]]:
        """Remember the run of keys that are not remembered yet. Returns the forgotten ones: (run, number of keys)."""
        young = self._young
        for key in keys:
            young[key] = run
        if len(young) <= self._half:
            return []
        forgotten = _count_neighbours(self._old.values())
        self._old, self._young = young, {}
        return forgotten

    def survivors(self) -> list[tuple[Run, int]]:
        """Return how many keys are remembered with each run; a run may come several times."""
        return _count_neighbours(chain(self._old.values(), self._young.values()))

    def __len__(self) -> int:
        return len(self._old) + len(self._young)


def _neighbours(runs: Sequence[Run | None], keys: Sequence[bytes]) -> list[tuple[Any, list[bytes]]]:
    """Group keys that follow each other and have one run, with that run."""
    if runs and runs.count(runs[0]) == len(runs):
        return [(runs[0], list(keys))]
    found, begin = [], 0
    for run, same in groupby(runs):
        end = begin + len(list(same))
        found.append((run, list(keys[begin:end])))
        begin = end
    return found


def _count_neighbours(runs: Iterable[Run]) -> list[tuple[Run, int]]:
    """Count how often each run follows itself."""
    return [(run, len(list(same))) for run, same in groupby(runs)]


def lower_bounds(queues: list[Queue], chain_worths: list[list[float]] | None, now: int) -> list[Bound]:
    """Return the chain worth of the first run in each queue, which is a lower bound for the later ones, and the
    queue's kind.
    """
    bounds = list[Bound]()
    for kind, queue in enumerate(queues):
        if queue:
            time = next(iter(queue)).time
            worth = time if chain_worths is None else chain_worths[kind][bisect_right(EDGES, now - time) - 1]
            bounds.append((worth, kind))
    return bounds


def walk(
    run_of: dict[bytes, Run], protected: Protected, request: Notes | None, size: int, queue: Queue
) -> Iterator[tuple[Run, list[bytes]]]:
    """Yield the keys of a queue that may be evicted: run by run, the deepest key first. `size`: of the first batch."""
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
