"""A remote tier whose store is a dictionary of the test's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.internal.types import UInt8Array
from kvoffload.tiers import Outcome, RemoteTier

Store = dict[str, list[bytes]]
Parts = list[UInt8Array]


class DictRemote(RemoteTier):
    """Attributes: store: parts by name; calls: names of the methods that were called, with how many records."""

    def __init__(self, store: Store, *, identity: str = "a model", durable: bool = True, **options: object) -> None:
        super().__init__(identity=identity, name="dict", durable=durable, **options)  # type: ignore[arg-type]
        self.store = store
        self.calls: list[tuple[str, int]] = []
        self.connected = False
        self.delete_raises = False

    def connect(self) -> None:
        self.connected = True

    def disconnect(self) -> None:
        self.connected = False

    def fetch_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        self.calls.append(("fetch", len(names)))
        return [self._fetch(name, record) for name, record in zip(names, parts, strict=True)]

    def _fetch(self, name: str, parts: Parts) -> Outcome:
        stored = self.store.get(name)
        if stored is None:
            return Outcome.MISSING
        if [len(each) for each in stored] != [part.nbytes for part in parts]:
            return self.reject(name)
        for part, content in zip(parts, stored, strict=True):
            part[:] = np.frombuffer(content, np.uint8)
        return Outcome.DONE

    def store_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        self.calls.append(("store", len(names)))
        for name, record in zip(names, parts, strict=True):
            self.store[name] = [part.tobytes() for part in record]
        return [Outcome.DONE] * len(names)

    def have_names(self, names: Sequence[str]) -> list[bool]:
        self.calls.append(("have", len(names)))
        return [name in self.store for name in names]

    def delete_names(self, names: Sequence[str]) -> list[bool]:
        self.calls.append(("delete", len(names)))
        if self.delete_raises:
            raise OSError("read-only")
        return [self.store.pop(name, None) is not None for name in names]

    def delete_folder(self, folder: str) -> None:
        for name in [name for name in self.store if name.startswith(folder)]:
            del self.store[name]
