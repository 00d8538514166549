"""WriteAdmission: which blocks of a cache are worth writing to the disk below it.

When a request ends, its keys in the host and not on the disk may be written. Each has a kind, and a model
estimates the gain of writing a block of that kind. A key is of use only with the keys before it; so leading keys are
written: those with the highest sum of gains.

The model learns how many reads a written block brings a disk from the blocks that are asked for again.

Age is counted in blocks stored in the host. If all were written, as many blocks would enter the disk, and a block would
leave it unread at an age of the disk's capacity; if fewer are written, later. That age is the *horizon*. For each
*kind* of blocks (see `kind_of`) and range of ages, the model counts the blocks asked for again at that age when no
longer in the host, and the exposure: blocks times the ages that they passed through. Uses by exposure is the rate at
that age (a period life table; Kaplan and Meier, "Nonparametric Estimation from Incomplete Observations", 1958: waiting
blocks count as far as they have waited). The rates up to the horizon give the chance of another use; the chances of the
first, the second and all later uses give the reads that a written block brings. Old counts fade.

A block is worth its write if it is expected to bring enough reads, as in Eisenman et al., "Flashield: a Hybrid
Key-value Cache that Controls Flash Write Amplification" (NSDI 2019). Here the expectation is that of a prefix cache,
and a write is compared with one at the next use of the block, which would be computed once more.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import exp, log, log2
from operator import mul

from kvoffload.cache.tiering.writer import WriteChoice
from kvoffload.internal.checks import at_least

MOST_USES = 3  # blocks used so often or more often are of one kind
_BRANCHES = MOST_USES + 1
_DEPTHS = 8
_GROUPS = 2 * MOST_USES
KINDS = _GROUPS + _BRANCHES * _DEPTHS

_RANGES = 12  # of ages below the disk's capacity
_RANGES_PER_DOUBLING = 1.5
_OPTIMISM = 1.25  # reads that a block of an unknown kind is taken to bring, for each that its write has to bring
_LEAST_OPTIMISM = 0.05
_MOST_CHANCE = 0.98  # no block is expected to bring more than 49 reads
_OWN_WEIGHT = 64.0  # blocks of the group that count in a kind's rates
_PRIOR_WEIGHT = 8.0  # unknown blocks that count in a group's rates
_MODEL_FADING = 0.9  # what an observation weighs after another round of learning

LEAST_OF_KNOWN = 0.1  # reads that the write of a block asked for before has to bring, at most


def kind_of(uses: int, is_end: bool, parent_uses: int, depth: int) -> int:
    """Return the kind of a block: its uses, whether it ends its request, and, for a first use, where it lies.

    Args:
        uses: 1 to `MOST_USES`; more count as `MOST_USES`.
        is_end: the last block of its request: often partly filled, and then never asked for again.
        parent_uses: earlier uses of the last block of the request that had been asked for before, 0 to `MOST_USES`: a
            shared beginning has many, the history of a conversation one; 0: the request begins with new blocks.
        depth: new blocks of the request up to this one, itself included.
    """
    if uses == 1 and not is_end:
        return _GROUPS + parent_uses * _DEPTHS + max(min(depth.bit_length(), _DEPTHS) - 1, 0)
    return 2 * (min(uses, MOST_USES) - 1) + is_end


DEEPEST = 1 << _DEPTHS - 1
FIRST_USES = [[kind_of(1, False, parent, depth) for depth in range(DEEPEST + 1)] for parent in range(_BRANCHES)]
"""`kind_of` first uses, by the parent's uses and the depth, at most `DEEPEST`; of depth 0 there are none."""


def _group_of(kind: int) -> int:
    return 0 if kind >= _GROUPS else kind


class ReadbackModel:
    """Learns from observations; estimates the gain of writing a block. Until it has learned, all are worth it.

    Args:
        capacity: keys that the disk holds, the horizon at first.
        longest: the longest horizon.
        least_hits: reads that a write has to bring.

    Attributes:
        chances: by kind: the chance of another use within the horizon, when the host no longer holds the block.
        gains: by kind: expected reads above those that a write has to bring; above 0 if a block is worth its write now
            rather than at its next use.
    """

    def __init__(self, capacity: int, longest: int, least_hits: float) -> None:
        self._edges = _edges(capacity, longest)
        self._widths = [after - before for before, after in pairwise(self._edges)]
        self._least = [least_hits, *[min(least_hits, LEAST_OF_KNOWN)] * (MOST_USES - 1)]
        prior = log(1 + max(_OPTIMISM * least_hits, _LEAST_OPTIMISM)) / capacity  # uses for each block of age
        of_first = [prior if edge < capacity else 0.0 for edge in self._edges[:-1]]
        self._priors = [of_first] * 2 + [[prior] * len(self._widths)] * (_GROUPS - 2)
        self._uses = _table(len(self._edges))
        self._exposures = _table(len(self._edges))
        self.chances = [0.0] * KINDS
        self.gains = [0.0] * KINDS
        self.learn(capacity)

    def reused(self, kind: int, age: int, blocks: int) -> None:
        """Count blocks of a kind that were asked for again at this age, and not found in the host."""
        self._uses[kind][bisect_right(self._edges, age) - 1] += blocks

    def waited(self, kind: int, begin: int, end: int, blocks: int) -> None:
        """Count blocks of a kind that have come from age `begin` to age `end` since they were counted last."""
        row, edges, last = self._exposures[kind], self._edges, len(self._widths)
        place = bisect_right(edges, begin) - 1
        while begin < end and place < last:
            stop = edges[place + 1]
            if end < stop:
                stop = end
            row[place] += (stop - begin) * blocks
            begin, place = stop, place + 1

    def learn(self, horizon: float) -> None:
        """Estimate chances and gains from the observations; these weigh less from now on.

        Gains are computed backwards from the most uses: the reads that a write brings now, less the reads that it
        brings if it waits. A block that waits is written at its next use, if it has one and is worth it then.

        Args:
            horizon: the age that a block reaches on the disk without being read.
        """
        widths = [max(0.0, min(width, horizon - edge)) for edge, width in zip(self._edges, self._widths, strict=False)]
        members: list[list[int]] = [[] for _ in range(_GROUPS)]
        for kind in range(KINDS):
            members[_group_of(kind)].append(kind)
        groups = [self._rates(*given, _PRIOR_WEIGHT) for given in zip(members, self._priors, strict=True)]
        for kind in range(KINDS):
            group = groups[_group_of(kind)]
            rates = group if 0 < kind < _GROUPS else self._rates([kind], group, _OWN_WEIGHT)
            self.chances[kind] = 1 - exp(-sum(map(mul, rates, widths)))
        next_reads = next_value = 0.0
        for uses in range(MOST_USES, 0, -1):
            least, middle = self._least[uses - 1], kind_of(uses, False, 0, 1)
            for kind in (kind_of(uses, True, 0, 1), *(range(_GROUPS, KINDS) if uses == 1 else [middle])):
                chance = min(self.chances[kind], _MOST_CHANCE)
                reads = chance / (1 - chance) if uses == MOST_USES else chance * (1 + next_reads)
                self.gains[kind] = reads - least - chance * next_value
            next_reads, next_value = reads, max(reads - least, chance * next_value)
        for table in (self._uses, self._exposures):
            table[:] = [[_MODEL_FADING * count for count in row] for row in table]

    def _rates(self, kinds: list[int], base: list[float], weight: float) -> list[float]:
        """Return for each range the uses a block of age, of these kinds and `weight` blocks with rates `base`."""
        rates = []
        for place, width in enumerate(self._widths):
            uses = sum(self._uses[kind][place] for kind in kinds)
            exposure = sum(self._exposures[kind][place] for kind in kinds)
            rates.append((uses + weight * base[place] * width) / (exposure + weight * width))
        return rates


def _edges(capacity: int, longest: int) -> list[int]:
    """Return where ranges of ages begin, and where the last one ends; `capacity` is among these."""
    below = {round(capacity * 2 ** (-step / _RANGES_PER_DOUBLING)) for step in range(_RANGES)}
    doublings = max(0.0, log2(max(longest, 1) / capacity))
    above = {
        round(capacity * 2 ** (step / _RANGES_PER_DOUBLING))
        for step in range(int(doublings * _RANGES_PER_DOUBLING) + 1)
    }
    return sorted({0, capacity, max(capacity, longest)} | below | above)


def _table(ranges: int) -> list[list[float]]:
    return [[0.0] * ranges for _ in range(KINDS)]


DEFAULT_LEAST_HITS = 0.22
_REMEMBERED_SHARE = 4  # times the disk's capacity, within these two bounds
_LATER_USES = [kind_of(before + 1, False, 0, 0) for before in range(MOST_USES + 1)]  # by the uses before
_FEWEST_REMEMBERED = 1 << 17
_MOST_REMEMBERED = 1 << 21
_SHORTEST_ROUND = 1_024  # blocks asked for between two rounds of learning
_FADING = 0.9
_ROUNDS = 16  # in the time of a disk's capacity


class WriteAdmission(WriteChoice):
    """Follows the events of a cache above a disk, and chooses blocks to write. No threads, no clock, no randomness.

    The same events give the same answers. One caller at a time. It sees a request as these calls:

        promoted(keys read from the disk)   stored(keys computed)   ended(all of its keys, once) -> keys to write

    It returns only keys that are in the host and not on the disk by the events so far. The caller may write fewer, and
    reports the written ones. Keys that are not written may be returned again at a later use.

    Takes 70 to 150 bytes for each of up to `remembered` keys, and 150 for each key in the host.

    Args:
        capacity: keys that the disk holds.
        least_hits: how sparing: the reads from the disk that a write has to bring. 0 writes nearly all; 0.22 leaves out
            blocks that are hardly ever read; at 1 or more, blocks are written when asked for a second time, and at
            first use only if they nearly always are asked for again. For blocks that were asked for before, at most 0.1
            counts.
        remembered: keys whose earlier uses are known; None: four times the capacity, from 131,072 to 2,097,152.
    """

    learns = True

    def __init__(self, capacity: int, *, least_hits: float = DEFAULT_LEAST_HITS, remembered: int | None = None) -> None:
        capacity = at_least("capacity", capacity, 1)
        if isinstance(least_hits, bool) or not isinstance(least_hits, int | float):
            raise TypeError(f"least_hits must be a number, got {least_hits!r:.80}")
        if not 0 <= least_hits < math.inf:
            raise ValueError(f"least_hits must be a finite number of at least 0, got {least_hits}")
        if remembered is None:
            remembered = min(max(_REMEMBERED_SHARE * capacity, _FEWEST_REMEMBERED), _MOST_REMEMBERED)
        self.capacity = capacity
        self.least_hits = float(least_hits)
        self.remembered = at_least("remembered", remembered, 1)
        self._memory = KeyMemory(self.remembered)
        self._longest = max(1, self.remembered // 2)  # ages that are seen
        self._shortest = min(capacity, self._longest)
        self._model = ReadbackModel(self._shortest, self._longest, self.least_hits)
        self._sightings: list[Sighting] = []  # at least all that keys are remembered with, the oldest first
        self._on_disk: dict[bytes, bool] = {}  # keys in the host, and whether the disk has them, too
        self._arrived: set[bytes] = set()  # those that came to the host after the latest request with them had ended
        self._now = 0  # blocks stored in the host
        self._learned_at = 0
        self._stored_lately = self._written_lately = 0.0  # blocks, those of earlier rounds fading
        self._until_round = self._round = max(_SHORTEST_ROUND, capacity // _ROUNDS)

    def __repr__(self) -> str:
        counts = f"{len(self._on_disk)} keys in the host, {len(self._memory)} remembered"
        return f"WriteAdmission(least_hits={self.least_hits:g}, {counts}, {self._now} blocks stored)"

    # what happens -------------------------------------------------------------------------------------------------

    def stored(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        fresh = [key for key in keys if key not in self._on_disk]
        self._now += len(fresh)
        self._on_disk.update(dict.fromkeys(fresh, False))
        self._arrived.update(fresh)
        return ()

    def promoted(self, keys: Sequence[bytes]) -> None:
        self._arrived.update(key for key in keys if key not in self._on_disk)
        self._on_disk.update(dict.fromkeys(keys, True))

    def written(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._on_disk:
                self._on_disk[key] = True
                self._written_lately += 1

    def left_disk(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._on_disk:
                self._on_disk[key] = False

    def left_host(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._on_disk.pop(key, None)
            self._arrived.discard(key)

    def resynchronise(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        there = set(keys)
        self.left_host([key for key in self._on_disk if key not in there])
        return self.stored(keys)

    # which keys to write ------------------------------------------------------------------------------------------

    def ended(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys to write now that a request with these keys has ended, in the order of the request."""
        unique = keys if len(set(keys)) == len(keys) else list(dict.fromkeys(keys))
        kinds = self._see(unique)
        self._arrived.difference_update(unique)
        gains, candidates = self._model.gains, list[bytes]()
        gain = highest = 0.0
        chosen = 0  # the leading candidates with the highest sum of gains; none if no sum is above 0
        for key, kind in zip(unique, kinds, strict=True):
            on_disk = self._on_disk.get(key)
            if on_disk is None:  # neither those behind it nor itself can be read back as a prefix
                break
            if not on_disk:
                candidates.append(key)
                gain += gains[kind]
                if gain > highest:
                    highest, chosen = gain, len(candidates)
        self._until_round -= len(unique)
        if self._until_round <= 0:
            self._learn()
        return candidates[:chosen]

    def _see(self, keys: Sequence[bytes]) -> list[int]:
        """Observe the uses of a request's keys, and remember them; returns the kind of each."""
        arrived, on_disk, now = self._arrived, self._on_disk, self._now
        left: dict[Sighting, int] = {}
        reused: dict[Sighting, int] = {}
        kinds: list[int] = []
        depth = parent_uses = 0
        known = self._memory.recall(keys)
        for key, before in zip(keys, known, strict=True):
            if before is None:
                depth += 1
                kinds.append(FIRST_USES[parent_uses][depth if depth < DEEPEST else DEEPEST])
                continue
            parent_uses = parent_uses if depth else before.uses
            left[before] = left.get(before, 0) + 1
            if key in arrived or key not in on_disk:
                reused[before] = reused.get(before, 0) + 1
            kinds.append(_LATER_USES[before.uses])
        if keys:
            kinds[-1] = kind_of(1 if known[-1] is None else known[-1].uses + 1, True, 0, 0)
        for before, count in left.items():
            before.live -= count
        for before, count in reused.items():
            self._model.reused(before.kind, now - before.time, count)
        self._expose(left.items())
        fresh = {kind: Sighting(1 if kind >= _GROUPS else kind // 2 + 1, kind, now) for kind in kinds}
        for kind, count in Counter(kinds).items():
            fresh[kind].live = count
        self._sightings += fresh.values()
        self._expose(self._memory.see(keys, [fresh[kind] for kind in kinds]))
        return kinds

    def _expose(self, left: Iterable[tuple[Sighting, int]]) -> None:
        """Count keys of these sightings that have waited since the latest round of learning."""
        now, learned_at, waited = self._now, self._learned_at, self._model.waited
        for sighting, count in left:
            waited(sighting.kind, max(0, learned_at - sighting.time), now - sighting.time, count)

    def _learn(self) -> None:
        self._sightings = [sighting for sighting in self._sightings if sighting.live > 0]
        self._until_round = max(self._round, len(self._sightings) // 2)  # so that a round costs little a key
        self._expose((sighting, sighting.live) for sighting in self._sightings)
        self._stored_lately += self._now - self._learned_at
        self._learned_at = self._now
        # A block that is not read leaves the disk at this age, if as many are written as lately.
        age = self.capacity * self._stored_lately / max(1.0, self._written_lately)
        self._model.learn(min(max(age, self._shortest), self._longest))
        self._stored_lately *= _FADING
        self._written_lately *= _FADING


class Sighting:
    """Keys of one request and one kind.

    Attributes:
        uses: of these keys, so far; at most `MOST_USES` is counted.
        kind: see `kind_of`.
        time: blocks that had been stored in the host when they were asked for.
        live: keys that are remembered with this sighting, their latest.
    """

    __slots__ = ("kind", "live", "time", "uses")

    def __init__(self, uses: int, kind: int, time: int) -> None:
        self.uses = uses
        self.kind = kind
        self.time = time
        self.live = 0


class KeyMemory:
    """The latest sighting of the keys that were asked for last: at least half of `most` keys, and no more than `most`.

    Two generations: when the young one is full, the old one is forgotten as a whole. 70 to 150 bytes a key.
    """

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._young: dict[bytes, Sighting] = {}
        self._old: dict[bytes, Sighting] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def recall(self, keys: Sequence[bytes]) -> list[Sighting | None]:
        young, old = self._young, self._old
        return [young.get(key) or old.get(key) for key in keys]

    def see(self, keys: Sequence[bytes], sightings: Sequence[Sighting]) -> list[tuple[Sighting, int]]:
        """Remember keys, no repeats, by these sightings. Returns forgotten sightings with their number of keys.

        The caller has counted the keys as `live` in `sightings`, and no longer in earlier ones.
        """
        forgotten: list[tuple[Sighting, int]] = []
        for begin in range(0, len(keys), self._half):
            chunk = keys[begin : begin + self._half]
            if len(self._young) + len(chunk) > self._half:
                forgotten += self._forget(chunk)
            if not self._old.keys().isdisjoint(chunk):
                for key in chunk:
                    self._old.pop(key, None)
            self._young.update(zip(chunk, sightings[begin:], strict=False))
        return forgotten

    def _forget(self, seen: Sequence[bytes]) -> list[tuple[Sighting, int]]:
        """Forget the old generation, except keys being seen now; the young one becomes the old one."""
        for key in seen:
            self._old.pop(key, None)
        forgotten = list(Counter(self._old.values()).items())
        for sighting, count in forgotten:
            sighting.live -= count
        self._old, self._young = self._young, {}
        return forgotten
