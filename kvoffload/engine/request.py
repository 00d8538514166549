"""The checked arguments of transfers: ids in range and copied, as many slots as the blocks need, no target twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from kvoffload.copiers import check_carries_parts, check_copier
from kvoffload.device.streams import NO_WAIT
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.engine.hazards import HazardTable
from kvoffload.engine.wait_streams import After, Followed, Source, as_sources
from kvoffload.errors import LayoutError
from kvoffload.internal.checks import flag, index_or, shown
from kvoffload.internal.types import Ids, Int64Array
from kvoffload.layout.ids import as_ids
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.layer_groups import Parts, as_parts
from kvoffload.planning.transfer_plan import LOAD, STORE, Direction
from kvoffload.tuning import CopierName

SourceOrderName = Literal["auto", "stream", "any"]
SOURCE_ORDERS: tuple[SourceOrderName, ...] = ("auto", "stream", "any")

_INT = frozenset({int})
_MOST_HANDLE = 1 << 64
FEW = 64  # up to so many ids, a set tells sooner than numpy whether one repeats
_DEFAULT_SOURCES: tuple[Source, ...] = (LEGACY_STREAM,)


@dataclass(slots=True, eq=False)
class Request:
    """A checked transfer of one group.

    Attributes:
        slots, blocks: copies of the caller's ids, int64, one-dimensional.
        sources: handles of streams to follow; if `arrays` is True, `Array`s, too.
        parts: the planes of each part of a load; None if there is one part.
        urgent: a load goes ahead of loads that wait on the host.
    """

    direction: Direction
    group: int
    slots: Int64Array
    blocks: Int64Array
    first_sub_block: int = 0
    sources: tuple[Any, ...] = ()
    arrays: bool = False
    copier: CopierName | None = None
    source_order: SourceOrderName = "auto"
    parts: Parts | None = None
    urgent: bool = False

    @property
    def num_parts(self) -> int:
        return 1 if self.parts is None else len(self.parts)


Requests = tuple[Request, ...]
"""One transfer: a request for each group, at least one, all in one direction and with the same sources."""


@dataclass(frozen=True, slots=True)
class GroupTransfer:
    """The blocks and slots of one group in a transfer of several, see `OffloadEngine.store_groups`.

    Nothing is checked or copied here. `store_groups` and `load_groups` do that when they are called; you may change
    the ids once that call has returned.

    Attributes:
        group: the group whose block table `blocks` refers to.
        blocks, slots: ids: a list of ints, or anything that numpy turns into a 1-D integer array. As many slots as
            `layout.slots_for(len(blocks), first_sub_block=...)` says.
        first_sub_block: the sub-block of the first slot to begin with, from 0.
    """

    group: int
    blocks: Ids
    slots: Ids
    first_sub_block: int = field(default=0, kw_only=True)


class ArgumentChecks(NamedTuple):
    """Checks the arguments of an engine's transfers."""

    layout: KVLayout
    num_slots: int
    missing_copiers: dict[str, str | None]

    def requests(
        self,
        direction: Direction,
        blocks: Ids,
        slots: Ids,
        group: int,
        first_sub_block: int,
        after: After,
        copier: CopierName | None = None,
        source_order: SourceOrderName = "auto",
        *,
        parts: int | Sequence[Sequence[int]] | None = None,
        urgent: bool = False,
    ) -> Requests:
        """Check the arguments of `OffloadEngine.store` and `load`, and copy the ids. Returns one request.

        Raises:
            LayoutError, ValueError, TypeError: the message names the argument, the value and the remedy.
            CapabilityError: the copier asked for cannot run here.
        """
        layout, num_slots, _ = self
        if source_order not in SOURCE_ORDERS:
            raise ValueError(f"source_order must be one of {', '.join(SOURCE_ORDERS)}, got {source_order!r:.80}")
        if urgent is not False and flag("urgent", urgent) and direction is STORE:
            raise ValueError("urgent=True is for loads, which a request waits for: leave it out of a store")
        if group.__class__ is not int or not 0 <= group < len(layout.groups):
            group = _in_range("group", group, len(layout.groups))
        if first_sub_block != 0 or first_sub_block.__class__ is not int:
            first_sub_block = _in_range("first_sub_block", first_sub_block, layout.blocks_per_slot)
        block_ids = as_ids("blocks", blocks, layout.groups[group].num_blocks)
        slot_ids = as_ids("slots", slots, num_slots)
        count, factor = len(block_ids), layout.blocks_per_slot
        expected = count if factor == 1 or not count else -(-(count + first_sub_block) // factor)
        if len(slot_ids) != expected:
            raise LayoutError(
                f"{count} blocks from sub-block {first_sub_block} on need {expected} slots "
                f"(blocks_per_slot={factor}), got {len(slot_ids)}"
            )
        if copier is not None or layout.groups[group].coding is not None:
            copier = self.checked_copier(copier, group)
        planes: Parts | None = None
        if parts is not None:
            if direction is STORE:
                raise ValueError(
                    f"parts={parts!r:.80} is for loads; a store takes all planes together: leave parts out"
                )
            planes = as_parts(parts, len(layout.groups[group].planes))
            if planes is not None:
                check_carries_parts(copier, planes, coded=layout.groups[group].coding is not None)
        sources: tuple[Any, ...] = ()
        arrays = False
        if after is None and layout.on_default_stream:
            sources = _DEFAULT_SOURCES
        elif after.__class__ is int and 0 < after < _MOST_HANDLE:
            sources = (after,)
        elif after is not NO_WAIT:
            sources = sources_of(after, layout)
            arrays = not _INT.issuperset(map(type, sources))
        at, order = first_sub_block, source_order
        return (Request(direction, group, slot_ids, block_ids, at, sources, arrays, copier, order, planes, urgent),)

    def checked_copier(self, copier: CopierName | None, group: int) -> CopierName | None:
        if copier is not None:
            check_copier(copier, self.missing_copiers)
        if self.layout.groups[group].coding is None:
            return copier
        if copier not in (None, "pack"):
            raise ValueError(f"copier={copier!r} cannot code, and group {group} has a codec: leave copier out")
        return "pack"

    def requests_of_groups(
        self,
        direction: Direction,
        transfers: Sequence[GroupTransfer],
        after: After,
        *options: Any,
        urgent: bool = False,
    ) -> Requests:
        """Return a request for each element that has blocks, or a single empty one if none has. All have the same
        sources.

        Args:
            options: `copier` and `source_order`, as `requests` takes them; for all groups.

        Raises:
            LayoutError, ValueError, TypeError, CapabilityError: as `requests`; the message names the element.
        """
        if not isinstance(transfers, list | tuple):
            raise TypeError(f"transfers must be a list of GroupTransfer, got {shown(transfers)}")
        (common,) = self.requests(direction, (), (), 0, 0, after, *options, urgent=urgent)
        found = []
        for index, each in enumerate(transfers):
            if not isinstance(each, GroupTransfer):
                raise TypeError(f"transfers[{index}] must be a GroupTransfer, got {shown(each)}")
            moved = each.blocks, each.slots, each.group, each.first_sub_block
            try:
                (request,) = self.requests(direction, *moved, NO_WAIT, *options, urgent=urgent)
            except (LayoutError, ValueError, TypeError) as error:
                raise type(error)(f"transfers[{index}]: {error}") from None
            if len(request.blocks):
                request.sources, request.arrays = common.sources, common.arrays
                found.append(request)
        return tuple(found) or (common,)


def sources_of(after: After, layout: KVLayout) -> tuple[Source, ...]:
    """Return the streams and arrays in `after`. Refuses None unless the default stream orders the planes."""
    if isinstance(after, Followed):
        return after.streams
    if after is None and not layout.on_default_stream:
        raise ValueError(
            "after=None stands for the legacy default stream, and these planes are computed on streams that it does "
            "not order (JAX's): pass after=cache, or after=array with the array that was computed last on them, to "
            "follow it on the GPU; or kvoffload.NO_WAIT if the host has waited for it (array.block_until_ready())"
        )
    return as_sources(after)


def refuse_repeated_targets(requests: Requests, scratch: Int64Array, layout: KVLayout, hazards: HazardTable) -> None:
    """Raise LayoutError if a target repeats: copies of one transfer have no order among each other.

    1. Within a request, no id repeats.
    2. Two stores never have a slot in common: a slot holds blocks of one group.
    3. Two loads never write the same byte: groups can have planes in common, so block ids alone do not tell.

    Args:
        scratch: any contents, longer than every id of the engine; overwritten.
    """
    loads = requests[0].direction is LOAD
    for request in requests:
        ids = request.blocks if loads else request.slots
        if len(ids) <= FEW and len(set(ids.tolist())) == len(ids):
            continue
        positions = np.arange(len(ids))
        scratch[ids] = positions
        repeated = scratch[ids] != positions
        if np.logical_or.reduce(repeated):
            wrong, name = int(repeated.argmax()), "blocks" if loads else "slots"
            raise LayoutError(f"{name}[{wrong}] repeats {ids[wrong]}; the targets of a transfer must be distinct")
    if len(requests) == 1:
        return
    if not loads:
        again = _repeated([request.slots for request in requests])
        if again is not None:
            raise LayoutError(f"slot {again} is a target of two of the transfers; a slot holds blocks of one group")
        return
    for members in hazards.sharing_memory(request.group for request in requests):
        among = [request for request in requests if request.group in members]
        if len(among) < 2:
            continue
        groups = sorted({request.group for request in among})
        if len(groups) == 1 or hazards.alike(groups[0]):  # equal ids are the same bytes
            again = _repeated([request.blocks for request in among])
            if again is not None:
                where = f"group {groups[0]}" if len(groups) == 1 else f"groups {groups}, which have the same planes,"
                raise LayoutError(f"block {again} of {where} is a target of two of the transfers; load it once")
            continue
        pieces = [(plane, request.blocks) for request in among for plane in layout.groups[request.group].planes]
        starts = [plane.address + blocks * plane.block_stride for plane, blocks in pieces]
        start = np.concatenate(starts)
        end = np.concatenate([each + plane.block_bytes for each, (plane, _) in zip(starts, pieces, strict=True)])
        order = np.argsort(start)
        if (np.maximum.accumulate(end[order])[:-1] > start[order][1:]).any():
            raise LayoutError(f"groups {groups} share memory, and two of the transfers load to the same bytes")


def _repeated(ids: Sequence[Int64Array]) -> int | None:
    """Return an id that two of the arrays share. Within an array, ids are distinct."""
    ordered = np.sort(np.concatenate(ids))
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(again[0]) if len(again) else None


def _in_range(name: str, value: Any, limit: int) -> int:
    number = index_or(value, -1)
    if not 0 <= number < limit:
        raise LayoutError(f"{name} must be an integer in [0, {limit}), got {value!r:.80}")
    return number
