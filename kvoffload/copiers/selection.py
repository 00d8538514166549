"""Selects a transfer's copy method, by the seconds expected of each method where it is used, and by how much it slows
computation.

Nothing is measured here, and nothing is near a device. A choice is made for a *class* of transfers, those that differ
by a few percent in their number of blocks, and kept: every transfer of a class is carried alike, whichever came first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

from kvoffload.tuning import CONCURRENT_COMPUTE, CopierName, CopyMethod, Profile, Shape, Situation

PREFERENCES = ("overlap", "latency")
TOLERANCE = 1.1  # "overlap" takes what slows computation least among the methods within this factor of the fastest
# The same for methods of the copy engine, which computation hardly delays, and which hardly delay it. A kernel waits
# behind other kernels, as long as these take. `bench field` on an H200, planes of 4 KiB that fold: gather with 4
# programs stored 20 GB/s concurrent with large products and 43 with small ones, which took 1.2 to 1.5 times as long
# meanwhile; strided copies 30 and 30, and both took 1.0.
COPY_ENGINE_TOLERANCE = 2.0
_ALIKE = 0.02  # slow-downs nearer to each other than that are one: about what measuring them again changes
_GATHER_PROGRAMS = (1, 2, 3, 4)
_MOST_PROGRAMS = 8  # 2 to 4 fill the link; more only slow the computation
_SPLIT_PROGRAMS = (1, 2)
_LINK_BOUND = 1.15  # times what a contiguous copy takes
_MOST_HOST_SECONDS = 1e-3
_MANTISSA_BITS = 5
# Seconds that each further part of a load adds to what its copies and bytes take. By the copy engine, 32 blocks of 64
# planes x 32 KiB in 2 to 16 parts on an H200: 30 us, in which the driver takes in the next copies. Launches of a kernel
# are queued well ahead; between two of them the link idles until the first words of the next arrive: 8 us, over
# 32 parts.
_PART_SECONDS = {"gather": 8e-6}
_PART_SECONDS_BY_ENGINE = 30e-6
_SMALL_BYTES = 1 << 20  # transfers whose time says more than their rate
_BY_DEFAULT = ("strided", "batch", "loop", "gather", "split")  # where no method was measured


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
    """What a copy method is expected to take.

    Attributes:
        slowdown: how many times as long a matrix product takes concurrently with it; 1.0 for the copy engine,
            whose methods differ in that only as much as in bandwidth.
        cautious: what methods are compared by. With "latency": seconds, and more by the copier's median error where the
            link is not what bounds it, so that a copier that is as fast as the host happens to be must promise more.
            With "overlap": the mean of the best methods' times in the situations, times how far this one falls behind
            where it falls behind most.
        host: for how long the submission keeps its caller.
    """

    method: CopyMethod
    seconds: float
    slowdown: float
    cautious: float
    host: float


def check_prefer(prefer: Any) -> str:
    """`prefer`, if it is one of `PREFERENCES`; else ValueError."""
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

    Args:
        shape: of the transfer.
        available: names of copiers that can carry it; not empty. With one name: the best method of that copier.
        profile: what they cost.
        prefer: "latency": the fastest on a GPU that computes nothing, where a method whose bound is not the link counts
            as slower by its copier's median error; "overlap": the one that falls least behind the fastest, with large
            products of matrices or with small ones, wherever it falls behind more; of all within 1.1x of that, or 2x
            for the copy engine, the one that slows computation least. Methods that keep the caller for more than a
            millisecond come after the others, if the copy engine has a method that does not.
        sm_limit: programs of a kernel at most.
        parts: in which it is carried, one after the other; the copies of the shape are those of all parts.
        opposite: whether transfers in the other direction are in flight.
    """
    alike, scale = _class_of(shape)
    choice = _choose(alike, frozenset(available), profile, prefer, sm_limit, parts, opposite)
    return choice if scale == 1.0 else choice._replace(seconds=choice.seconds * scale)


def _class_of(shape: Shape) -> tuple[Shape, float]:
    """The shape that stands for all like it, and how many times as many blocks this one has.

    Bytes of a block, planes, and what is merged (a number that only some layouts have) stay as they are, or nearly so.
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
    """All methods, the best first; at least one. Arguments as for `choose`."""
    methods = _methods(shape, available, profile, sm_limit)
    times = [_times(method, shape, profile, prefer, parts, opposite) for method in methods]
    best = tuple(map(min, zip(*times, strict=True)))
    found = [_expect(method, each, best, shape, profile) for method, each in zip(methods, times, strict=True)]
    if all(each.seconds == inf for each in found):
        return sorted(found, key=lambda each: _BY_DEFAULT.index(each.method.copier))
    found.sort(key=lambda each: each.cautious)
    if prefer == "latency":
        return found
    quick = [each for each in found if each.host <= _MOST_HOST_SECONDS]
    if all(each.method.programs for each in quick):  # only kernels: then computation decides
        return _least_disturbing_first(found)
    slow = [each for each in found if each.host > _MOST_HOST_SECONDS]
    return _least_disturbing_first(quick) + _least_disturbing_first(slow)


def _times(
    method: CopyMethod, shape: Shape, profile: Profile, prefer: str, parts: int, opposite: bool
) -> tuple[float, ...]:
    """Expected seconds in each situation that counts.

    Both directions were not measured with compute: what they stretch on a GPU that computes nothing, they are taken to
    stretch there.
    """
    more = (parts - 1) * _PART_SECONDS.get(method.copier, _PART_SECONDS_BY_ENGINE)
    idle = profile.seconds(method, shape)
    both = profile.seconds(method, shape, Situation.BOTH_DIRECTIONS) if opposite else idle
    if prefer == "latency":
        return (both + more,)
    stretch = max(1.0, both / idle) if idle < inf else 1.0
    return tuple([profile.seconds(method, shape, situation) * stretch + more for situation in CONCURRENT_COMPUTE])


def _expect(
    method: CopyMethod,
    times: tuple[float, ...],
    best: tuple[float, ...],
    shape: Shape,
    profile: Profile,
) -> Expected:
    """From the times in each situation: of the method, and of the best method there."""
    seconds = sum(times) / len(times)
    if len(times) > 1:
        behind = [each / least if least < inf else 1.0 for each, least in zip(times, best, strict=True)]
        cautious = max(seconds, max(behind) * sum(best) / len(best))
    else:
        bound = _LINK_BOUND * shape.nbytes / profile.costs[shape.direction].link
        errors = profile.errors.get(method.copier)
        cautious = seconds * (1.0 + errors.median) if errors is not None and seconds > bound else seconds
    slowdown = profile.slowdown(method) if method.programs else 1.0
    return Expected(method, seconds, slowdown, cautious, profile.host_seconds(method, shape))


def _least_disturbing_first(found: list[Expected]) -> list[Expected]:
    """Sort again: methods near the fastest, by what they cost the computation; then the others."""
    if not found:
        return []
    near = [each for each in found if each.cautious <= _tolerance(each.method) * found[0].cautious]
    ordered = []
    rest = near
    while rest:
        least = min(each.slowdown for each in rest)
        ordered += [each for each in rest if each.slowdown <= least + _ALIKE]
        rest = [each for each in rest if each.slowdown > least + _ALIKE]
    return ordered + [each for each in found if each not in near]


def _tolerance(method: CopyMethod) -> float:
    return TOLERANCE if method.programs else COPY_ENGINE_TOLERANCE


def _methods(shape: Shape, available: Collection[str], profile: Profile, sm_limit: int) -> list[CopyMethod]:
    """The methods that could copy a transfer; at least one."""
    folds = shape.rows > shape.operations
    # Submitted one by one, contiguous copies keep the host four times as long, and are as fast at best.
    flat: CopierName = "batch" if "batch" in available else "loop"
    # a strided copy of a single row takes 4 us, a contiguous one 2 at most
    names: tuple[CopierName, ...] = (flat,) if flat in available and not folds else ("strided", flat)
    methods = [CopyMethod(name) for name in names if name in available]
    if "gather" in available:
        methods += [CopyMethod("gather", programs, 1.0) for programs in _programs(_GATHER_PROGRAMS, sm_limit)]
    if "split" in available and (folds or not methods):
        methods += _splits(shape, profile, sm_limit)
    return methods


def _splits(shape: Shape, profile: Profile, sm_limit: int) -> Iterator[CopyMethod]:
    for programs in _SPLIT_PROGRAMS:
        if programs <= sm_limit:
            yield CopyMethod("split", programs, profile.split_share(shape, programs))


def _programs(usual: tuple[int, ...], sm_limit: int) -> list[int]:
    most = min(sm_limit, _MOST_PROGRAMS)
    more = [most] if most > usual[-1] else []
    return [programs for programs in usual if programs <= most] + more


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
    if best.slowdown < fastest.slowdown - _ALIKE:
        gain = "slows computation less"
    else:
        gain = "costs the host less" if best.cautious >= fastest.cautious else "is surer"
    return f"{text}, {best.seconds / fastest.seconds:.2f}x of {fastest.method} ({_rate(fastest, shape)}), and {gain}"


def _rate(expected: Expected, shape: Shape) -> str:
    if shape.nbytes < _SMALL_BYTES:
        return f"{expected.seconds * 1e6:.0f} us"
    return f"{shape.nbytes / expected.seconds / 1e9:.1f} GB/s"
