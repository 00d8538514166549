"""Calls of the library by finalizers in its own threads: `python finalizers.py SCENARIO SEED SHARE`.

Wherever a thread of the library executes a line, of its own code or of Python's `threading`, while it holds a lock of
the library, and at lines of its code without one, a garbage collection finds an object whose finalizer makes every call
below. Each line is taken once for each set of locks; SHARE of 1.0 means all of them.

Nobody lists the locks: `threading` is patched before the library is imported, so every lock that it makes is one that
is followed. What is wrong is printed, and the exit status is 1:

- a call that waits for threads of the library was not refused;
- a call does not return, and no other has begun or returned for `SECONDS`; or the program does not end;
- two locks are taken in both orders, by whatever threads, finalizers included: some day each thread has one of them.

Locks of the simulator are left out: they stand for the driver's, and no finalizer runs in the driver.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import logging
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SECONDS = 20.0  # that anything may take
PACKAGE = str(Path(__file__).resolve().parents[2] / "kvoffload") + os.sep
THREADING = threading.__file__
NESTING = PACKAGE + os.path.join("internal", "nesting.py")
IN_CALL = "in the middle of another call"
RLock: Any = threading.RLock
Base: Any = type(RLock())
PlainLock: Any = threading.Lock

Call = Callable[[], object]
Order = tuple[int, int]

# the locks ------------------------------------------------------------------------------------------------------------

held: dict[int, list[Any]] = {}  # by thread, oldest first
orders: dict[Order, str] = {}  # one lock was held, another wanted; and where
names: set[str] = set()
numbers = itertools.count(1)


def _maker(frame: FrameType | None) -> FrameType | None:
    """The frame of the library that makes a lock, perhaps by way of `threading`."""
    while frame is not None and frame.f_code.co_filename in (THREADING, NESTING, __file__):
        frame = frame.f_back
    return frame if frame is not None and frame.f_code.co_filename.startswith(PACKAGE) else None


class Followed(Base):  # type: ignore[misc]
    """A lock that notes who holds it, and in which order locks are taken."""

    name, number = "", 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._want()
        return self._note(super().acquire(blocking, timeout))

    __enter__ = acquire

    def release(self) -> None:
        mine = held[threading.get_ident()]
        del mine[len(mine) - 1 - mine[::-1].index(self)]
        super().release()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _release_save(self) -> Any:
        mine = held[threading.get_ident()]
        mine[:] = [each for each in mine if each is not self]
        return super()._release_save()

    def _acquire_restore(self, saved: Any) -> None:
        self._want()
        super()._acquire_restore(saved)
        self._note(True)

    def _want(self) -> None:
        mine = held.setdefault(threading.get_ident(), [])
        if self not in mine:
            for each in mine:
                order = each.number, self.number
                if order not in orders:
                    orders[order] = f"{each.name} is held and {self.name} wanted: {where(sys._getframe(1))}"

    def _note(self, got: bool) -> bool:
        if got:
            held.setdefault(threading.get_ident(), []).append(self)
        return got


def follow_locks() -> None:
    """Patch `threading`. A plain lock counts like a reentrant one: only the order matters here."""

    def make(original: Any) -> Any:
        frame = _maker(sys._getframe(1))
        if frame is None or "/simulator/" in frame.f_code.co_filename:
            return original()
        lock = Followed()
        lock.name = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
        lock.number = next(numbers)
        names.add(lock.name)
        return lock

    threading.RLock = lambda: make(RLock)  # type: ignore[assignment]
    threading.Lock = lambda: make(PlainLock)  # type: ignore[assignment]


def where(frame: FrameType | None) -> str:
    parts: list[str] = []
    while frame is not None and len(parts) < 60:
        code = frame.f_code
        if code.co_filename != __file__ or code.co_name == "__del__":
            name = "finalizer" if code.co_name == "__del__" else code.co_qualname
            parts.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return f"[{threading.current_thread().name}] " + " < ".join(parts[:14])


def circles() -> list[str]:
    """Locks that are taken in both orders, perhaps by way of others."""
    after: dict[int, set[int]] = {}
    for first, then in orders:
        after.setdefault(first, set()).add(then)
    found = []
    for first, then in orders:
        seen, left = set[int](), [then]
        while left:
            each = left.pop()
            if each not in seen:
                seen.add(each)
                left += after.get(each, ())
        if first in seen:
            found.append(orders[first, then])
    return found


# the finalizer --------------------------------------------------------------------------------------------------------

problems: list[str] = []
running: dict[int, tuple[float, str, str]] = {}
moved = [0.0]  # when a call began or returned last, in any thread: a member's waits for those that the owner's makes

at: dict[int, tuple[dict[str, Call], set[str], str]] = {}  # threads that are to run a finalizer: calls, waits, point


class Garbage:
    """A caller's object in a cycle, which any thread may find."""

    def __init__(self) -> None:
        self.me: object = self

    def __del__(self) -> None:
        calls, waits, point = at.pop(threading.get_ident(), ({}, set[str](), ""))
        for name, call in calls.items():
            moved[0] = time.monotonic()
            running[threading.get_ident()] = moved[0], name, point
            try:
                call()
                said = "returned"
            except Exception as error:
                said = "refused" if IN_CALL in str(error) else type(error).__name__
                if not isinstance(error, KVOffloadError | TimeoutError) and said != "refused":
                    problems.append(f"{name} raised {error!r} at {point}")
            releasing = point.startswith("ThreadedTier._release:")  # a tier's `release` may wait for other tiers
            if name in waits and not releasing and said not in ("refused", "ClosedError"):
                problems.append(f"{name} {said}, it is not refused, at {point}")
        running.pop(threading.get_ident(), None)
        moved[0] = time.monotonic()


class Points:
    """Takes lines of the library's threads, each once.

    Attributes:
        taken: how many, by thread.
    """

    def __init__(self, seed: int, share: float) -> None:
        self._random, self._share = random.Random(seed), share
        self._seen: set[Any] = set()
        self.calls: dict[str, Call] = {}
        self.waits: set[str] = set()
        self.elsewhere: dict[str, tuple[dict[str, Call], set[str]]] = {}  # other calls and waits, by thread
        self.taken: dict[str, int] = {}
        self.locks: set[str] = set()

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        ours = name.startswith(PACKAGE) and "/simulator/" not in name
        return self._line if event == "call" and (ours or name == THREADING) else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        mine = held.get(threading.get_ident())
        thread = threading.current_thread().name.rstrip("0123456789-")
        ours = thread.startswith("kvoffload") and frame.f_code.co_filename != THREADING
        if event == "line" and self.calls and (mine or ours):
            names = frozenset(lock.name for lock in mine or ())
            point = thread, frame.f_code, frame.f_lineno, names
            if point not in self._seen:
                self._seen.add(point)
                if self._random.random() < self._share:
                    self.taken[thread] = self.taken.get(thread, 0) + 1
                    self.locks |= names
                    text = f"{frame.f_code.co_qualname}:{frame.f_lineno} in {thread} with {sorted(names)}"
                    calls, waits = self.elsewhere.get(thread, (self.calls, self.waits))
                    # A finalizer may wait as in a hook or callback of the caller's, and in threads for which no call
                    # waits for longer than its own timeout.
                    outside = _has(frame, lambda code: code.co_qualname == "run_outside")
                    if outside or (thread in FREE and not mine):
                        calls, waits = {name: call for name, call in calls.items() if name not in waits}, set()
                    if thread in FREE:  # these wait for nobody who wants a lock of such a thread
                        calls = {name: call for name, call in calls.items() if name not in DEVICE}
                    at[threading.get_ident()] = calls, waits, text
                    Garbage()
                    gc.collect(0)
                    if threading.get_ident() in at:  # another thread collects: no cycle, then
                        Garbage().me = None
        return self._line


def _has(frame: FrameType | None, which: Callable[[CodeType], bool]) -> bool:
    """Whether such code is on the stack."""
    while frame is not None and not which(frame.f_code):
        frame = frame.f_back
    return frame is not None


def watch() -> None:
    """End the program if its calls stand still."""
    while True:
        time.sleep(0.5)
        for begun, name, point in list(running.values()):
            if time.monotonic() - max(begun, moved[0]) > SECONDS:
                print(f"{name} does not return at {point}", flush=True)
                faulthandler.dump_traceback(all_threads=True)
                os._exit(1)


# the scenarios --------------------------------------------------------------------------------------------------------


FREE = {"MainThread", "kvoffload-callbacks", "kvoffload-pool-region", "kvoffload-pool-remove"}
DEVICE = {"allocate", "close the engine", "close the device"}


def calls_of(cache: Any, device: Any, job: Any, tiers: Any = ()) -> tuple[dict[str, Call], set[str]]:
    """Public calls, and the names of those that wait for threads of the library, or for a device."""
    a, z = b"a", b"z"
    waits: dict[str, Call] = {
        "drain": lambda: cache.drain(0.1),
        "drain for ever": cache.drain,
        "close": lambda: cache.close(1),
        "remove": lambda: cache.remove([b"q"]),
        "clear": cache.clear,
        "wait": lambda: cache.promote([a, z], deadline=0.2).wait(),
        "allocate": lambda: device.allocate(64),
        "close the engine": cache.engine.close,
        "close the device": device.close,
        **{f"drain {tier.name}": tier.drain for tier in tiers},
        **{f"close {tier.name}": tier.close for tier in tiers},
    }
    answers: dict[str, Call] = {
        "fetch": lambda: cache.fetch([a, z], [30, 31], deadline=0.05).cancel(),
        "keep": lambda: cache.keep([b"y"], [4]),
        "lookup": lambda: cache.lookup([a, z]),
        "status": lambda: cache.status([a]),
        "locate": lambda: cache.locate([a, z]),
        "statistics": cache.statistics,
        "tier_statistics": cache.tier_statistics,
        "hint": lambda: [cache.hint(action, session="s") for action in ("prefetch", "demote", "retain")],
        "check": cache.check,
        "touch": lambda: cache.touch([a]),
        "use_weights": lambda: (cache.use_weights("w"), cache.use_weights("")),
        "request": lambda: cache.open_request(session="s").end(),
        "acquire": lambda: cache.acquire([a]).release(),
        "reserve": lambda: cache.reserve([b"r"]).abort(),
        "remove here": lambda: cache.remove([b"n"], below=False),
        "poll": cache.engine.poll,
        "drain the engine": lambda: cache.engine.drain(5),
        "done": lambda: (job.done, job.finished),
        "a callback": lambda: job.add_done_callback(lambda _: None),
        "repr": lambda: repr(cache),
        **{f"statistics of {tier.name}": tier.statistics for tier in tiers},
        **{f"ask {tier.name}": partial(_ask, tier, a) for tier in tiers},
    }
    return {**waits, **answers}, set(waits)


def _ask(tier: Any, key: bytes) -> None:
    tier.exists([key]).cancel()


def use(cache: Any, points: Points, rounds: int) -> None:
    """Every way between slots and tiers."""
    called = threading.Event()
    for number in range(rounds):
        new = b"new %d" % number
        with cache.open_request(session="s") as request:
            cache.fetch([b"a", b"b", new], [10, 11, 12], deadline=0.2, request=request).wait(SECONDS)
            cache.keep([b"a", b"b", new], [0, 1, 2], request=request).wait(SECONDS)
        cache.hint("demote", session="s")
        cache.hint("prefetch", session="s")
        cache.clear(below=False)
        with cache.promote([b"a", b"b", new]) as promotion:
            load = promotion.load([13, 14, 15])
            load.add_done_callback(lambda _: called.set())
            load.wait(SECONDS)
        fetched = cache.fetch([b"a", b"b"], [20, 21], deadline=5.0)
        fetched.add_done_callback(lambda _: called.set())
        fetched.wait(SECONDS)
        job = cache.load([b"a"], [22]) if cache.lookup([b"a"]) else fetched
        job.add_done_callback(lambda _: called.set())
        cache.drain(SECONDS)
        with suppress(TierError):  # of a tier that fails at times
            cache.remove([new])
    points.calls = {}
    cache.check()
    assert called.wait(SECONDS), "callbacks are made"


@contextmanager
def opened(path: str = "", **options: Any) -> Iterator[tuple[Any, Any]]:
    """A device and a cache, perhaps over the shared pool at `path`, whose owner may take long to answer."""
    from kvoffload.pool import SharedPool

    with kvoffload.open_device(backend="simulated") as device:
        layout = kvoffload.KVLayout.from_tree([device.empty((64, 4, 512), "uint16")], axes=("blocks", "tokens", "dim"))
        if path:
            options["pool"] = SharedPool.attach(path, layout, identity="m", answer_seconds=SECONDS)
        with kvoffload.open_cache(layout, device=device, **options) as cache:
            cache.keep([b"a", b"b"], [0, 1]).wait(SECONDS)
            yield device, cache


def tiers(points: Points) -> None:
    """Disk, memory, and a tier that fails and hangs: the tiers' threads, the one that moves keys, callbacks."""
    from kvoffload.testing import FaultyTier, TierFaults
    from kvoffload.tiers import DiskTier, MemoryTier

    faulty = FaultyTier(TierFaults(fail=0.2, delay=0.5), seed=1)
    below = [
        DiskTier(f"{tempfile.mkdtemp()}/kv", nbytes=1 << 20, identity="m"),
        MemoryTier(1 << 20),
        faulty,
    ]
    with opened(tiers=below, pool_bytes=1 << 16) as (device, cache):
        points.calls, points.waits = calls_of(cache, device, cache.keep([b"j"], [9]), below)
        calls, waits = points.calls, points.waits
        use(cache, points, 3)
        faulty.hang_all()
        points.calls, points.waits = calls, waits
        cache.fetch([b"a", b"never"], [10, 11], deadline=0.2).wait(SECONDS)
        faulty.heal()
        use(cache, points, 2)
        points.calls = calls


def growing(points: Points) -> None:
    """A pool that grows."""
    from kvoffload import Growing

    size = 1 << 20
    with opened(pool_bytes=Growing(size, piece_bytes=size // 32)) as (device, cache):
        points.calls, points.waits = calls_of(cache, device, cache.keep([b"j"], [9]))
        points.waits -= {"drain", "drain for ever", "remove", "clear", "wait"}  # there are no tiers
        while cache.engine.growing:
            time.sleep(1e-3)
        use(cache, points, 1)


def pools(points: Points) -> None:
    """A shared pool with tiers, its owner and two members in this process. A member's calls wait for the owner, only so
    long: its threads call another cache.
    """
    from kvoffload.pool import PoolOwner
    from kvoffload.tiers import MemoryTier

    path = f"{tempfile.mkdtemp()}/pool"
    owner = PoolOwner(path, nbytes=1 << 20, tiers=lambda *_: [MemoryTier(1 << 20)], write="through")
    try:
        with (
            opened(tiers=[MemoryTier(1 << 20)], pool_bytes=1 << 16) as apart,
            opened(path) as (_, other),
            opened(path) as (device, cache),
        ):
            calls, waits = calls_of(apart[1], apart[0], apart[1].keep([b"j"], [9]))
            calls.update({"statistics of the owner": owner.statistics, "close the owner": owner.close})
            waits.add("close the owner")
            for name in ("owner", "region", "remove"):
                points.elsewhere[f"kvoffload-pool-{name}"] = calls, waits
            points.elsewhere["kvoffload-tiers"] = points.elsewhere["kvoffload-memory"] = calls, waits
            points.elsewhere["kvoffload-callbacks"] = calls, waits
            points.calls, points.waits = calls_of(cache, device, cache.keep([b"j"], [9]))
            points.waits -= {"drain", "drain for ever"}
            use(cache, points, 2)
            use(other, points, 1)
    finally:
        points.calls = {}
        owner.close()


SCENARIOS = {scenario.__name__: scenario for scenario in (tiers, growing, pools)}


def main(name: str, seed: int, share: float) -> int:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    points = Points(seed, share)
    threading.Thread(target=watch, daemon=True).start()
    threading.settrace(points.trace)
    sys.settrace(points.trace)
    gc.freeze()
    running[0] = time.monotonic() + 4 * SECONDS, "the program", "its end"
    try:
        SCENARIOS[name](points)
    except Exception as error:
        problems.append(f"the program: {error!r}")
    sys.settrace(None)
    threading.settrace(None)
    wrong = [*dict.fromkeys(problems), *circles()]
    print(f"{sum(points.taken.values())} points: {points.taken}; {len(points.locks)} of {len(names)} locks")
    print(*wrong[:40], sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    follow_locks()
    import kvoffload
    from kvoffload import KVOffloadError, TierError

    status = main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    sys.stdout.flush()
    os._exit(status)  # a collection at the end would find what was frozen
