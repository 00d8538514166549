"""KeyMemory: of what kind a key was when it was asked for last, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Sighting:
    """Keys of one request that are of one kind.

    Attributes:
        uses: of these keys, so far; `readback.MOST_USES` stands for more, too.
        kind: see `readback.kind_of`.
        time: blocks that had been stored in the host when they were asked for.
        live: keys of which this is the latest sighting, and which are remembered.
    """

    __slots__ = ("kind", "live", "time", "uses")

    def __init__(self, uses: int, kind: int, time: int) -> None:
        self.uses = uses
        self.kind = kind
        self.time = time
        self.live = 0


class KeyMemory:
    """The latest sighting of the keys that were asked for last: at least half of `most`, and no more than that.

    Two generations: when the young one is full, the old one is forgotten as a whole, without looking at its keys. 100
    to 200 bytes a key, the key included.
    """

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._young: dict[bytes, Sighting] = {}
        self._old: dict[bytes, Sighting] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def recall(self, key: bytes) -> Sighting | None:
        """The latest sighting of a key, None if it is not remembered."""
        return self._young.get(key) or self._old.get(key)

    def see(self, key: bytes, sighting: Sighting) -> list[tuple[Sighting, int]]:
        """Remember a key, which is then no key of the sighting before; what is forgotten, with its number of keys."""
        sighting.live += 1
        young, old = self._young, self._old
        if key in old:
            del old[key]
        elif key not in young and len(young) >= self._half:
            self._old, self._young = young, {key: sighting}
            forgotten = list(Counter(old.values()).items())
            for other, count in forgotten:
                other.live -= count
            return forgotten
        young[key] = sighting
        return []


def living(sightings: Iterable[Sighting]) -> list[Sighting]:
    """Those of which a key is remembered."""
    return [sighting for sighting in sightings if sighting.live > 0]
