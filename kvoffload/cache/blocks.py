"""Block ids of a cache's call, by group and key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from kvoffload.cache.engines import BlockLayout
from kvoffload.errors import LayoutError
from kvoffload.internal.types import Ids, Int64Array
from kvoffload.layout.ids import as_ids

BlockIds: TypeAlias = Ids | Sequence[Ids]  # with several groups of planes a list for each


def ids_by_group(layout: BlockLayout, num_keys: int, blocks: Any) -> list[Int64Array]:
    """Per group an array of shape (keys, blocks_per_slot).

    Raises:
        LayoutError: not one list for each group, not `blocks_per_slot` ids for each key, or what is no id of a block.
    """
    groups = layout.num_groups
    lists = [blocks] if groups == 1 else list(blocks)
    if len(lists) != groups:
        raise LayoutError(f"blocks must hold one list of ids per group ({groups}), got {len(lists)}")
    per_group = []
    for group, ids in enumerate(lists):
        name = "blocks" if groups == 1 else f"blocks[{group}]"
        array = as_ids(name, ids, layout.groups[group].num_blocks)
        if len(array) != num_keys * layout.blocks_per_slot:
            raise LayoutError(
                f"{name} must hold {layout.blocks_per_slot} ids per key, {num_keys * layout.blocks_per_slot} for "
                f"{num_keys} keys, got {len(array)}"
            )
        per_group.append(array.reshape(num_keys, layout.blocks_per_slot))
    return per_group
