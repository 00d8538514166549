"""Prefixes of conversations on the host. Only the scheduler's process decides which key has which slots."""

from __future__ import annotations

from functools import partial

from paged_decode.offload import complete_tokens

import kvoffload
from rank_processes.group import GroupTransfer, RankGroup


class IndexedOffloader:
    """Stores and loads the complete blocks of conversations in all ranks, like `paged_decode.offload.Offloader`.

    Args:
        index: has room for as many keys as every rank has slots; entry `i` is slot `i` of every rank.
        layout: the layout of every rank's cache; keys depend on it.
        corrupt: spoil a stored block of the last rank before the first load.
    """

    def __init__(
        self, group: RankGroup, index: kvoffload.CacheIndex, layout: kvoffload.KVLayout, *, corrupt: bool = False
    ) -> None:
        self._group, self._index, self._layout, self._corrupt = group, index, layout, corrupt
        self._stores: dict[int, GroupTransfer] = {}
        self._loads: dict[int, GroupTransfer] = {}
        self._blocks_before = dict(group.blocks)

    def store(self, conversation: int, tokens: list[int], blocks: list[int]) -> None:
        """Store the complete blocks that are not stored yet. The keys become hits once all ranks have stored them."""
        keys = self._keys(tokens)
        reservation = self._index.reserve(keys)
        sources = [blocks[position] for position in reservation.positions]
        end = partial(settle, reservation)
        self._stores[conversation] = self._group.submit("store", sources, reservation.slots().tolist(), end)
        self._index.touch(keys)

    def follow_store(self, conversation: int) -> None:
        """Make steps from now on follow the store of a conversation whose blocks another one has taken."""
        if conversation in self._stores:
            self._group.follow(self._stores[conversation])

    def load(self, conversation: int, tokens: list[int], blocks: list[int]) -> None:
        """Load the complete blocks of a conversation into `blocks`. Holds their slots until all ranks have loaded."""
        if conversation in self._stores:
            self._group.wait(self._stores[conversation])
        keys = self._keys(tokens)
        found = self._index.lookup(keys)
        if found < len(keys):
            raise RuntimeError(f"only {found} of {len(keys)} blocks of a stored prefix were found")
        self._index.load(keys)
        lease = self._index.acquire(keys)
        slots = lease.slots().tolist()
        if self._corrupt:
            self._corrupt = False
            self._group.spoil(len(self._group.processes) - 1, slots[-1])
        self._loads[conversation] = self._group.submit("load", blocks, slots, lambda _: lease.release())

    def follow_load(self, conversation: int) -> None:
        """Make steps from now on follow the load of a conversation, if there is one."""
        if conversation in self._loads:
            self._group.follow(self._loads[conversation])

    def end_load(self, conversation: int) -> None:
        """Wait for the load of a conversation, and raise if it failed in a rank. The computation has followed it."""
        if conversation in self._loads:
            load = self._loads.pop(conversation)
            self._group.wait(load)
            load.check()

    def count_blocks(self) -> tuple[int, int]:
        """Blocks stored and loaded so far in every rank; waits until all transfers have ended."""
        self._group.drain()
        now, before = self._group.blocks, self._blocks_before
        return now["store"] - before["store"], now["load"] - before["load"]

    def _keys(self, tokens: list[int]) -> list[bytes]:
        """Keys of the complete blocks."""
        complete = tokens[: complete_tokens(tokens)]
        return kvoffload.chain_keys(complete, layout=self._layout, salt="paged decode in ranks")


def settle(reservation: kvoffload.Reservation, well: bool) -> None:
    """All ranks have ended a store: make its keys hits in all of them, or missing in all of them."""
    if well:
        reservation.commit()
    else:
        reservation.abort()
