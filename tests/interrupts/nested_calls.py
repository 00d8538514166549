"""A call of the library in the middle of another one, where a signal handler or a finalizer would make it.

At a point of a scenario's call (see `interrupts.py`) another public call is made in the same thread. It may answer, be
put off or be refused. Then the scenario's call goes on, and the same checks follow as after an interrupt. A key that
the nested call sees as a hit must have its bytes in its slot at that moment.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from worlds import SECONDS, SOURCES, CacheWorld, TieredWorld, keys

from kvoffload import NO_WAIT, KVOffloadError, Status
from kvoffload.cache.sessions import ACTIONS

Inner = Callable[[], object]
_NESTED = "in the middle of another call"
_TARGET, _SOURCE = 47, 20  # blocks of nested transfers


class _Cycle:
    """Garbage with a handle, which a collection finds."""

    def __init__(self, *handles: Any) -> None:
        self.handles = handles
        self.me = self


def _of_engine(world: Any, name: str) -> Inner | None:
    engine = world.engine
    if engine is None:
        return None
    simple: dict[str, Inner] = {"poll": engine.poll, "statistics": engine.statistics}
    if name in simple:
        return simple[name]
    if name in ("drain", "close"):
        return lambda: getattr(engine, name)(SECONDS)
    if name in ("store", "load") and world.cache is None:
        ids = ([_SOURCE], [0]) if name == "store" else ([0], [_TARGET])
        return lambda: getattr(engine, name)(*ids, after=NO_WAIT)
    if name in ("done", "wait", "wait_timeout"):
        job: Any = engine.load([0], [_TARGET], after=NO_WAIT)
        waits: dict[str, Inner] = {
            "done": lambda: job.done,
            "wait": job.wait,
            "wait_timeout": lambda: job.wait(timeout=SECONDS),
        }
        return waits[name]
    return None


def _of_keys(world: Any, name: str) -> Inner | None:
    """Calls of a cache or an index."""
    cache = world.cache
    if cache is None:
        return None
    simple: dict[str, Inner] = {
        "lookup": lambda: _verified(world, cache, [Status.HIT] * cache.lookup(keys(range(6)))),
        "status": lambda: _verified(world, cache, cache.status(keys(range(SOURCES)))),
        "keys_statistics": lambda: (cache.statistics(), len(cache)),
        "remove": lambda: cache.remove(keys([3])),
        "reserve": lambda: cache.reserve(keys([7])).abort(),
        "hint": lambda: [cache.hint(action, session="a") for action in ACTIONS],
        "use_weights": lambda: (cache.use_weights("one"), cache.use_weights("")),
    }
    if isinstance(world, CacheWorld):
        simple["store"] = lambda: world.store(6)
        simple["load"] = lambda: cache.load(keys([1]), [_TARGET], after=NO_WAIT)
    if isinstance(world, TieredWorld):
        simple["promote"] = lambda: _promote(world, wait=False)
        simple["promote_wait"] = lambda: _promote(world, wait=True)
    if name == "release":
        lease, reservation = _handles(cache)
        return lambda: (lease.release(), reservation.abort())
    if name == "collect":
        _Cycle(*_handles(cache))
        return gc.collect
    return simple.get(name)


def _handles(cache: Any) -> tuple[Any, Any]:
    """A lease of key 2, if it is there, and a reservation."""
    there = keys([2]) if cache.status(keys([2])) == [Status.HIT] else []
    return cache.acquire(there), cache.reserve(keys([7]))


def _promote(world: TieredWorld, wait: bool) -> None:
    promotion = world.cache.promote(keys(range(3)))
    world.kept.append(promotion)
    if wait:
        promotion.wait(SECONDS)


NAMES = (
    *("done", "wait", "wait_timeout", "poll", "statistics", "lookup", "status", "keys_statistics", "store", "load"),
    *("release", "reserve", "hint", "use_weights", "promote", "promote_wait", "remove", "drain", "close", "collect"),
)


def _verified(world: Any, cache: Any, statuses: list[Status]) -> None:
    """The statuses of keys from the first on; AssertionError if one is a hit without its bytes."""
    if world.engine is None or world.engine.closed:
        return
    del cache
    for number, status in enumerate(statuses):
        if status is Status.HIT:
            for pool, share in world.slots(world.slot_of(number)):
                assert (pool == world.in_slot(number, share)).all(), f"key {number} is a hit without its bytes"


class Nested:
    """A call to be made at some point of another one.

    Attributes:
        problems: what was wrong with it.
    """

    def __init__(self, world: Any, name: str) -> None:
        self._world, self._name = world, name
        self._call = _of_keys(world, name) or _of_engine(world, name)
        self.problems: list[str] = []

    @property
    def exists(self) -> bool:
        """Whether the world has such a call."""
        return self._call is not None

    def __call__(self) -> None:
        if self._name == "close" and self._world.leaves == "open":
            self._world.leaves = "closed"
        try:
            assert self._call is not None
            self._call()
        except (KVOffloadError, TimeoutError):  # behind a stream that stands still
            pass
        except Exception as error:
            refused = isinstance(error, RuntimeError) and _NESTED in str(error)
            if isinstance(error, AssertionError) and "hit" in str(error):
                self.problems.append(f"wrong hit: {error}")
            elif not refused and not (isinstance(error, ValueError) and "BlockCache" in str(error)):  # a cache's slots
                self.problems.append(f"broken: the nested call: {error!r}")


def wrong_error(error: BaseException | None) -> list[str]:
    """What is wrong with the exception that left the call around a nested one: it may have been refused, not broken."""
    if error is None or isinstance(error, KVOffloadError | ValueError | TimeoutError):
        return []
    return [f"broken: the outer call: {type(error).__name__}: {error}"]
