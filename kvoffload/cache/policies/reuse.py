"""How soon blocks of each kind are asked for again, learned while the cache works.

A block's age is how many blocks were asked for since it was last used; once requests name sessions, the milliseconds
since then are added. A *kind* is how often a block was used (1 to 5, or more often), and, except for the last, whether
it was the end of its latest request.

For every kind and range of ages the model counts blocks that were asked for again at that age, blocks that were
forgotten at that age, and blocks that have reached it. From these it estimates the chance of a use in each range, for a
block that has come so far (Kaplan and Meier, "Nonparametric Estimation from Incomplete Observations", 1958; blocks that
still wait count as far as they have waited, also before the time that is remembered). A block's *worth* follows: the
uses to expect for each block of age that it is kept on, if it is kept as long as suits it best. That is the hit density
of Beckmann, Chen and Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (NSDI 2018), estimated from
survival.

Blocks of one request are asked for again together or not at all, so a thousand of them may say no more than a few. What
a kind's own blocks say is therefore mixed with what blocks that were used once less say (for blocks used once: all
blocks), and that weighs as much as eight requests of the kind's usual size. This is shrinkage (Efron and Morris,
"Stein's Paradox in Statistics", 1977), with the size of clusters that Kish uses for design effects ("Survey Sampling",
1965).

On some traffic, such as agents' sessions that end without notice, how often a block was used says little; how recently
says more. So the model counts how many blocks were found, and how many LRU would have found. Where the cache is behind
by more than a leeway, it becomes LRU: it evicts in LRU's order, and declines nothing. The leeway is narrow where LRU
finds nearly all uses, and all of LRU's hits where it misses a third; in a cache smaller than the first range of ages,
in which the model sees less than recency does, it is always narrow. Being behind is forgotten slowly, so the cache
tries again. Where promises take much of the cache (see `Policy.at`), and LRU finds most of the rest, LRU's order is
used, too: how much room promises leave for other blocks is not seen in their past.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

MOST_USES = 6  # blocks used so often or more often are of one kind
KINDS = 2 * (MOST_USES - 1) + 1
_FIRST_AGE = 128
_RANGES_PER_DOUBLING = 3
_DOUBLINGS = 33  # older than about 2**40, ages are not distinguished
_FADING = 0.8, 0.98  # what an observation weighs after another round of learning (without time, with time)
_FEWEST = 2.0  # observations below which nothing is concluded
_BORROWED = 8.0  # what other kinds say weighs as much as so many requests of a kind
_SLOW_FADING = 0.99  # what hits weigh after another round, and how many blocks were used together
_LOSSES_FADING = 0.999  # what hits weigh that LRU had more
# The leeway in hits is max(CHANCE, (_LEEWAY + (what LRU misses of all uses / _MISSED) ** _POWER) * LRU's hits).
CHANCE, _LEEWAY, _MISSED, _POWER = 64.0, 0.0003, 1 / 3, 8
_PROMISED = 0.5  # from this product of the promised share and the share of uses that LRU finds on, LRU's order is used
_TRUST = 1.0, 0.2  # how much more it declines each round after LRU's order: with slots, and without (see `_FADING`)

_Table: TypeAlias = npt.NDArray[np.float64]

EDGES = (
    0,
    *(round(_FIRST_AGE * 2 ** (step / _RANGES_PER_DOUBLING)) for step in range(_RANGES_PER_DOUBLING * _DOUBLINGS)),
)
"""Where ranges of ages begin, in blocks; each ends where the next begins, and the last has no end."""


def kind_of(uses: int, is_end: bool) -> int:
    """Return a block's kind. Of two blocks in a chain, the earlier one's is never lower."""
    if uses >= MOST_USES:
        return KINDS - 1
    return 2 * (uses - 1) + (not is_end)


KIND_OF = [(0, 0), *((kind_of(uses, False), kind_of(uses, True)) for uses in range(1, MOST_USES + 1))]
"""`kind_of(uses, is_end)` as a table; nothing has 0 uses."""


class Survivors(NamedTuple):
    """Blocks that have not been asked for again so far."""

    kind: int
    age: int
    blocks: int


class ReuseModel:
    """Learns from observations; estimates the worth of blocks. Before it has learned, that is uses by age.

    Args:
        capacity: blocks of the cache.

    Attributes:
        in_time: whether ages have milliseconds, too. How long people and tools take changes slowly: then observations
            fade more slowly.
        promised: the share of the capacity that promises take, see `Policy.at`.
        chain_worths: None: LRU's order is in use. Else, by kind and range of ages: the worth of a block together with
            all that may need it. Those were last used at the same time or earlier and not more often; so this is the
            highest worth over its kind and lower ones, at its age and above. A policy that evicts the lowest chain
            worth, and among equals the lowest kind, evicts a block only after the blocks that need it.
    """

    def __init__(self, capacity: int) -> None:
        self._sees_ages = capacity >= EDGES[1]
        self._outcome = [0.0, 0.0, 0.0]  # blocks used again: found, found by LRU in its place, and all
        self._trust = 1.0  # in what was learned, where it declines; 0: the cache does as LRU does
        self.promised, self.in_time = 0.0, False
        self._reused = _table()
        self._lost = _table()
        self._worth = [[(kind // 2 + 1) / (1 + age) for age in EDGES] for kind in range(KINDS)]
        self._together = [[0.0, 0.0] for _ in range(KINDS)]  # of blocks used together: sum, sum of squares
        self._has_learned = False
        self.chain_worths: list[list[float]] | None = _chain_worths(self._worth)

    def reused(self, kind: int, age: int, count: int, resident: bool, recent: int) -> None:
        """Count blocks used again. `resident`: the cache still had them; LRU would have had at least `recent`."""
        outcome = self._outcome
        outcome[0] += count * resident
        outcome[1] += recent
        outcome[2] += count
        if outcome[0] < outcome[1] and self._is_behind():
            self.chain_worths, self._trust = None, 0.0
        self._reused[kind][bisect_right(EDGES, age) - 1] += count
        together = self._together[kind]
        together[0] += count
        together[1] += count * count

    def lost(self, kind: int, age: int, count: int) -> None:
        self._lost[kind][bisect_right(EDGES, age) - 1] += count

    def worth(self, kind: int, age: int) -> float:
        """Return the uses to expect for each block of age that a block is kept from now on, as far as that is trusted.
        In LRU's order -1: nothing is declined for it.
        """
        return self._trust * self._worth[kind][bisect_right(EDGES, age) - 1] if self._trust else -1.0

    def worth_on_arrival(self, kind: int) -> float:
        """Return the worth of a block of a kind on arrival; infinite before anything was learned."""
        return self._worth[kind][0] if self._has_learned else inf

    def learn(self, survivors: Iterable[Survivors]) -> None:
        """Estimate worths from all observations, which weigh less from now on. Evict by them again, or as LRU does.

        A range of ages with too few observations is worth half of the one before it.
        """
        waiting = _table()
        for kind, age, blocks in survivors:
            waiting[kind][bisect_right(EDGES, age) - 1] += blocks
        does_as_lru = self._is_behind() or self.promised * self._found_by_lru() > _PROMISED
        self._trust = 0.0 if does_as_lru else min(1.0, self._trust + _TRUST[self.in_time])
        lost = max(0.0, self._outcome[1] - self._outcome[0])
        self._outcome = [_SLOW_FADING * each for each in self._outcome]
        self._outcome[0] -= (_LOSSES_FADING - _SLOW_FADING) * lost
        size = [squares / blocks if blocks else 1.0 for blocks, squares in self._together]
        self._together = [[_SLOW_FADING * each for each in sums] for sums in self._together]
        chances = _chances(np.array(self._reused), np.add(self._lost, waiting), _BORROWED * np.array(size))
        known = chances.shape[1]
        self._has_learned |= known > 0
        for worths, densities in zip(self._worth, _best_densities(chances), strict=True):
            worths[:known] = densities
            for index in range(max(1, known), len(EDGES)):
                worths[index] = worths[index - 1] / 2
        fading = _FADING[self.in_time]
        for table in (self._reused, self._lost):
            table[:] = [[fading * count for count in counts] for counts in table]
        self.chain_worths = _chain_worths(self._worth) if self._trust else None

    def _is_behind(self) -> bool:
        found, lru_found, _ = self._outcome
        missed = 1 - self._found_by_lru() if self._sees_ages else 0.0
        leeway = (_LEEWAY + (missed / _MISSED) ** _POWER) * lru_found
        return found + max(CHANCE, leeway) < lru_found

    def _found_by_lru(self) -> float:
        """Return the share of all uses that LRU finds."""
        _, lru_found, uses = self._outcome
        return lru_found / max(1.0, uses)


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


def _chances(reused: _Table, left: _Table, borrowed: npt.NDArray[np.float64]) -> _Table:
    """Return the chance of a use, by kind and range of ages, as far as all kinds together have enough observations.

    Args:
        left: blocks that have come to a range without a use there: they are forgotten, or still wait.
        borrowed: by kind, as how many of its own blocks those that were used once less weigh.
    """
    uses, left = (np.vstack([table, table.sum(axis=0)]) for table in (reused, left))  # the last row: of all kinds
    reached = (uses + left)[:, ::-1].cumsum(axis=1)[:, ::-1]
    known = np.count_nonzero(reached[-1] > _FEWEST)
    uses, blocks = uses[:, :known], np.maximum(reached - left / 2, uses)[:, :known]
    chances: list[npt.NDArray[np.float64]] = []
    for kind in range(KINDS):
        prior = uses[-1] / blocks[-1] if kind < 2 else chances[kind - 2 if kind < KINDS - 1 else -1]
        chances.append(prior + (uses[kind] - prior * blocks[kind]) / (blocks[kind] + borrowed[kind]))
    return np.array(chances)


def _best_densities(chances: _Table) -> list[list[float]]:
    """Return the most uses for each block of age, by kind and range of ages, over all ages until which a block that has
    come so far may be kept. All kinds and ages at once, one more range each step.
    """
    known = chances.shape[1]
    best, uses, kept = np.zeros((3, known, KINDS))
    remaining = np.ones_like(best)
    for last, chance in enumerate(chances.T[: len(EDGES) - 1]):
        begun = slice(last + 1)
        found = remaining[begun] * chance
        uses[begun] += found
        kept[begun] += (EDGES[last + 1] - EDGES[last]) * (remaining[begun] - found / 2)
        remaining[begun] -= found
        np.maximum(best[begun], uses[begun] / kept[begun], out=best[begun])
    densities: list[list[float]] = best.T.tolist()
    return densities
