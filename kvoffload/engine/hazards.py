"""Which transfer of the other direction a new one must wait for: the latest that touched its slots or blocks.

Transfers of one direction run in the order of submission, so one sequence number per slot and block is enough. A load
waits for the latest store that wrote its slots or read its blocks; a store waits for the latest load that read its
slots or wrote its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvoffload.internal.types import Int64Array
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Group, clusters
from kvoffload.planning.transfer_plan import STORE, Direction


class HazardTable:
    """Sequence numbers by slot, and by block for each group; 0 means never touched.

    Groups over the same planes share one table (groups of a hybrid model often have the same planes). Groups whose
    memory overlaps in another way share a single entry: that costs needless waits, but misses none.
    """

    def __init__(self, layout: KVLayout, num_slots: int) -> None:
        self._stores = _Latest(num_slots, layout.num_groups)
        self._loads = _Latest(num_slots, layout.num_groups)
        self._divisors = [1] * layout.num_groups  # block id // divisor is the index of its entry
        self._clusters: list[frozenset[int]] = []
        self._alike: set[int] = set()
        for members in _overlapping(layout.groups):
            planes = [layout.groups[index].planes for index in members]
            where = {frozenset((each.address, each.block_stride, each.block_bytes) for each in one) for one in planes}
            fine = len(where) == 1
            self._clusters.append(frozenset(members))
            self._alike.update(members if fine else ())
            entries = max(layout.groups[index].num_blocks for index in members) if fine else 1
            for latest in (self._stores, self._loads):
                shared = np.zeros(entries, dtype=np.int64)
                for index in members:
                    latest.on_blocks[index] = shared
            for index in members:
                self._divisors[index] = 1 if fine else layout.groups[index].num_blocks

    def sharing_memory(self, groups: Iterable[int]) -> list[frozenset[int]]:
        """Return the sets of groups that share memory, if they contain one of `groups`. A group alone is a set."""
        wanted = set(groups)
        return [members for members in self._clusters if members & wanted]

    def alike(self, group: int) -> bool:
        """Return whether all groups that share memory with this one have its planes, so equal ids are equal bytes."""
        return group in self._alike

    def latest_on_slots(self, direction: Direction, slots: Int64Array) -> int:
        """Return the sequence number of the latest transfer of `direction` that touched one of `slots`."""
        latest = self._stores if direction is STORE else self._loads
        return int(np.maximum.reduce(latest.on_slots[slots], initial=0))

    def latest_on_blocks(self, direction: Direction, group: int, blocks: Int64Array) -> int:
        """Return the sequence number of the latest transfer of `direction` that touched one of `blocks`."""
        latest, divisor = self._stores if direction is STORE else self._loads, self._divisors[group]
        entries = blocks if divisor == 1 else blocks // divisor
        return int(np.maximum.reduce(latest.on_blocks[group][entries], initial=0))

    def record(self, direction: Direction, group: int, slots: Int64Array, blocks: Int64Array, sequence: int) -> None:
        """Note that transfer `sequence` touches these; sequence numbers rise."""
        latest = self._stores if direction is STORE else self._loads
        divisor, number = self._divisors[group], np.array(sequence)  # an array, which numpy assigns sooner than an int
        latest.on_slots[slots] = number
        latest.on_blocks[group][blocks if divisor == 1 else blocks // divisor] = number

    def make_room(self, direction: Direction, sequence: int) -> None:
        """Add one to the number of every transfer of `direction` from that number on."""
        for entries in self._entries(direction):
            np.add(entries, 1, out=entries, where=entries >= sequence)

    def record_ahead(
        self, direction: Direction, group: int, slots: Int64Array, blocks: Int64Array, sequence: int
    ) -> None:
        """Record as `record` does, for a transfer that is not the latest: entries of later ones stay."""
        latest, divisor = self._stores if direction is STORE else self._loads, self._divisors[group]
        indices = blocks if divisor == 1 else blocks // divisor
        for entries, ids in ((latest.on_slots, slots), (latest.on_blocks[group], indices)):
            entries[ids] = np.maximum(entries[ids], sequence)

    def forget_order(self, direction: Direction, ended: int, latest: int) -> None:
        """Act as if the transfer `latest` had touched all that later ones did: the order after `ended` is unknown."""
        for entries in self._entries(direction):
            np.copyto(entries, latest, where=entries > ended)

    def _entries(self, direction: Direction) -> list[Int64Array]:
        latest = self._stores if direction is STORE else self._loads
        return list({id(entries): entries for entries in (latest.on_slots, *latest.on_blocks)}.values())


class _Latest:
    """The sequence numbers of one direction: by slot, and by group and block."""

    __slots__ = ("on_blocks", "on_slots")

    def __init__(self, num_slots: int, num_groups: int) -> None:
        self.on_slots: Int64Array = np.zeros(num_slots, dtype=np.int64)
        self.on_blocks: list[Int64Array] = [self.on_slots] * num_groups


def _overlapping(groups: tuple[Group, ...]) -> list[list[int]]:
    """Return the groups in clusters; groups of different clusters share no byte range."""
    spread = [(plane, index) for index, group in enumerate(groups) for plane in group.planes]
    first = list(range(len(groups)))  # of the groups in the cluster of each
    for cluster in clusters([plane for plane, _ in spread]):
        joined = {first[spread[at][1]] for at in cluster}
        if len(joined) > 1:
            first = [min(joined) if each in joined else each for each in first]
    return [[index for index in range(len(groups)) if first[index] == each] for each in sorted(set(first))]
