"""A transfer as asked for, checked: ids in range and copied, as many slots as the blocks need."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from kvoffload.copiers import check_carries_parts, check_copier
from kvoffload.device.streams import NO_WAIT
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.engine.wait_streams import After, Followed, Source, as_sources
from kvoffload.errors import LayoutError
from kvoffload.internal.checks import flag
from kvoffload.internal.types import Ids, Int64Array
from kvoffload.layout.ids import as_ids
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.layer_groups import Parts, as_parts
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopierName, CopyMethod

SourceOrderName = Literal["auto", "stream", "any"]
SOURCE_ORDERS: tuple[SourceOrderName, ...] = ("auto", "stream", "any")

_INT = frozenset({int})
_MOST_HANDLE = 1 << 64
_FEW = 64  # ids, of which a set is made sooner than numpy compares them
_DEFAULT_SOURCES: tuple[Source, ...] = (LEGACY_STREAM,)


class Request(NamedTuple):
    """A checked transfer.

    Attributes:
        slots, blocks: ids, int64, (n,) each, copies of what the caller gave.
        sources: handles of streams that it is to follow; `Array`s, too, if `arrays` is true.
        parts: planes of each part of a load; None where all are in one.
        urgent: whether a load goes ahead of those that wait on the host.
    """

    direction: Direction
    group: int
    slots: Int64Array
    blocks: Int64Array
    first_sub_block: int
    sources: tuple[Any, ...]
    arrays: bool
    copier: CopierName | CopyMethod | None
    source_order: SourceOrderName
    parts: Parts | None
    urgent: bool

    @property
    def num_parts(self) -> int:
        return 1 if self.parts is None else len(self.parts)


class Limits(NamedTuple):
    """What the arguments of an engine's transfers are checked against: its layout, slots, and missing copiers."""

    layout: KVLayout
    num_slots: int
    missing_copiers: dict[str, str | None]


def make_request(
    limits: Limits,
    direction: Direction,
    blocks: Ids,
    slots: Ids,
    group: int,
    first_sub_block: int,
    after: After,
    copier: CopierName | CopyMethod | None,
    source_order: SourceOrderName = "auto",
    parts: int | Sequence[Sequence[int]] | None = None,
    urgent: bool = False,
) -> Request:
    """Check the arguments of `OffloadEngine.store` and `load`.

    Raises:
        LayoutError, ValueError, TypeError: the message names the argument, the value and what is right.
        CapabilityError: the copier asked for cannot run here.
    """
    layout, num_slots, missing_copiers = limits
    if source_order not in SOURCE_ORDERS:
        raise ValueError(f"source_order must be one of {', '.join(SOURCE_ORDERS)}, got {source_order!r:.80}")
    urgent = urgent is not False and _checked_urgency(urgent, direction)
    if group.__class__ is not int or not 0 <= group < len(layout.groups):
        group = _in_range("group", group, len(layout.groups))
    if first_sub_block != 0 or first_sub_block.__class__ is not int:
        first_sub_block = _in_range("first_sub_block", first_sub_block, layout.blocks_per_slot)
    block_ids = as_ids("blocks", blocks, layout.groups[group].num_blocks)
    slot_ids = as_ids("slots", slots, num_slots)
    expected = -(-(len(block_ids) + first_sub_block) // layout.blocks_per_slot) if len(block_ids) else 0
    if len(slot_ids) != expected:
        raise LayoutError(
            f"{len(block_ids)} blocks from sub-block {first_sub_block} on need {expected} slots "
            f"(blocks_per_slot={layout.blocks_per_slot}), got {len(slot_ids)}"
        )
    if copier is not None:
        check_copier(copier, missing_copiers)
    planes = None if parts is None else _checked_parts(parts, direction, len(layout.groups[group].planes), copier)
    sources: tuple[Any, ...] = ()
    arrays = False
    if after is None and layout.on_default_stream:
        sources = _DEFAULT_SOURCES
    elif after.__class__ is int and 0 < after < _MOST_HANDLE:
        sources = (after,)
    elif after is not NO_WAIT:
        sources = sources_of(after, layout)
        arrays = not _INT.issuperset(map(type, sources))
    return Request(
        direction, group, slot_ids, block_ids, first_sub_block, sources, arrays, copier, source_order, planes, urgent
    )


def _checked_parts(
    parts: Any, direction: Direction, num_planes: int, copier: CopierName | CopyMethod | None
) -> Parts | None:
    if direction is Direction.STORE:
        raise ValueError(f"parts={parts!r:.80} is for loads; a store takes all planes together: leave parts out")
    planes = as_parts(parts, num_planes)
    if planes is not None:
        check_carries_parts(copier)
    return planes


def _checked_urgency(urgent: Any, direction: Direction) -> bool:
    if flag("urgent", urgent) and direction is Direction.STORE:
        raise ValueError("urgent=True is for loads, which a request waits for: leave it out of a store")
    return True


def sources_of(after: After, layout: KVLayout) -> tuple[Source, ...]:
    """What `after` names; None only where the default stream orders the planes."""
    if isinstance(after, Followed):
        return after.streams
    if after is None and not layout.on_default_stream:
        raise ValueError(
            "after=None stands for the legacy default stream, and these planes are computed on streams that it does "
            "not order (JAX's): pass after=cache, or after=array with the array that was computed last on them, to "
            "follow it on the GPU; or kvoffload.NO_WAIT if the host has waited for it (array.block_until_ready())"
        )
    return as_sources(after)


def refuse_repeated_targets(request: Request, scratch: Int64Array) -> None:
    """Raise LayoutError when a target repeats: copies of one transfer have no order among each other.

    Args:
        scratch: any contents, longer than every id of the engine; overwritten.
    """
    loads = request.direction is Direction.LOAD
    ids = request.blocks if loads else request.slots
    if len(ids) <= _FEW and len(set(ids.tolist())) == len(ids):
        return
    positions = np.arange(len(ids))
    scratch[ids] = positions
    repeated = scratch[ids] != positions
    if np.logical_or.reduce(repeated):
        wrong, name = int(repeated.argmax()), "blocks" if loads else "slots"
        raise LayoutError(f"{name}[{wrong}] repeats {ids[wrong]}; the targets of a transfer must be distinct")


def _in_range(name: str, value: Any, limit: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not 0 <= number < limit:
        raise LayoutError(f"{name} must be an integer in [0, {limit}), got {value!r:.80}")
    return number
