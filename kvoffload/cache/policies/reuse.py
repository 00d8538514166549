"""How soon blocks of each kind are asked for again, learned while the cache works.

Age is counted in blocks: how many were asked for since a block was last used. A *kind* is how often a block was used (1
to 5, or more often), and, except for the last, whether it was the end of its latest request.

For every kind and range of ages the model counts blocks that were asked for again at that age, blocks that were
forgotten at that age, and blocks that have reached it. From these it estimates the chance of a use in each range, for a
block that has come so far (Kaplan and Meier, "Nonparametric Estimation from Incomplete Observations", 1958; blocks that
still wait count as far as they have waited). A block's *worth* follows: the uses to expect for each block of age that
it is kept on, if it is kept as long as suits it best. That is the hit density of Beckmann, Chen and Cidon, "LHD:
Improving Cache Hit Rate by Maximizing Hit Density" (NSDI 2018), estimated from survival.

On some traffic, such as agents' sessions that end without notice, a block's past says less than when it was last used.
So the model counts how many blocks were found, and how many LRU would have found. Where LRU would have found more, by a
leeway that is the wider the more of the uses LRU misses, the cache becomes LRU until it is no longer behind: it evicts
in LRU's order, and declines nothing. Being behind is forgotten in time, except where ages are measured in milliseconds,
too: there it has to be made up for, and then the cache declines again little by little. Below promises to come back,
the blocks that come without one have a room that others leave them, which their past does not predict: there, too, LRU
is the order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from math import inf
from typing import NamedTuple

import numpy as np

MOST_USES = 6  # blocks used so often or more often are of one kind
KINDS = 2 * (MOST_USES - 1) + 1
_FIRST_AGE = 128
_RANGES_PER_DOUBLING = 3
_DOUBLINGS = 33  # beyond a capacity of 2**40 blocks ages are not distinguished
_FADING = 0.8, 0.98  # what an observation weighs after another round of learning; and where ages are in time
_FEWEST = 2.0  # observations below which nothing is concluded
_OUTCOME_FADING = 0.99  # the same for what the cache and LRU have found
CHANCE = 128.0  # hits: so far the cache may be behind before it does as LRU does; or, if that is more,
_LEEWAY = 0.0003  # of LRU's hits, and
_DARING = 32.0  # so much more where LRU misses all uses, and by
_MISSING = 5  # this power of what it misses
_PROMISED = 0.5  # from this product of the promised share and LRU's hit rate on, the cache does as LRU does
_TRUST = 1.0, 0.2  # after it has done as LRU does, it trusts what it has learned more by so much each round; as _FADING

EDGES = (
    0,
    *(round(_FIRST_AGE * 2 ** (step / _RANGES_PER_DOUBLING)) for step in range(_RANGES_PER_DOUBLING * _DOUBLINGS)),
)
"""Where ranges of ages begin, in blocks; each ends where the next begins, and the last has no end."""


def kind_of(uses: int, is_end: bool) -> int:
    """A block's kind. Of two blocks in a chain, the earlier one's is never lower."""
    if uses >= MOST_USES:
        return KINDS - 1
    return 2 * (uses - 1) + (not is_end)


KIND_OF = [(0, 0), *((kind_of(uses, False), kind_of(uses, True)) for uses in range(1, MOST_USES + 1))]
"""`kind_of(uses, is_end)` as a table."""


class Survivors(NamedTuple):
    """Blocks that have not been asked for again so far."""

    kind: int
    age: int
    blocks: int


class ReuseModel:
    """Learns from observations; estimates the worth of blocks. Before it has learned, age and uses alone decide.

    Attributes:
        in_time: whether ages are measured in milliseconds, too. How long people and tools take changes slowly: then
            observations fade more slowly.
        promised: see `Policy.at`. The more comes with a promise, the less the others' past says what room there is for
            them: where LRU finds most of it, the cache does as LRU does.
        chain_worths: None: LRU's order is in use. Else, by kind and range of ages: the worth of a block together with
            all that may need it. Those were last used at the same time or earlier and not more often; so this is the
            highest worth over its kind and lower ones, at its age and above. A policy that evicts the lowest chain
            worth, and among equals the lowest kind, evicts a block only after the blocks that need it.
    """

    def __init__(self) -> None:
        self._outcome = [0.0, 0.0, 0.0]  # hits of the cache, and of LRU in its place; and all uses
        self._trust = 1.0  # in what was learned; 0: the cache does as LRU does
        self.promised, self.in_time = 0.0, False
        self._reused = _table()
        self._lost = _table()
        self._worth = [[(kind // 2 + 1) / (1 + age) for age in EDGES] for kind in range(KINDS)]
        self._known = [False] * KINDS
        self.chain_worths: list[list[float]] | None = _chain_worths(self._worth)

    def reused(self, kind: int, age: int, count: int, resident: bool, recent: int) -> None:
        """`resident`: the cache still had the blocks; LRU would have had `recent` of them."""
        outcome = self._outcome
        outcome[0] += count * resident
        outcome[1] += recent
        outcome[2] += count
        if outcome[0] < outcome[1] and self._is_behind():
            self.chain_worths, self._trust = None, 0.0
        self._reused[kind][bisect_right(EDGES, age) - 1] += count

    def lost(self, kind: int, age: int, count: int) -> None:
        self._lost[kind][bisect_right(EDGES, age) - 1] += count

    def worth(self, kind: int, age: int) -> float:
        """Uses to expect for each block of age that a block is kept from now on, as far as that is trusted. In LRU's
        order -1: nothing is declined for it.
        """
        return self._trust * self._worth[kind][bisect_right(EDGES, age) - 1] if self._trust else -1.0

    def promise(self, kind: int) -> float:
        """The worth of a block of a kind on arrival; infinite while nothing is known of the kind."""
        return self._worth[kind][0] if self._known[kind] else inf

    def learn(self, survivors: Iterable[Survivors]) -> None:
        """Estimate worths from all observations, which weigh less from now on; return to them unless LRU is ahead.

        An age with too few observations is worth half of the one before it.
        """
        waiting = _table()
        for kind, age, blocks in survivors:
            waiting[kind][bisect_right(EDGES, age) - 1] += blocks
        self._trust = 0.0 if self._is_behind() else min(1.0, self._trust + _TRUST[self.in_time])
        found, lru_found, _ = self._outcome
        self._outcome = [_OUTCOME_FADING * each for each in self._outcome]
        if self.in_time and found < lru_found:  # hits that were lost are not forgotten
            self._outcome[0] -= (1 - _OUTCOME_FADING) * (lru_found - found)
        chances = list(map(_chances, self._reused, self._lost, waiting))
        fading = _FADING[self.in_time]
        for kind, densities in enumerate(_best_densities(chances)):
            known, worths = len(chances[kind]), self._worth[kind]
            self._known[kind] |= known > 0
            worths[:known] = densities[:known]
            for index in range(max(1, known), len(EDGES)):
                worths[index] = worths[index - 1] / 2
            for table in (self._reused, self._lost):
                table[kind] = [fading * count for count in table[kind]]
        self.chain_worths = _chain_worths(self._worth) if self._trust else None

    def _is_behind(self) -> bool:
        found, lru_found, asked = self._outcome
        share = lru_found / max(1.0, asked)
        leeway = max(CHANCE, (_LEEWAY + _DARING * (1 - share) ** _MISSING) * lru_found)
        return self.promised * share > _PROMISED or found + leeway < lru_found


def _chain_worths(worths_of: list[list[float]]) -> list[list[float]]:
    """See `ReuseModel`."""
    found = []
    below = [0.0] * len(EDGES)
    for worths in worths_of:
        chain_worths, highest = below[:], 0.0
        for index in reversed(range(len(EDGES))):
            highest = max(highest, worths[index], below[index])
            chain_worths[index] = highest
        found.append(chain_worths)
        below = chain_worths
    return found


def _table() -> list[list[float]]:
    return [[0.0] * len(EDGES) for _ in range(KINDS)]


def _chances(reused: list[float], lost: list[float], waiting: list[float]) -> list[float]:
    """The chance of a use in each range of ages, for one kind; as far as there are enough observations."""
    reached = [0.0] * (len(EDGES) + 1)
    for index in reversed(range(len(EDGES))):
        reached[index] = reached[index + 1] + reused[index] + lost[index] + waiting[index]
    known = next((index for index, count in enumerate(reached) if count <= _FEWEST), len(EDGES))
    return [
        reused[index] / max(reached[index] - (lost[index] + waiting[index]) / 2, reused[index], 1e-9)
        for index in range(known)
    ]


def _best_densities(chances: Sequence[Sequence[float]]) -> list[list[float]]:
    """By kind and range of ages: the most uses for each block of age, over all ages until which a block that has come
    so far may be kept.

    All kinds and ages at once, one more range each step: a kind without chances there has no uses more, and as its
    blocks grow older its best stays what it was.
    """
    best, uses, kept = np.zeros((3, len(EDGES), KINDS))
    remaining = np.ones_like(best)
    for last, chance in enumerate(list(zip_longest(*chances, fillvalue=0.0))[: len(EDGES) - 1]):
        begun = slice(last + 1)
        found = remaining[begun] * chance
        uses[begun] += found
        kept[begun] += (EDGES[last + 1] - EDGES[last]) * (remaining[begun] - found / 2)
        remaining[begun] -= found
        np.maximum(best[begun], uses[begun] / kept[begun], out=best[begun])
    densities: list[list[float]] = best.T.tolist()
    return densities
