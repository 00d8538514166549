"""A transfer as asked for, checked: ids in range, as many slots as the blocks need, targets distinct."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from kvoffload.engine.job import Listener
from kvoffload.engine.wait_streams import Source, as_sources
from kvoffload.errors import LayoutError
from kvoffload.internal.types import Int64Array
from kvoffload.layout.ids import as_ids
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.layer_groups import Parts, as_parts
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopyMethod

SOURCE_ORDERS = ("auto", "stream", "any")


class Request(NamedTuple):
    """A checked transfer.

    Attributes:
        sources: what it is to follow.
        parts: planes of each part of a load; None where all are in one.
        after: the stream that stands for all of these, None for none; the engine fills it in.
    """

    direction: Direction
    group: int
    slots: Int64Array
    blocks: Int64Array
    first_sub_block: int
    sources: tuple[Source, ...]
    copier: str | CopyMethod | None
    source_order: str
    listener: Listener | None
    parts: Parts | None = None
    after: int | None = None

    @property
    def num_parts(self) -> int:
        return 1 if self.parts is None else len(self.parts)


def make_request(
    layout: KVLayout,
    num_slots: int,
    direction: Direction,
    blocks: Any,
    slots: Any,
    group: Any,
    first_sub_block: Any,
    after: Any,
    copier: str | CopyMethod | None,
    source_order: str,
    listener: Listener | None,
    parts: Any = None,
) -> Request:
    """Check the arguments of `OffloadEngine.store` and `load`.

    Raises:
        LayoutError, ValueError, TypeError: the message names the argument, the value and what is right.
    """
    if source_order not in SOURCE_ORDERS:
        raise ValueError(f"source_order must be one of {', '.join(SOURCE_ORDERS)}, got {source_order!r}")
    group = _in_range("group", group, layout.num_groups)
    first_sub_block = _in_range("first_sub_block", first_sub_block, layout.blocks_per_slot)
    block_ids = as_ids("blocks", blocks, layout.groups[group].num_blocks)
    slot_ids = as_ids("slots", slots, num_slots)
    expected = layout.slots_for(len(block_ids), first_sub_block)
    if len(slot_ids) != expected:
        raise LayoutError(
            f"{len(block_ids)} blocks from sub-block {first_sub_block} on need {expected} slots "
            f"(blocks_per_slot={layout.blocks_per_slot}), got {len(slot_ids)}"
        )
    checked = direction, group, slot_ids, block_ids, first_sub_block
    planes = _parts(parts, direction, len(layout.groups[group].planes))
    return Request(*checked, sources_of(after, layout), copier, source_order, listener, planes)


def _parts(parts: Any, direction: Direction, num_planes: int) -> Parts | None:
    if parts is not None and direction is Direction.STORE:
        raise ValueError(f"parts={parts!r:.80} is for loads; a store takes all planes together: leave parts out")
    return as_parts(parts, num_planes)


def sources_of(after: Any, layout: KVLayout) -> tuple[Source, ...]:
    """What `after` names; None only where the default stream orders the planes."""
    if after is None and not layout.on_default_stream:
        raise ValueError(
            "after=None stands for the legacy default stream, and these planes are computed on streams that it does "
            "not order (JAX's): pass after=array, the array that was computed last on them, to follow it on the GPU; "
            "or kvoffload.NO_WAIT if the host has waited for it (array.block_until_ready())"
        )
    return as_sources(after)


def refuse_repeated_targets(request: Request, scratch: Int64Array) -> None:
    """Raise LayoutError when a target repeats: copies of one transfer have no order among each other.

    Args:
        scratch: any contents, longer than every id of the engine; overwritten.
    """
    name, ids = ("blocks", request.blocks) if request.direction is Direction.LOAD else ("slots", request.slots)
    positions = np.arange(len(ids))
    scratch[ids] = positions
    repeated = scratch[ids] != positions
    if repeated.any():
        wrong = int(repeated.argmax())
        raise LayoutError(f"{name}[{wrong}] repeats {ids[wrong]}; the targets of a transfer must be distinct")


def _in_range(name: str, value: Any, limit: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not 0 <= number < limit:
        raise LayoutError(f"{name} must be an integer in [0, {limit}), got {value!r}")
    return number
