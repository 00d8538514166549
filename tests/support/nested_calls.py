"""A call of the library in the middle of another one, where a signal handler or a finalizer would make it.

At a point of a scenario's call (see `interrupts.py`) another public call is made in the same thread. It may answer, be
put off or be refused. Then the scenario's call goes on, and the same checks follow as after an interrupt. A key that
the nested call sees as a hit must have its bytes in its slot at that moment.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from interrupt_world import BLOCK_BYTES, PLANES, SECONDS, SOURCES, CacheWorld, TieredWorld, contents, keys

import kvoffload
from kvoffload import NO_WAIT, KVOffloadError, Status

Inner = Callable[[], object]
_NESTED = "in the middle of another call"
_TARGET, _SOURCE = 47, 20  # blocks of nested transfers


class _Cycle:
    """Garbage with a handle, which a collection finds."""

    def __init__(self, *handles: Any) -> None:
        self.handles = handles
        self.me = self


def _of_engine(world: Any, name: str) -> Inner | None:
    engine = getattr(world, "engine", None)
    if engine is None:
        return None
    cache = getattr(world, "cache", None)
    simple: dict[str, Inner] = {"poll": engine.poll, "statistics": engine.statistics}
    if name in simple:
        return simple[name]
    if name in ("drain", "close"):
        return lambda: getattr(engine, name)(SECONDS)
    if name in ("store", "load") and cache is None:
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
    cache = getattr(world, "cache", None) or getattr(world, "index", None)
    if cache is None:
        return None
    if name == "lookup":
        return lambda: _verified(world, cache, [Status.HIT] * cache.lookup(keys(range(6))))
    if name == "status":
        return lambda: _verified(world, cache, cache.status(keys(range(SOURCES))))
    if name == "keys_statistics":
        return lambda: (cache.statistics(), len(cache))
    if name == "remove":
        return lambda: cache.remove(keys([3]))
    if name == "reserve":
        return lambda: cache.reserve(keys([7])).abort()
    if name == "release":
        lease, reservation = _handles(cache)
        return lambda: (lease.release(), reservation.abort())
    if name == "collect":
        _Cycle(*_handles(cache))
        return gc.collect
    if not isinstance(world, CacheWorld):
        return None
    if name == "store":
        return lambda: world.store(6)
    if name == "load":
        return lambda: cache.load(keys([1]), [_TARGET], after=NO_WAIT)
    if name in ("promote", "promote_wait") and isinstance(world, TieredWorld):
        return lambda: _promote(world, wait=name == "promote_wait")
    return None


def _handles(cache: Any) -> tuple[Any, Any]:
    """A lease of key 2, if it is there, and a reservation."""
    there = keys([2]) if cache.status(keys([2])) == [Status.HIT] else []
    return cache.acquire(there), cache.reserve(keys([7]))


def _promote(world: TieredWorld, wait: bool) -> None:
    promotion = world.full.promote(keys(range(3)))
    world.kept.append(promotion)
    if wait:
        promotion.wait(SECONDS)


NAMES = (
    *("done", "wait", "wait_timeout", "poll", "statistics", "lookup", "status", "keys_statistics", "store", "load"),
    *("release", "reserve", "promote", "promote_wait", "remove", "drain", "close", "collect"),
)


def _verified(world: Any, cache: Any, statuses: list[Status]) -> None:
    """The statuses of keys from the first on; AssertionError if one is a hit without its bytes."""
    if not hasattr(world, "planes") or world.device_count > 1 or world.engine is None or world.engine.closed:
        return
    table = cache._state.table
    for number, status in enumerate(statuses):
        if status is Status.HIT:
            slot = world.engine.slots[table.of[keys([number])[0]], : PLANES * BLOCK_BYTES]
            assert (slot == contents()[number].reshape(-1)).all(), f"key {number} is a hit without its bytes"


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
        if self._name == "close":
            self._world.closing = True
        try:
            assert self._call is not None
            self._call()
        except (KVOffloadError, TimeoutError):  # behind a stream that stands still
            pass
        except RuntimeError as error:
            if _NESTED not in str(error):
                self.problems.append(f"broken: the nested call: {error!r}")
        except ValueError as error:
            if "BlockCache" not in str(error):  # slots that a cache owns
                self.problems.append(f"broken: the nested call: {error!r}")
        except AssertionError as error:
            self.problems.append(
                f"wrong hit: {error}" if "hit" in str(error) else f"broken: the nested call: {error!r}"
            )
        except Exception as error:
            self.problems.append(f"broken: the nested call: {error!r}")


def wrong_error(error: BaseException | None) -> list[str]:
    """What is wrong with the exception that left the call around a nested one: it may have been refused, not broken."""
    if error is None or isinstance(error, KVOffloadError | ValueError | TimeoutError):
        return []
    return [f"broken: the outer call: {type(error).__name__}: {error}"]


class Tracer:
    """Follows the transfers, as a nested call may."""

    def on_submit(self, job: kvoffload.Job) -> int:
        assert job.done in (True, False), "a tracer may look at the job"
        return job.id

    def on_end(self, started: int, result: kvoffload.TransferResult) -> None:
        assert started == result.job_id
