"""Which blocks of the device are whose, and which keys they hold: a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from paged_decode.model import NULL_BLOCK


class DeviceBlocks:
    """Blocks of the cache on the device, each with a count of the requests that use it.

    A block that nobody uses is free, and keeps its key: the next request with the same tokens takes it back. It loses
    the key when it is given to other tokens, the longest unused block first.
    """

    def __init__(self, count: int) -> None:
        self._users = [0] * count
        self._keys: list[bytes | None] = [None] * count
        self._blocks: dict[bytes, int] = {}  # by key
        self._free: dict[int, None] = dict.fromkeys({*range(count)} - {NULL_BLOCK})  # the oldest first

    @property
    def free(self) -> int:
        """How many blocks `take` can give."""
        return len(self._free)

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the leading keys that are here; they are in use from now on."""
        found = []
        for key in keys:
            if (block := self._blocks.get(key)) is None:
                break
            self._users[block] += 1
            self._free.pop(block, None)
            found.append(block)
        return found

    def take(self) -> int:
        """A block for new tokens. Its key is forgotten."""
        block = next(iter(self._free))
        del self._free[block]
        if (key := self._keys[block]) is not None:
            del self._blocks[key]
            self._keys[block] = None
        self._users[block] = 1
        return block

    def publish(self, block: int, key: bytes) -> None:
        """This block holds the key's bytes, so others may share it. If another block has the key already, that one
        keeps it.
        """
        if self._blocks.setdefault(key, block) == block:
            self._keys[block] = key

    def forget(self) -> None:
        """No block holds what its key says any more: the weights have changed."""
        self._keys = [None] * len(self._keys)
        self._blocks.clear()

    def give_back(self, blocks: Sequence[int]) -> None:
        """A request uses these blocks no more. The end of a prefix, given last, is of use to fewer, and goes first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None
