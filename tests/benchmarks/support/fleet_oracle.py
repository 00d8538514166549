"""What `bench fleet` is compared with: the same counts from ordered dicts, which share no code with the library."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from replay_oracles import Oracle


class FleetServed(NamedTuple):
    """What one request of a fleet did: hits in the host, on its disk if it has one, in the store; keys written."""

    hits: tuple[int, ...]
    written: tuple[int, ...]


class FleetOracle:
    """Hosts, each an `Oracle` and perhaps one more for its disk, over one dict: the store, what goes next first.

    Attributes:
        store: key to the host that has written it.
    """

    def __init__(self, hosts: int, slots: int, disk_slots: int, store_slots: int, write: str) -> None:
        self.pools = [Oracle(slots) for _ in range(hosts)]
        self.disks = [Oracle(disk_slots) for _ in range(hosts)] if disk_slots else []
        self.store: dict[Any, int] = {}
        self.store_slots = store_slots
        self._seen: list[set[Any]] | None = [set() for _ in range(hosts)] if write == "second" else None
        self._unwritten: list[set[Any]] = [set() for _ in range(hosts)]  # in the pool, and below as far as it knows

    def serve(self, host: int, keys: Sequence[Any]) -> FleetServed:
        used = list(dict.fromkeys(keys[: self.pools[host].capacity]))
        pool, disk = self.pools[host].present, self._disk(host)
        counts = [0, 0, 0]
        for key in used:
            place = 0 if key in pool else 1 if key in disk else 2 if key in self.store else None
            if place is None:
                break
            counts[place] += 1
            if place == 2:
                self.store[key] = self.store.pop(key)
        for key in reversed([key for key in used[: sum(counts)] if key in disk and key not in pool]):
            disk.move_to_end(key)
        arrived = {key for key in used if key not in pool}
        self.pools[host].serve(used)
        wanted = self._wanted(host, used, arrived)
        new = self._write(host, wanted)
        if not self.disks:
            return FleetServed((counts[0], counts[2]), (new,))
        return FleetServed(tuple(counts), (self._write_disk(self.disks[host], wanted, used), new))

    def _disk(self, host: int) -> OrderedDict[Any, None]:
        return self.disks[host].present if self.disks else OrderedDict()

    def _wanted(self, host: int, used: Sequence[Any], arrived: set[Any]) -> list[Any]:
        """What the host writes: what it takes to be nowhere below, and, of "second", has had in a request before."""
        unwritten = self._unwritten[host]
        unwritten.difference_update(arrived)
        unwritten.update(key for key in used if key not in self._disk(host) and key not in self.store)
        unwritten.intersection_update(self.pools[host].present)
        wanted = [key for key in used if key in unwritten]
        if self._seen is not None:
            wanted = [key for key in wanted if key in self._seen[host]]
            self._seen[host].update(used)
        unwritten.difference_update(wanted)
        return wanted

    def _write(self, host: int, wanted: Sequence[Any]) -> int:
        new = [key for key in wanted if key not in self.store]
        for key in new:
            if len(self.store) >= self.store_slots:
                del self.store[next(iter(self.store))]
            self.store[key] = host
        return len(new)

    def _write_disk(self, disk: Oracle, wanted: Sequence[Any], used: Sequence[Any]) -> int:
        absent = [key for key in wanted if key not in disk.present]
        excess = max(0, len(disk.present) + len(absent) - disk.capacity)
        for key in list(disk.present)[:excess]:
            del disk.present[key]
        disk.present.update(dict.fromkeys(absent))
        for key in reversed(used):
            if key in disk.present:
                disk.present.move_to_end(key)
        return len(absent)
