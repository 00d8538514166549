"""Selects the copy method of a transfer by its expected seconds, and by its cost for computation and the caller.

Nothing is measured here, and no device is touched. Transfers whose numbers of blocks differ by a few percent are one
*class*. A choice is made once for a class and kept, so all transfers of a class use the same method.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

from kvoffload.tuning import CONCURRENT_COMPUTE, CopierName, CopyMethod, Profile, Shape, Situation

PREFERENCES = ("overlap", "latency")
TOLERANCE = 1.1  # methods within it count as equal: measuring again changes as much
_ALIKE = 0.02  # slow-downs within it count as equal: measuring again changes as much
_GATHER_PROGRAMS = (1, 2, 3, 4)
_MOST_PROGRAMS = 8  # 2 to 4 fill the link; more only slow the computation
_SPLIT_PROGRAMS = (1, 2)
_MOST_HOST_SECONDS, _HOST_BYTES = 1e-3, 64 << 20  # for transfers up to that size; larger ones in proportion
_MANTISSA_BITS = 5
# Seconds that each further part of a load adds. By the copy engine, 32 blocks of 64 planes x 32 KiB in 2 to 16 parts on
# an H200: 30 us, in which the driver takes in the next copies. Launches of a kernel are queued well ahead; between two
# of them the link idles until the first words of the next arrive: 8 us, over 32 parts. Concurrent with compute each
# launch waits for a multiprocessor, as the smallest transfer does.
_PART_SECONDS, _PART_SECONDS_OF_KERNEL = 30e-6, 8e-6
_SMALL_BYTES = 1 << 20  # transfers whose time says more than their rate
_BY_DEFAULT = ("strided", "batch", "loop", "gather", "split", "pack")  # if no method was measured


class Choice(NamedTuple):
    """A copy method, and why it is selected.

    Attributes:
        reason: a sentence with figures.
        seconds: expected, on the GPU's clock, see `choose`; infinity if unknown.
    """

    method: CopyMethod
    reason: str
    seconds: float


class Expected(NamedTuple):
    """The expected costs of a copy method.

    Attributes:
        seconds: on the GPU's clock; with "overlap" the mean of both situations.
        slowdown: how many times as long a small matrix product takes concurrently with it; 1.0 for the copy engine.
        host: seconds that the submission keeps its caller.
        weight: methods are compared by it, see `choose`; the least is the best.
    """

    method: CopyMethod
    seconds: float
    slowdown: float
    host: float
    weight: float


def check_prefer(prefer: Any) -> str:
    if prefer not in PREFERENCES:
        raise ValueError(
            f"prefer must be 'overlap' (slow computation least) or 'latency' (be fastest), got {prefer!r:.40}"
        )
    return str(prefer)


def choose(
    shape: Shape,
    available: Collection[str],
    profile: Profile,
    prefer: str,
    sm_limit: int,
    parts: int = 1,
    opposite: bool = False,
) -> Choice:
    """Select the copy method of a transfer.

    1. With "latency" a method's weight is the time from the call to the end, on a GPU that computes nothing.
    2. With "overlap" a method has two prices, one concurrent with large matrix products and one with small ones. A
       price is the transfer's time, plus the time that computation loses meanwhile, plus the time that the caller is
       kept if that exceeds a millisecond (for more than 64 MiB: a millisecond for each 64 MiB). The weight is the
       larger of the two ratios to the lowest price, so that a method must be good beside both kinds of computation.
    3. The least weight wins, but if a method of the copy engine is within 1.1x, kernels are out: measuring again
       changes as much, and kernels take multiprocessors.
    4. Then with "overlap" any time of the caller counts: among the methods of the copy engine that end within 1.1x of
       the soonest, the one that keeps its caller the shortest wins. (Both directions at once, 4 blocks of 32 planes x
       64 KiB on an H200: 367 us with strided copies, 476 with contiguous ones.)

    Args:
        available: names of the copiers that can carry it; at least one. With one name: the best method of that copier.
        sm_limit: the most programs that a kernel may have.
        parts: the number of parts; `shape` is that of all parts together.
        opposite: whether transfers in the other direction are in flight.
    """
    alike, scale = _class_of(shape)
    choice = _choose(alike, frozenset(available), profile, prefer, sm_limit, parts, opposite)
    return choice if scale == 1.0 else choice._replace(seconds=choice.seconds * scale)


def _class_of(shape: Shape) -> tuple[Shape, float]:
    """The shape of the class that this one belongs to, and the ratio of their numbers of blocks.

    The bytes of a block, the planes, and how many blocks are merged stay nearly the same.
    """
    direction, blocks, plane_blocks, operations, rows, nbytes = shape
    excess = blocks.bit_length() - _MANTISSA_BITS
    if excess <= 0:
        return shape, 1.0
    alike = (blocks + (1 << excess - 1)) >> excess << excess
    nbytes, plane_blocks, scale = nbytes // blocks * alike, plane_blocks // blocks * alike, blocks / alike
    if rows == shape.plane_blocks:  # nothing is merged: all counts go with the blocks
        return Shape(direction, alike, plane_blocks, operations // blocks * alike, plane_blocks, nbytes), scale
    merged, height = round(shape.plane_blocks / rows, 1), round(rows / operations, 1)
    rows = max(1, round(plane_blocks / merged))
    return Shape(direction, alike, plane_blocks, max(1, round(rows / height)), rows, nbytes), scale


@lru_cache(maxsize=4096)
def _choose(
    shape: Shape,
    available: frozenset[str],
    profile: Profile,
    prefer: str,
    sm_limit: int,
    parts: int,
    opposite: bool,
) -> Choice:
    best, *others = rank(shape, available, profile, prefer, sm_limit, parts, opposite)
    where = " concurrent with compute" if prefer == "overlap" and profile.situations else ""
    return Choice(best.method, _explain(best, others, shape, where), best.seconds)


def rank(
    shape: Shape,
    available: Collection[str],
    profile: Profile,
    prefer: str,
    sm_limit: int,
    parts: int = 1,
    opposite: bool = False,
) -> list[Expected]:
    """All methods that could carry a transfer, the best first; at least one. Cases and arguments as in `choose`."""
    methods = _methods(shape, available, profile, prefer, sm_limit)
    times = [_times(method, shape, profile, prefer, parts, opposite) for method in methods]
    if all(min(each) == inf for each in times):
        methods.sort(key=lambda each: _BY_DEFAULT.index(each.copier))
        return [Expected(method, inf, 1.0, 0.0, inf) for method in methods]
    if prefer == "latency":  # 1
        weights = [
            seconds + profile.seconds_around(method, shape) for method, (seconds,) in zip(methods, times, strict=True)
        ]
    else:  # 2
        prices = []
        for method, (large, small) in zip(methods, times, strict=True):
            # In this time small products get 1 / slowdown of their work done, so they lose the rest; large ones are
            # hardly slowed. The transfers of the other direction, which are carried alike, slow them once more.
            slowdown = _slowdown(method, profile) ** (2 if opposite else 1)
            host = profile.host_seconds(method, shape)
            kept = host if host > _MOST_HOST_SECONDS * max(1.0, shape.nbytes / _HOST_BYTES) else 0.0
            prices.append((large + kept, small * (2.0 - 1.0 / slowdown) + kept))
        lowest = tuple(map(min, zip(*prices, strict=True)))
        weights = [
            max(price / low if low < inf else 1.0 for price, low in zip(each, lowest, strict=True)) for each in prices
        ]
    found = [
        Expected(method, sum(each) / len(each), _slowdown(method, profile), profile.host_seconds(method, shape), weight)
        for method, each, weight in zip(methods, times, weights, strict=True)
    ]
    least = TOLERANCE * min(each.weight for each in found)  # 3
    copies = [each for each in found if each.method.programs == 0]
    if prefer == "latency" or all(each.weight > least for each in copies):
        return sorted(found, key=lambda each: (each.weight > least or each.method.programs > 0, each.weight))
    soonest = TOLERANCE * min(each.host + each.seconds for each in copies)  # 4

    def by_host(each: Expected) -> tuple[bool, bool, float, float]:
        return each.method.programs > 0, each.host + each.seconds > soonest, each.host, each.weight

    return sorted(found, key=by_host)


def _times(
    method: CopyMethod, shape: Shape, profile: Profile, prefer: str, parts: int, opposite: bool
) -> tuple[float, ...]:
    """Expected seconds: on an idle GPU for "latency", beside large and beside small products for "overlap".

    Both directions at once were not measured with compute. They are taken to stretch a transfer as much as without.
    """
    more = (parts - 1) * (_PART_SECONDS_OF_KERNEL if method.programs else _PART_SECONDS)
    idle = profile.seconds(method, shape)
    both = profile.seconds(method, shape, Situation.BOTH_DIRECTIONS) if opposite else idle
    if prefer == "latency":
        return (both + more,)
    stretch = max(1.0, both / idle) if idle < inf else 1.0
    times = [profile.seconds(method, shape, situation) * stretch + more for situation in CONCURRENT_COMPUTE]
    least = Shape(shape.direction, 1, 1, 1, 1, 1)
    alone = profile.seconds(method, least)
    if parts > 1 and method.programs and alone < inf:  # concurrent with compute each launch begins later
        waits = [max(0.0, profile.seconds(method, least, situation) - alone) for situation in CONCURRENT_COMPUTE]
        times = [seconds + (parts - 1) * wait for seconds, wait in zip(times, waits, strict=True)]
    return tuple(times)


def _slowdown(method: CopyMethod, profile: Profile) -> float:
    return profile.slowdown(method) if method.programs else 1.0


def _methods(
    shape: Shape, available: Collection[str], profile: Profile, prefer: str, sm_limit: int
) -> list[CopyMethod]:
    """The methods that could copy a transfer; at least one.

    For "overlap" there are no splits: beside compute a split waits for its kernel, its times scatter, and it is at most
    1.04x as fast as the better of its halves alone (`bench field`, 36 transfers).
    """
    folds = shape.rows > shape.operations
    # Contiguous copies one by one keep the host four times as long as in batches, and are as fast at best.
    flat: CopierName = "batch" if "batch" in available else "loop"
    # a strided copy of a single row takes 4 us, a contiguous one 2 at most
    names: tuple[CopierName, ...] = (flat,) if flat in available and not folds else ("strided", flat)
    methods = [CopyMethod(name) for name in names if name in available]
    if "gather" in available:
        most = min(sm_limit, _MOST_PROGRAMS)
        numbers = [programs for programs in _GATHER_PROGRAMS if programs <= most]
        numbers += [most] if most > _GATHER_PROGRAMS[-1] else []
        methods += [CopyMethod("gather", programs, 1.0) for programs in numbers]
    if "split" in available and ((folds and prefer == "latency") or not methods):
        usable = [programs for programs in _SPLIT_PROGRAMS if programs <= sm_limit]
        methods += [CopyMethod("split", programs, profile.split_share(shape, programs)) for programs in usable]
    if "pack" in available and not methods:
        methods.append(CopyMethod("pack"))
    return methods


def _explain(best: Expected, others: list[Expected], shape: Shape, where: str) -> str:
    if best.seconds == inf:
        return f"{best.method}: no method was measured, see `kvoffload tune`"
    text = f"{best.method}: {_rate(best, shape)} expected{where}"
    known = [each for each in others if each.seconds < inf]
    if not known:
        return f"{text}, the only method"
    fastest = min(known, key=lambda each: each.seconds)
    if best.seconds <= fastest.seconds:
        return f"{text}, the fastest; next is {fastest.method} with {_rate(fastest, shape)}"
    gain = "slows computation less" if best.slowdown < fastest.slowdown - _ALIKE else "costs the host less"
    return f"{text}, {best.seconds / fastest.seconds:.2f}x of {fastest.method} ({_rate(fastest, shape)}), and {gain}"


def _rate(expected: Expected, shape: Shape) -> str:
    if shape.nbytes < _SMALL_BYTES:
        return f"{expected.seconds * 1e6:.0f} us"
    return f"{shape.nbytes / expected.seconds / 1e9:.1f} GB/s"
