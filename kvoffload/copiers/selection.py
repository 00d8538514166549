"""Selects the copier of a transfer by its expected seconds, and by its cost for computation and the caller.

Nothing is measured here, and no device is touched. Transfers whose numbers of blocks differ by a few percent are one
*class*. A choice is made once for a class and kept. Where pack and the copy engine could both carry a transfer, it is
only the first word: what transfers take decides from then on, see `observed`.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

from kvoffload.copiers.observed import Comparison, Way
from kvoffload.tuning import CONCURRENT_COMPUTE, CopierName, Profile, Shape, Situation

PREFERENCES = ("overlap", "latency")
TOLERANCE = 1.1  # copiers within it count as equal: measuring again changes as much
_MOST_HOST_SECONDS, _HOST_BYTES = 1e-3, 64 << 20  # for transfers up to that size; larger ones in proportion
_MANTISSA_BITS = 5
# Seconds that each further part of a load adds: 32 blocks of 64 planes x 32 KiB in 2 to 16 parts on an H200. In these
# 30 us the driver takes in the next copies.
_PART_SECONDS = 30e-6
# What pack takes beyond contiguous copies on an H200, for each part of a load: its kernel waits until programs of the
# caller's end. Transfers of 64 MiB it carries fastest in every situation, whatever a profile expects, which knows other
# copiers beside compute from smaller ones; 32 MiB are in between.
_PACK_BYTES = 32 << 20
_PACK_SECONDS = {Situation.IDLE: 20e-6, Situation.LARGE_PRODUCTS: 60e-6, Situation.SMALL_PRODUCTS: 30e-6}
# How much longer than contiguous copies pack keeps its caller: 9 to 74 us in `bench submit` on a host with an H200.
_PACK_HOST_SECONDS = 40e-6
_SMALL_BYTES = 1 << 20  # transfers whose time says more than their rate


class Question(NamedTuple):
    """A transfer whose copier is to be selected.

    Attributes:
        shape: its size, all parts together.
        available: names of the copiers that can carry it; at least one of the copy engine.
        prefer: one of `PREFERENCES`.
        parts: the number of parts.
        opposite: whether transfers in the other direction are in flight.
    """

    shape: Shape
    available: frozenset[str]
    profile: Profile
    prefer: str
    parts: int = 1
    opposite: bool = False


class Selection(NamedTuple):
    """A copier, and why it is selected.

    Attributes:
        reason: a sentence with figures.
        between: what decides, if it is not the profile alone: a comparison by the last transfers, and its ways.
    """

    copier: CopierName
    reason: str
    between: tuple[Comparison, tuple[Way, Way]] | None = None


class Expected(NamedTuple):
    """The expected costs of a copier.

    Attributes:
        seconds: on the GPU's clock; with "overlap" the mean of both situations.
        host: seconds that the submission keeps its caller.
        extra: host seconds that count in its price, see `choose`.
        weight: copiers are compared by it, see `choose`; the least is the best.
    """

    copier: CopierName
    seconds: float
    host: float
    extra: float
    weight: float


def check_prefer(prefer: Any) -> str:
    if prefer not in PREFERENCES:
        raise ValueError(
            f"prefer must be 'overlap' (slow computation least) or 'latency' (be fastest), got {prefer!r:.40}"
        )
    return str(prefer)


def choose(question: Question) -> Selection:
    """Select the copier of a transfer.

    1. With "latency" a copier's weight is the time from the call to the end, on a GPU that computes nothing.
    2. With "overlap" a copier has two prices, one concurrent with large matrix products and one with small ones. A
       price is the transfer's time, plus the time that the caller is kept if that exceeds a millisecond (for more than
       64 MiB: a millisecond for each 64 MiB). The weight is the larger of the two ratios to the lowest price, so that a
       copier must be good beside both kinds of computation. The least weight wins.
    3. From 32 MiB a part on pack wins, if it can carry the transfer and a block is more than one row.
    4. Else with "overlap" any time of the caller counts: unless pack won, the one that keeps its caller the shortest
       wins among those that end within 1.1x of the soonest. (Both directions at once, 4 blocks of 32 planes x 64 KiB on
       an H200: 367 us with strided copies, 476 with contiguous ones.)
    """
    return _choose(question._replace(shape=_class_of(question.shape)))


def _class_of(shape: Shape) -> Shape:
    """Return the shape of the class that this one belongs to.

    The bytes of a block, the planes, and how many blocks are merged stay nearly the same.
    """
    direction, blocks, plane_blocks, operations, rows, nbytes = shape
    excess = blocks.bit_length() - _MANTISSA_BITS
    if excess <= 0:
        return shape
    alike = (blocks + (1 << excess - 1)) >> excess << excess
    nbytes, plane_blocks = nbytes // blocks * alike, plane_blocks // blocks * alike
    if rows == shape.plane_blocks:  # nothing is merged: all counts go with the blocks
        return Shape(direction, alike, plane_blocks, operations // blocks * alike, plane_blocks, nbytes)
    merged, height = round(shape.plane_blocks / rows, 1), round(rows / operations, 1)
    rows = max(1, round(plane_blocks / merged))
    return Shape(direction, alike, plane_blocks, max(1, round(rows / height)), rows, nbytes)


@lru_cache(maxsize=4096)
def _choose(question: Question) -> Selection:
    best, *others = rank(question)
    return Selection(best.copier, _explain(best, others, question))


def rank(question: Question) -> list[Expected]:
    """Return all copiers that could carry a transfer, the best first; at least one. Cases as in `choose`."""
    shape, available, profile, prefer, parts, _ = question
    # Contiguous copies one by one keep the host four times as long as in batches, and are as fast at best. A strided
    # copy of a single row takes 4 us, a contiguous one 2 at most. Of blocks of one row packing saves nothing.
    flat: CopierName = "batch" if "batch" in available else "loop"
    folds = shape.rows > shape.operations
    names: tuple[CopierName, ...] = (flat,) if flat in available and not folds else ("strided", flat)
    packed: tuple[CopierName, ...] = ("pack",) if shape.rows > shape.blocks else ()
    copiers = [name for name in (*names, *packed) if name in available]
    situations = CONCURRENT_COMPUTE if prefer == "overlap" else (Situation.IDLE,)
    times = [[_seconds(copier, question, situation) for situation in situations] for copier in copiers]
    if all(min(each) == inf for each in times):
        return [Expected(copier, inf, 0.0, 0.0, inf) for copier in copiers]
    hosts = [profile.host_seconds(*_carried(copier, question)) for copier in copiers]
    if prefer == "latency":  # 1
        extras = [profile.seconds_around(*_carried(copier, question)) for copier in copiers]
        weights = [seconds + extra for (seconds,), extra in zip(times, extras, strict=True)]
    else:  # 2
        most = _MOST_HOST_SECONDS * max(1.0, shape.nbytes / _HOST_BYTES)
        extras = [host if host > most else 0.0 for host in hosts]
        prices = [[seconds + extra for seconds in each] for extra, each in zip(extras, times, strict=True)]
        lowest = [min(each) for each in zip(*prices, strict=True)]
        weights = [
            max(price / low if low < inf else 1.0 for price, low in zip(each, lowest, strict=True)) for each in prices
        ]
    found = [
        Expected(copier, sum(each) / len(each), host, extra, weight)
        for copier, each, host, extra, weight in zip(copiers, times, hosts, extras, weights, strict=True)
    ]
    found.sort(key=lambda each: each.weight)
    if shape.nbytes >= parts * _PACK_BYTES:  # 3
        found.sort(key=lambda each: each.copier != "pack")
    if prefer == "overlap" and found[0].copier != "pack":  # 4
        soonest = TOLERANCE * min(each.host + each.seconds for each in found if each.copier != "pack")

        def by_host(each: Expected) -> tuple[bool, bool, float, float]:
            return each.copier == "pack", each.host + each.seconds > soonest, each.host, each.weight

        found.sort(key=by_host)
    return found


def two_ways(question: Question, queued: bool) -> tuple[Way, Way] | None:
    """Return pack and the best copier of the copy engine, if either could carry a transfer; None if only one could, if
    the profile does not know them, and for transfers that are over before the choice could matter.

    With "overlap" the caller's time counts, too; if the transfer is `queued` behind one of its direction, only what its
    copies do not hide.
    """
    best, *_ = ranked = rank(question)
    found = {each.copier == "pack": each for each in reversed(ranked)}
    if len(found) < 2 or question.shape.nbytes < _SMALL_BYTES or inf in (each.seconds for each in found.values()):
        return None

    def idle(each: Expected) -> float:
        return _seconds(each.copier, question, Situation.IDLE)

    def extra(each: Expected) -> float:
        if question.prefer == "latency":
            return each.extra
        host = each.host + (question.parts * _PACK_HOST_SECONDS if each.copier == "pack" else 0.0)
        return max(each.extra, host - idle(each) if queued else host)

    def way(each: Expected) -> Way:
        first = each.seconds
        if each is not best:  # the profile's choice carries the first transfers, so this one counts as no better
            first = max(first, 1.001 * (best.seconds + extra(best)) - extra(each))
        return Way(each.copier, idle(each), extra(each), first / idle(each))

    return way(found[True]), way(found[False])


def _carried(copier: CopierName, question: Question) -> tuple[CopierName, Shape]:
    """Return the copier and transfer whose costs the profile knows: for pack, contiguous copies of a block's parts."""
    shape, profile = question.shape, question.profile
    if copier != "pack":
        return copier, shape
    blocks = shape.blocks * question.parts
    flat: CopierName = "batch" if "batch" in profile.costs[shape.direction].flat else "loop"
    return flat, shape._replace(plane_blocks=blocks, operations=blocks, rows=blocks)


def _seconds(copier: CopierName, question: Question, situation: Situation) -> float:
    """Return the expected seconds. Both directions at once were not measured with compute. They are taken to stretch a
    transfer as much as without.
    """
    carried = _carried(copier, question)
    profile, parts = question.profile, question.parts
    seconds = profile.seconds(*carried, situation)
    if question.opposite:
        idle = profile.seconds(*carried)
        both = profile.seconds(*carried, Situation.BOTH_DIRECTIONS)
        seconds = both if situation is Situation.IDLE else seconds * max(1.0, both / idle) if idle < inf else inf
    return seconds + (parts * _PACK_SECONDS[situation] if copier == "pack" else (parts - 1) * _PART_SECONDS)


def _explain(best: Expected, others: list[Expected], question: Question) -> str:
    shape, parts = question.shape, question.parts
    if best.seconds == inf:
        return f"{best.copier}: no copier was measured, see `kvoffload tune`"
    beside = question.prefer == "overlap" and question.profile.situations
    text = f"{best.copier}: {_rate(best, shape)} expected{' concurrent with compute' if beside else ''}"
    known = [each for each in others if each.seconds < inf]
    if not known:
        return f"{text}, the only copier"
    fastest = min(known, key=lambda each: each.seconds)
    if best.seconds <= fastest.seconds:
        return f"{text}, the fastest; next is {fastest.copier} with {_rate(fastest, shape)}"
    if best.copier == "pack" and shape.nbytes >= parts * _PACK_BYTES:
        return f"{text}; selected from {parts * _PACK_BYTES >> 20} MiB on"
    gain = "costs the host less" if best.host < fastest.host else "is as good beside large and small products"
    return f"{text}, {best.seconds / fastest.seconds:.2f}x of {fastest.copier} ({_rate(fastest, shape)}), and {gain}"


def _rate(expected: Expected, shape: Shape) -> str:
    if shape.nbytes < _SMALL_BYTES:
        return f"{expected.seconds * 1e6:.0f} us"
    return f"{shape.nbytes / expected.seconds / 1e9:.1f} GB/s"
