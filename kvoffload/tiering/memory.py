"""KeyMemory: of what kind a key was when it was asked for last, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


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

    Two generations: when the young one is full, the old one is forgotten as a whole. 70 to 150 bytes a key.
    """

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._young: dict[bytes, Sighting] = {}
        self._old: dict[bytes, Sighting] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def recall(self, keys: Sequence[bytes]) -> list[Sighting | None]:
        """The latest sighting of each key, None where it is not remembered."""
        young, old = self._young, self._old
        return [young.get(key) or old.get(key) for key in keys]

    def see(self, keys: Sequence[bytes], sightings: Sequence[Sighting]) -> list[tuple[Sighting, int]]:
        """Remember keys, no repeats, by these sightings; what is forgotten, with its number of keys.

        The caller has counted the keys as `live` in `sightings`, and not in those before.
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
        """The old generation, but for keys that are seen at this moment; the young one is the old one from now on."""
        for key in seen:
            self._old.pop(key, None)
        forgotten = list(Counter(self._old.values()).items())
        for sighting, count in forgotten:
            sighting.live -= count
        self._old, self._young = self._young, {}
        return forgotten


def living(sightings: Iterable[Sighting]) -> list[Sighting]:
    """Those of which a key is remembered."""
    return [sighting for sighting in sightings if sighting.live > 0]
