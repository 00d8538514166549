"""How many reads a written block brings a disk, learned from the blocks that are asked for again.

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

from bisect import bisect_right
from itertools import pairwise
from math import exp, log, log2
from operator import mul

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
_PRIOR_WEIGHT = 8.0  # blocks of which nothing is known that count in a group's rates
_FADING = 0.9  # what an observation weighs after another round of learning

LEAST_OF_KNOWN = 0.1  # reads that the write of a block asked for before has to bring, at most


def kind_of(uses: int, is_end: bool, parent_uses: int, depth: int) -> int:
    """The kind of a block: its uses, whether it ends its request, and, for a first use, where it lies.

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


def uses_of(kind: int) -> int:
    return 1 if kind >= _GROUPS else kind // 2 + 1


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
        """So many blocks of a kind were asked for again at that age, and not found in the host."""
        self._uses[kind][bisect_right(self._edges, age) - 1] += blocks

    def waited(self, kind: int, begin: int, end: int, blocks: int) -> None:
        """So many blocks of a kind have come from age `begin` to age `end` since they were counted last."""
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
            table[:] = [[_FADING * count for count in row] for row in table]

    def _rates(self, kinds: list[int], base: list[float], weight: float) -> list[float]:
        """For each range, uses for each block of age, of these kinds and `weight` blocks with the rates `base`."""
        rates = []
        for place, width in enumerate(self._widths):
            uses = sum(self._uses[kind][place] for kind in kinds)
            exposure = sum(self._exposures[kind][place] for kind in kinds)
            rates.append((uses + weight * base[place] * width) / (exposure + weight * width))
        return rates


def _edges(capacity: int, longest: int) -> list[int]:
    """Where ranges of ages begin, and where the last one ends; `capacity` is among these."""
    below = {round(capacity * 2 ** (-step / _RANGES_PER_DOUBLING)) for step in range(_RANGES)}
    doublings = max(0.0, log2(max(longest, 1) / capacity))
    above = {
        round(capacity * 2 ** (step / _RANGES_PER_DOUBLING))
        for step in range(int(doublings * _RANGES_PER_DOUBLING) + 1)
    }
    return sorted({0, capacity, max(capacity, longest)} | below | above)


def _table(ranges: int) -> list[list[float]]:
    return [[0.0] * ranges for _ in range(KINDS)]
