"""The store that several hosts of a replay share; no bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class SharedStore:
    """A store of all hosts, which evicts the record that was written or read longest ago, as Valkey and Mooncake do.

    A key that it holds is not written again; neither that nor a use that the host pool serves makes its record newer.

    Attributes:
        writers: the keys that it holds, the next one to be evicted first, and the number of the host that wrote each.
        num_slots: keys that it can hold.
        evicted: records that it has evicted.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.writers: OrderedDict[bytes, int] = OrderedDict()
        self.evicted = 0


class StoreOfHost:
    """The shared store as one host sees it.

    Attributes:
        read_of_others: keys that this host has read and another host had written.
        not_copied: different keys that this host has read, or chosen to write, and another host had written: in a store
            of its own it would have written each.
    """

    def __init__(self, store: SharedStore, host: int) -> None:
        self._store, self._host = store, host
        self.num_slots = store.num_slots
        self.keys = store.writers
        self.read_of_others = 0
        self.not_copied: set[bytes] = set()

    def read(self, keys: Sequence[bytes]) -> None:
        foreign = [key for key in keys if self.keys[key] != self._host]
        self.read_of_others += len(foreign)
        self.not_copied.update(foreign)
        for key in keys:
            self.keys.move_to_end(key)

    def write(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        writers, store = self.keys, self._store
        taken = [key for key in keys if key not in writers]
        self.not_copied.update(key for key in keys if writers.get(key, self._host) != self._host)
        for key in taken:
            if len(writers) >= store.num_slots:
                writers.popitem(last=False)
                store.evicted += 1
            writers[key] = self._host
        return taken

    def touch(self, keys: Sequence[bytes]) -> None: ...
