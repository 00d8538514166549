"""What is written to a disk below the cache: what is admitted, all, a second time, a random share, nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvoffload.cache.tiering.admission import WriteAdmission
from kvoffload.cache.tiering.writer import WriteChoice


class Through(WriteChoice):
    """Writes every block in the host that the disk does not have, at the end of its request."""

    def __init__(self) -> None:
        self._on_disk: dict[bytes, bool] = {}  # keys in the host, and whether the disk has them, too

    def stored(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        self._on_disk.update((key, False) for key in keys if key not in self._on_disk)
        return ()

    def promoted(self, keys: Sequence[bytes]) -> None:
        self._on_disk.update(dict.fromkeys(keys, True))

    def written(self, keys: Iterable[bytes]) -> None:
        self._on_disk.update((key, True) for key in keys if key in self._on_disk)

    def left_disk(self, keys: Iterable[bytes]) -> None:
        self._on_disk.update((key, False) for key in keys if key in self._on_disk)

    def left_host(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._on_disk.pop(key, None)

    def ended(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in dict.fromkeys(keys) if self._on_disk.get(key) is False]


class Nothing(Through):
    """Writes nothing: the cache without a disk."""

    def ended(self, keys: Sequence[bytes]) -> list[bytes]:
        return list(keys[:0])


class SecondSighting(Through):
    """Writes a block when a second request stores or uses it; all keys are remembered, without bound."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[bytes] = set()

    def ended(self, keys: Sequence[bytes]) -> list[bytes]:
        found = [key for key in super().ended(keys) if key in self._seen]
        self._seen.update(keys)
        return found


class RandomShare(Through):
    """Writes the blocks of a random share of the requests: all of a request's, as a block needs those before it."""

    def __init__(self, share: float, seed: int) -> None:
        super().__init__()
        self._share = share
        self._random = np.random.default_rng(seed)

    def ended(self, keys: Sequence[bytes]) -> list[bytes]:
        chosen = float(self._random.random()) < self._share
        return super().ended(keys) if chosen else []


def make_writes(name: str, disk_slots: int, *, least_hits: float, share: float = 1.0, seed: int = 0) -> WriteChoice:
    """What `--write` names. `least_hits` is of "admitted", `share` and `seed` of "random"."""
    if name == "admitted":
        return WriteAdmission(disk_slots, least_hits=least_hits)
    if name == "random":
        return RandomShare(share, seed)
    return {"through": Through, "second": SecondSighting, "none": Nothing}[name]()
