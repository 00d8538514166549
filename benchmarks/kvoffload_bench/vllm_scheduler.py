"""Host time of the calls that vLLM's scheduler makes: `CPUOffloadingManager` compared with this library's index.

Every cache is full. In each round a request of new keys comes: its first key is looked up (a miss), all are stored,
which evicts as many, looked up (a hit), loaded and touched. Keys are new objects each time, 36 bytes, as vLLM's are.
Times are of the calls alone, on this machine's CPU; a GPU takes no part.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Protocol

from kvoffload.cache.entries import Status
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import DEFAULT_POLICY, PolicyName
from kvoffload.errors import CapabilityError
from kvoffload.terminal.console import Advance
from kvoffload_bench.vllm_classes import ManagerClasses

CAPACITY = 65_536
COUNTS = (1, 32, 512)
CALLS = ("lookup", "prepare_store", "complete_store", "prepare_load", "complete_load", "touch")
THEIRS = ("CPUOffloadingManager, lru", "CPUOffloadingManager, arc")
_KEY_BYTES = 36  # a hash of 32 bytes and the number of the group
_FILL = 512


class Calls(Protocol):
    """The calls of the scheduler for one request after another."""

    def begin(self, keys: Sequence[bytes]) -> None:
        """A request with these keys has come. Not timed."""

    def lookup(self, key: bytes) -> bool: ...

    def prepare_store(self, keys: Sequence[bytes]) -> int:
        """Returns how many keys are to be stored."""

    def complete_store(self, keys: Sequence[bytes]) -> object: ...

    def prepare_load(self, keys: Sequence[bytes]) -> object: ...

    def complete_load(self, keys: Sequence[bytes]) -> object: ...

    def touch(self, keys: Sequence[bytes]) -> object: ...

    def end(self) -> None:
        """The request has ended. Not timed."""


class ManagerCalls:
    """An offloading manager of vLLM's interface."""

    def __init__(self, base: Any, manager: Any) -> None:
        self._base, self._manager, self._number = base, manager, 0
        self._hit = base.LookupResult.HIT

    def begin(self, keys: Sequence[bytes]) -> None:
        self._number += 1
        self._request = self._base.ReqContext(str(self._number))
        self._manager.on_new_request(self._request)
        for position, key in enumerate(keys, start=1):
            self._request.set_offload_key_position(key, 16 * position)

    def lookup(self, key: bytes) -> bool:
        return bool(self._manager.lookup(key, self._request) is self._hit)

    def prepare_store(self, keys: Sequence[bytes]) -> int:
        output = self._manager.prepare_store(keys, self._request)
        return 0 if output is None else len(output.keys_to_store)

    def complete_store(self, keys: Sequence[bytes]) -> object:
        return self._manager.complete_store(keys, self._request)

    def prepare_load(self, keys: Sequence[bytes]) -> object:
        return self._manager.prepare_load(keys, self._request)

    def complete_load(self, keys: Sequence[bytes]) -> object:
        return self._manager.complete_load(keys, self._request)

    def touch(self, keys: Sequence[bytes]) -> object:
        return self._manager.touch(keys, self._request)

    def end(self) -> None:
        self._manager.on_request_finished(self._request)


class IndexCalls:
    """A `CacheIndex`, by the calls that carry out those of the interface."""

    def __init__(self, capacity: int, policy: PolicyName) -> None:
        self._index = CacheIndex(capacity, policy=policy)

    def begin(self, keys: Sequence[bytes]) -> None:
        pass

    def lookup(self, key: bytes) -> bool:
        return self._index.status([key])[0] is Status.HIT

    def prepare_store(self, keys: Sequence[bytes]) -> int:
        self._reservation = self._index.reserve(keys)
        return len(self._reservation.indices)

    def complete_store(self, keys: Sequence[bytes]) -> object:  # noqa: ARG002
        self._reservation.commit()
        return None

    def prepare_load(self, keys: Sequence[bytes]) -> object:
        self._lease = self._index.acquire(keys)
        return list(self._lease.indices)

    def complete_load(self, keys: Sequence[bytes]) -> object:  # noqa: ARG002
        self._lease.release()
        return None

    def touch(self, keys: Sequence[bytes]) -> object:
        self._index.touch(keys)
        return None

    def end(self) -> None:
        pass


def managers(classes: ManagerClasses, capacity: int) -> dict[str, Calls]:
    """By name; this library's by its default policy first."""
    ours, theirs = _own_manager(), classes.manager.CPUOffloadingManager
    policies: tuple[PolicyName, ...] = (DEFAULT_POLICY, "lru")
    found: dict[str, Calls] = {}
    for policy in policies:
        if ours is None:
            found[f"CacheIndex, {policy}"] = IndexCalls(capacity, policy)
        else:
            found[f"{ours.__name__}, {policy}"] = ManagerCalls(classes.base, ours(capacity, policy=policy))
    for name in THEIRS:
        found[name] = ManagerCalls(classes.base, theirs(capacity, cache_policy=name[-3:]))
    return found


def _own_manager() -> Any:
    """This library's offloading manager; None if this vLLM cannot have it."""
    try:
        return importlib.import_module("kvoffload.vllm").KVOffloadManager
    except (ImportError, CapabilityError):
        return None


def measure(
    callers: dict[str, Calls], capacity: int, repeats: int, progress: Advance, counts: Sequence[int] = COUNTS
) -> list[dict[str, Any]]:
    """A record for each caller and number of keys: median microseconds by call, and how many keys were stored."""
    numbers = {name: _fill(each, capacity) for name, each in callers.items()}
    records = []
    for place, count in enumerate(counts):
        samples: dict[str, dict[str, list[float]]] = {name: {call: [] for call in CALLS} for name in callers}
        stored = dict.fromkeys(callers, 0)
        for number in range(repeats + 1):
            for name in Random(number).sample(list(callers), len(callers)):
                first = numbers[name]
                numbers[name] += count
                stored[name] += _round(callers[name], first, count, samples[name] if number else None)
        progress(place + 1, len(counts))
        for name, by_call in samples.items():
            medians = {call: statistics.median(values) if values else None for call, values in by_call.items()}
            records.append({"name": name, "vllm": name in THEIRS, "keys": count, "stored": stored[name], "us": medians})
    return records


def _fill(calls: Calls, capacity: int) -> int:
    """Fill the cache with requests, every second of which comes twice. Returns the number of the next key."""
    for number, first in enumerate(range(0, capacity, _FILL)):
        _round(calls, first, min(_FILL, capacity - first), None)
        if number % 2:
            calls.touch(_keys(first - _FILL, _FILL))
    return capacity


def _round(calls: Calls, first: int, count: int, samples: dict[str, list[float]] | None) -> int:
    """All calls of one request. Returns how many keys were stored."""

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        if samples is not None:
            samples[name].append((time.perf_counter() - begin) * 1e6)
        return result

    calls.begin(_keys(first, count))
    assert not calls.lookup(_keys(first, 1)[0]), "a new key is a miss"
    stored: int = timed("prepare_store", partial(calls.prepare_store, _keys(first, count)))
    timed("complete_store", partial(calls.complete_store, _keys(first, count)))
    held = stored == count
    if held:
        assert timed("lookup", partial(calls.lookup, _keys(first, 1)[0])), "a stored key is a hit"
        timed("prepare_load", partial(calls.prepare_load, _keys(first, count)))
        timed("complete_load", partial(calls.complete_load, _keys(first, count)))
    timed("touch", partial(calls.touch, _keys(first, count)))
    calls.end()
    return stored


def _keys(first: int, count: int) -> list[bytes]:
    """New objects each time, as requests bring them."""
    return [number.to_bytes(_KEY_BYTES, "little") for number in range(first, first + count)]
