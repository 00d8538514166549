"""Blocks in a PyTorch tensor that every method of `bench vllm` copies: right bytes, poison, and their comparison.

One int8 tensor (planes, blocks, block_bytes) holds all planes, as vLLM allocates them. Of each direction the first
places are used: `blocks[direction]` and `slots[direction]` are random, and no two blocks are adjacent. All bytes are
written and compared by the GPU, plainly: `right[:, i]` is what place `i` holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvoffload.internal.types import Int64Array
from kvoffload.planning.transfer_plan import Direction

POISON = 0x25
_KIB = 1024


class Geometry(NamedTuple):
    """Planes, and bytes of a block in each."""

    planes: int
    block_bytes: int

    @property
    def name(self) -> str:
        return f"{self.planes}x{self.block_bytes // _KIB}K"


class Series(NamedTuple):
    """A series of one direction: `transfers` transfers of `blocks` blocks, each of blocks and slots of its own."""

    blocks: int
    transfers: int

    @property
    def places(self) -> int:
        return self.blocks * self.transfers

    def of(self, index: int) -> slice:
        """The places of a transfer."""
        return slice(index * self.blocks, (index + 1) * self.blocks)


class TensorSetup:
    """The tensor, and which of its blocks are copied.

    Args:
        torch: PyTorch.
        where: the PyTorch device.
        geometry: of a block.
        most: places of a direction, at most.
        seed: of blocks, slots and bytes.

    Attributes:
        cache: int8, (planes, 4 * most, block_bytes).
        right: by direction, int8, (planes, most, block_bytes): what the blocks hold.
        blocks, slots: by direction, int64, (places,); of the series that `take` was called with.
        num_slots: that a method's host memory must have.
        series: of the last `take`.
    """

    def __init__(self, torch: Any, where: Any, geometry: Geometry, most: int, seed: int) -> None:
        self.torch, self.where, self.geometry, self._most = torch, where, geometry, most
        self.num_slots = 2 * most
        self._random = np.random.default_rng(seed)
        shape = (geometry.planes, 4 * most, geometry.block_bytes)
        self.cache = torch.full(shape, POISON, dtype=torch.int8, device=where)
        generator = torch.Generator(device=where)
        generator.manual_seed(seed)
        self.right = {
            direction: torch.randint(
                -128,
                128,
                (geometry.planes, most, geometry.block_bytes),
                dtype=torch.int8,
                device=where,
                generator=generator,
            )
            for direction in Direction
        }
        even = self._random.permutation(np.arange(0, 4 * most, 2, dtype=np.int64))
        self._all = {Direction.STORE: even[:most], Direction.LOAD: even[most:]}
        self.blocks: dict[Direction, Int64Array] = {}
        self.slots: dict[Direction, Int64Array] = {}

    def take(self, series: Series) -> None:
        """Choose blocks and slots of both directions, and write the right bytes into the blocks to be stored.

        Slots of stores are the first `series.places`, those of loads follow slot `most`, both in a random order.
        """
        self.series, places = series, series.places
        for number, direction in enumerate((Direction.STORE, Direction.LOAD)):
            self.blocks[direction] = self._all[direction][:places]
            self.slots[direction] = self._random.permutation(np.arange(places, dtype=np.int64)) + number * self._most
        stored = self.tensor(self.blocks[Direction.STORE])
        self.cache[:, stored] = self.right[Direction.STORE][:, :places]
        self.synchronize()

    def first_slot(self, direction: Direction) -> int:
        """The lowest slot of a direction."""
        return 0 if direction is Direction.STORE else self._most

    def by_slot(self, direction: Direction) -> Any:
        """What the slots of a direction hold, lowest slot first: int8, (planes, places, block_bytes)."""
        order = np.argsort(self.slots[direction])
        return self.right[direction][:, self.tensor(order)]

    def poison_blocks(self) -> None:
        """Overwrite the blocks that loads write."""
        self.cache[:, self.tensor(self.blocks[Direction.LOAD])] = POISON
        self.synchronize()

    def wrong_blocks(self) -> int:
        """Rows of the blocks that loads write that are wrong."""
        found = self.cache[:, self.tensor(self.blocks[Direction.LOAD])]
        return self.differing(found, self.right[Direction.LOAD][:, : self.series.places])

    def differing(self, found: Any, right: Any) -> int:
        """How many rows, each the bytes of a block in a plane, differ."""
        words = self.torch.int64
        return int((found.contiguous().view(words) != right.contiguous().view(words)).any(dim=-1).sum().item())

    def tensor(self, values: Int64Array) -> Any:
        return self.torch.from_numpy(np.ascontiguousarray(values)).to(self.where)

    def synchronize(self) -> None:
        self.torch.cuda.synchronize(self.where)

    def expandable(self) -> bool:
        """Whether PyTorch's allocator has taken the tensor from an expandable segment."""
        address = self.cache.data_ptr()
        return any(
            segment.get("is_expandable", False)
            for segment in self.torch.cuda.memory_snapshot()
            if segment["address"] <= address < segment["address"] + segment["total_size"]
        )

    def close(self) -> None:
        """Give the memory back to the driver."""
        del self.cache, self.right
        self.torch.cuda.empty_cache()
