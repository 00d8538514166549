"""How often keys were offered for storing, so that what is offered once is not stored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Offers:
    """Counts of the keys that were offered last.

    Args:
        threshold: a key passes when it has been offered this many times; below 2, every key passes.
        most: keys that are counted; beyond that those whose last offer is longest ago are forgotten, but none of the
            offer at hand.

    Attributes:
        skipped: keys that did not pass, since the last `take_skipped`.
    """

    def __init__(self, threshold: int, most: int) -> None:
        self.threshold = threshold
        self.skipped = 0
        self._most = most
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def note(self, keys: Sequence[bytes]) -> None:
        """Count an offer of these keys."""
        counts = self._counts
        if self.threshold < 2:
            return
        for key in keys:
            if key in counts:
                counts[key] += 1
                counts.move_to_end(key)
        known = sum(key in counts for key in keys)
        for key in keys:
            if key in counts:
                continue
            if len(counts) >= self._most:
                if known == len(counts):
                    continue
                counts.popitem(last=False)
            counts[key] = 1
            known += 1

    def passing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that have been offered often enough; the others are counted as skipped."""
        if self.threshold < 2:
            return list(keys)
        found = [key for key in keys if self._counts.get(key, 0) >= self.threshold]
        self.skipped += len(keys) - len(found)
        return found

    def take_skipped(self) -> int:
        skipped, self.skipped = self.skipped, 0
        return skipped
