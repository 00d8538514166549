"""Whether planes share bytes of device memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from kvoffload.errors import LayoutError


class Blocks(Protocol):
    """Where the blocks of a plane lie; `kvoffload.layout.planes.Plane` has them."""

    @property
    def address(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def block_stride(self) -> int: ...

    @property
    def end(self) -> int: ...


def refuse_overlap(planes: Sequence[Blocks], name: str) -> None:
    """Raise LayoutError when two planes share a byte: a load would then write it twice, in no order.

    Interleaved planes, `(blocks, planes, ...)`, overlap as ranges and yet share nothing: with one stride, what counts
    is where their payloads lie within it. Planes whose ranges overlap with different strides count as sharing.

    Args:
        name: of the sequence, for the message, which names both planes by index.
    """
    order = sorted(range(len(planes)), key=lambda index: planes[index].address)
    cluster: list[int] = []  # planes whose ranges overlap
    end = 0
    for index in order:
        if planes[index].address >= end:
            _refuse_shared_bytes(planes, cluster, name)
            cluster = []
        cluster.append(index)
        end = max(end, planes[index].end)
    _refuse_shared_bytes(planes, cluster, name)


def _refuse_shared_bytes(planes: Sequence[Blocks], cluster: list[int], name: str) -> None:
    if len(cluster) < 2 or _interleaved([planes[index] for index in cluster]):
        return
    for low, high in itertools.combinations(cluster, 2):
        if planes[high].address < planes[low].end and share_bytes(planes[low], planes[high]):
            raise LayoutError(f"{name}[{low}] and {name}[{high}] share bytes of device memory")


def _interleaved(planes: Sequence[Blocks]) -> bool:
    """Whether all planes have one stride and keep to different bytes within it; says nothing when False."""
    stride = planes[0].block_stride
    if any(plane.block_stride != stride for plane in planes):
        return False
    places = sorted((plane.address % stride, plane.block_bytes) for plane in planes)
    following = [*(start for start, _ in places[1:]), places[0][0] + stride]
    return all(start + nbytes <= limit for (start, nbytes), limit in zip(places, following, strict=True))


def share_bytes(low: Blocks, high: Blocks) -> bool:
    """Whether two planes share a byte whose ranges overlap, `low` being the one that begins first."""
    if low.block_stride != high.block_stride:
        return True
    shift = (high.address - low.address) % low.block_stride
    return shift < low.block_bytes or shift + high.block_bytes > low.block_stride
