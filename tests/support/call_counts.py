"""What a warm transfer costs in Python calls, and through which files it goes: `python tests/support/call_counts.py`.
With `--walk` it also prints the functions in the order in which they are entered.

Counted are the entries of Python functions while the call runs ("call" events of `sys.setprofile`): those of numpy and
of the standard library, too, but not those within the simulated driver, which on a GPU is C.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tiering import RaisingTier

import kvoffload
from kvoffload import NO_WAIT, BlockCache, KVLayout, OffloadEngine
from kvoffload.testing import SimulatedDriver
from kvoffload.tiers import Outcome, TierJob

PACKAGE = str(Path(kvoffload.__file__).resolve().parent) + "/"
SIMULATOR = PACKAGE + "simulator/"
BLOCKS, PLANES, BLOCK_BYTES = 8, 64, 256
WARM = 6  # calls before the one that is counted


class Calls(NamedTuple):
    """What a call has entered.

    Attributes:
        total: Python functions.
        by_file: how many of each file; relative to the package, or as Python names it.
        functions: in order: file and name.
    """

    total: int
    by_file: Counter[str]
    functions: list[str]

    @property
    def files(self) -> list[str]:
        """Those of the package."""
        return [name for name in self.by_file if not name.startswith(("/", "<"))]

    @property
    def changes(self) -> int:
        """How often the next function is in another file of the package."""
        files = [file for each in self.functions if not (file := each.split(" ", 1)[0]).startswith(("/", "<"))]
        return sum(file != following for file, following in pairwise(files))

    def __str__(self) -> str:
        lines = [f"{self.total} calls, {len(self.files)} files of the package, {self.changes} changes of file"]
        for name, count in self.by_file.most_common():
            called = Counter(each.split(" ", 1)[1] for each in self.functions if each.startswith(name + " "))
            shown = ", ".join(f"{function} {n}" if n > 1 else function for function, n in called.items())
            lines.append(f"  {count:4}  {name}: {shown}")
        return "\n".join(lines)


def count_calls(function: Callable[[], object]) -> Calls:
    """Call `function` and count what it enters; functions of this file are not."""
    functions: list[str] = []

    def notice(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename != __file__ and not _in_simulator(frame):
            functions.append(f"{frame.f_code.co_filename.removeprefix(PACKAGE)} {frame.f_code.co_qualname}")

    sys.setprofile(notice)
    try:
        function()
    finally:
        sys.setprofile(None)
    return Calls(len(functions), Counter(each.split(" ", 1)[0] for each in functions), functions)


def _in_simulator(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(SIMULATOR):
            return True
        frame = frame.f_back
    return False


@contextmanager
def engines(num_slots: int = 16) -> Iterator[OffloadEngine]:
    """An engine over planes in one slab."""
    with kvoffload.open_device(backend=SimulatedDriver(seed=1)) as device:
        planes = device.allocate_planes(PLANES, block_bytes=BLOCK_BYTES, num_blocks=64)
        with OffloadEngine(KVLayout([planes]), device=device, num_slots=num_slots, staging_bytes=0) as engine:
            yield engine


def _counted(call: Callable[[int], Any]) -> Calls:
    """The last of several calls, each of which has ended before the next."""
    for turn in range(WARM):
        call(turn).wait(10)
    return count_calls(lambda: call(WARM))


def engine_store() -> Calls:
    with engines() as engine:
        return _counted(lambda _: engine.store(range(BLOCKS), range(BLOCKS), after=NO_WAIT))


def engine_load() -> Calls:
    with engines() as engine:
        engine.store(range(BLOCKS), range(BLOCKS), after=NO_WAIT).wait(10)
        return _counted(lambda _: engine.load(range(BLOCKS), range(BLOCKS, 2 * BLOCKS), after=NO_WAIT))


KEYS = [[b"%d-%d" % (turn, number) for number in range(BLOCKS)] for turn in range(WARM + 1)]


def cache_store() -> Calls:
    """Of new keys, for which there is room."""
    with engines(num_slots=BLOCKS * (WARM + 1)) as engine:
        cache = BlockCache(engine)
        return _counted(lambda turn: cache.store(KEYS[turn], range(BLOCKS), after=NO_WAIT))


def cache_store_evicting() -> Calls:
    """Of new keys that displace others, by the default policy, which then looks for what is worth least."""
    with engines() as engine:
        cache = BlockCache(engine)
        return _counted(lambda turn: cache.store(KEYS[turn], range(BLOCKS), after=NO_WAIT))


def cache_load() -> Calls:
    with engines() as engine:
        cache = BlockCache(engine)
        cache.store(KEYS[0], range(BLOCKS), after=NO_WAIT).wait(10)
        return _counted(lambda _: cache.load(KEYS[0], range(BLOCKS, 2 * BLOCKS), after=NO_WAIT))


def cache_fetch() -> Calls:
    """Of keys that are all in slots; there are no tiers."""
    with engines() as engine:
        return _counted_fetch(BlockCache(engine))


def cache_fetch_above_tier() -> Calls:
    """Of keys that are all in slots, so that no tier is asked."""
    with engines() as engine, BlockCache(engine, tiers=[_AtOnce()], write="none") as cache:
        return _counted_fetch(cache)


def _counted_fetch(cache: BlockCache[OffloadEngine]) -> Calls:
    cache.store(KEYS[0], range(BLOCKS), after=NO_WAIT).wait(10)
    return _counted(lambda _: cache.fetch(KEYS[0], range(BLOCKS, 2 * BLOCKS), after=NO_WAIT))


class _AtOnce(RaisingTier):
    """Has each of its jobs done when it returns, in the thread that gives it; it raises nothing."""

    def __init__(self) -> None:
        super().__init__(set())
        self.records: set[bytes] = set()

    def put(self, keys: Any, entries: Any, **_: Any) -> TierJob:
        self.records.update(keys)
        return TierJob(keys, entries).settle_waiting(Outcome.DONE)

    def get(self, keys: Any, entries: Any, **options: Any) -> TierJob:
        options["notify"]()
        return TierJob(keys, entries).settle_waiting(Outcome.DONE)

    def contains(self, keys: Any) -> list[bool]:
        return [key in self.records for key in keys]


def promote() -> Calls:
    """What the thread of the tiers enters, from the promotion of keys that only a tier has to its next sleep."""
    functions: list[str] = []
    counting = False

    def notice(frame: FrameType, event: str, _: Any) -> None:
        if counting and event == "call" and frame.f_code.co_filename != __file__ and not _in_simulator(frame):
            functions.append(f"{frame.f_code.co_filename.removeprefix(PACKAGE)} {frame.f_code.co_qualname}")

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        """Of all threads that begin now; it leaves all but that of the tiers alone."""
        sys.setprofile(notice if threading.current_thread().name == "kvoffload-tiers" else None)
        notice(frame, event, argument)

    def until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end
            time.sleep(1e-3)

    with engines(num_slots=BLOCKS * 4) as engine:
        threading.setprofile(profile)
        try:
            cache = BlockCache(engine, tiers=[_AtOnce()], write="through")
        finally:
            threading.setprofile(None)
        with cache:
            for keys in KEYS[:2]:
                cache.store(keys, range(BLOCKS), after=NO_WAIT).wait(10)
            assert cache.drain(10)
            cache.clear(below=False)
            for keys in KEYS[:2]:  # the first one warms up
                time.sleep(0.1)  # what has happened before is heard, and the thread sleeps
                functions.clear()
                counting = True
                with cache.promote(keys) as promotion:
                    assert promotion.wait(10) == BLOCKS
                    until(lambda: sum("Waker.wait" in each for each in functions) >= 2)  # after what it has heard
                counting = False
    return Calls(len(functions), Counter(each.split(" ", 1)[0] for each in functions), functions)


MEASURED: dict[str, Callable[[], Calls]] = {
    "engine.store": engine_store,
    "engine.load": engine_load,
    "cache.store": cache_store,
    "cache.store, evicting": cache_store_evicting,
    "cache.load": cache_load,
    "cache.fetch": cache_fetch,
    "cache.fetch, above a tier": cache_fetch_above_tier,
    "cache.promote, in the tiers' thread": promote,
}


if __name__ == "__main__":
    walk, names = "--walk" in sys.argv, [each for each in sys.argv[1:] if each != "--walk"]
    for name, measure in MEASURED.items():
        if not names or name in names:
            calls = measure()
            print(f"{name}: {calls}\n")
            if walk:
                print(*calls.functions, "", sep="\n")
