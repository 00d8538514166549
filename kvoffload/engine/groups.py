"""One transfer of several groups, or of several pieces of one: the request of each, checked all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvoffload.device.streams import NO_WAIT
from kvoffload.engine.hazards import HazardTable
from kvoffload.engine.request import Limits, Request, SourceOrderName, make_request
from kvoffload.engine.wait_streams import After
from kvoffload.errors import LayoutError
from kvoffload.internal.checks import shown
from kvoffload.internal.types import Ids, Int64Array
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopierName, CopyMethod


@dataclass(frozen=True, slots=True)
class GroupTransfer:
    """What a transfer of several groups moves of one, see `OffloadEngine.store_groups`.

    Attributes:
        group: whose block table `blocks` refers to.
        blocks, slots: ids, as for `OffloadEngine.store` and `load`; as many slots as `layout.slots_for` says.
        first_sub_block: where in the first slot to begin.
    """

    group: int
    blocks: Ids
    slots: Ids
    first_sub_block: int = field(default=0, kw_only=True)


def make_group_requests(
    limits: Limits,
    direction: Direction,
    transfers: Sequence[GroupTransfer],
    after: After,
    copier: CopierName | CopyMethod | None,
    source_order: SourceOrderName = "auto",
    urgent: bool = False,
) -> tuple[Request, ...]:
    """The request of each element that has blocks, all with the same sources; one without blocks if none has.

    Raises:
        LayoutError, ValueError, TypeError, CapabilityError: as `make_request`; the message names the element.
    """
    if not isinstance(transfers, list | tuple):
        raise TypeError(f"transfers must be a list of GroupTransfer, got {shown(transfers)}")
    options = copier, source_order, None, urgent
    common = make_request(limits, direction, (), (), 0, 0, after, *options)
    requests = []
    for index, each in enumerate(transfers):
        if not isinstance(each, GroupTransfer):
            raise TypeError(f"transfers[{index}] must be a GroupTransfer, got {shown(each)}")
        try:
            ids = each.blocks, each.slots, each.group, each.first_sub_block
            request = make_request(limits, direction, *ids, NO_WAIT, *options)
        except (LayoutError, ValueError, TypeError) as error:
            raise type(error)(f"transfers[{index}]: {error}") from None
        if len(request.blocks):
            requests.append(request._replace(sources=common.sources, arrays=common.arrays))
    return tuple(requests) or (common,)


def refuse_targets_of_several(requests: Sequence[Request], layout: KVLayout, hazards: HazardTable) -> None:
    """Raise LayoutError when two requests have a target in common. Those of each are distinct.

    A slot holds blocks of one group, so no two may store to one slot. Two may load to blocks that share no byte.
    """
    if requests[0].direction is Direction.STORE:
        repeated = _repeated([request.slots for request in requests])
        if repeated is not None:
            raise LayoutError(f"slot {repeated} is a target of two of the transfers; a slot holds blocks of one group")
        return
    for members in hazards.sharing_memory(request.group for request in requests):
        among = [request for request in requests if request.group in members]
        if len(among) > 1:
            _refuse_shared_blocks(among, layout, hazards)


def _refuse_shared_blocks(requests: Sequence[Request], layout: KVLayout, hazards: HazardTable) -> None:
    """For loads to groups that share memory."""
    groups = sorted({request.group for request in requests})
    if len(groups) == 1 or hazards.alike(groups[0]):
        repeated = _repeated([request.blocks for request in requests])
        if repeated is not None:
            where = f"group {groups[0]}" if len(groups) == 1 else f"groups {groups}, which have the same planes,"
            raise LayoutError(f"block {repeated} of {where} is a target of two of the transfers; load it once")
        return
    starts = [
        plane.address + request.blocks * plane.block_stride
        for request in requests
        for plane in layout.groups[request.group].planes
    ]
    widths = [plane.block_bytes for request in requests for plane in layout.groups[request.group].planes]
    start = np.concatenate(starts)
    end = np.concatenate([each + width for each, width in zip(starts, widths, strict=True)])
    order = np.argsort(start)
    if (np.maximum.accumulate(end[order])[:-1] > start[order][1:]).any():
        raise LayoutError(f"groups {groups} share memory, and the transfers load to the same bytes of it twice")


def _repeated(ids: Sequence[Int64Array]) -> int | None:
    """An id that is in two of the arrays, each of which has distinct ones."""
    ordered = np.sort(np.concatenate(ids))
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(again[0]) if len(again) else None
