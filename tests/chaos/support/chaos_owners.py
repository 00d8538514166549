"""The owners of `chaos_pool.py`: each has tiers, a policy and quotas of its own, which follow from its seed."""

from __future__ import annotations

import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from chaos_engines import PLANES, TENANTS, Plan, contents
from chaos_tiers import HANG_SECONDS, RoughDisk, RoughMemory, Row, Weather

from kvoffload import Tenant
from kvoffload.cache.policies import LRU, PolicyChoice, Protected
from kvoffload.cache.tiering.tier_manager import TierManager
from kvoffload.pool import PoolOwner
from kvoffload.pool import owner as pool_owner
from kvoffload.pool.pool_memory import OWNER, PoolMemory
from kvoffload.pool.region import Region
from kvoffload.tiers import Limits, Tier

Right = Callable[[bytes, Row], bool]

AT_WORK, AT_REST = 1, 2  # how an owner is told to end: while members work; once nothing is held any more
REST_SECONDS = 10.0  # in which that has to be
START_SECONDS = 20.0  # until the last owner has let go of the socket
WRITES = ("through", "through", "back", "admitted")


class Raises(LRU):
    """In a few of its calls, before it has done anything or after."""

    _chance = random.Random(1)

    def insert(self, keys: Sequence[bytes]) -> None:
        self._perhaps()
        super().insert(keys)
        self._perhaps()

    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        self._perhaps()
        super().remove(keys, evicted)
        self._perhaps()

    def load(self, keys: Sequence[bytes]) -> None:
        super().load(keys)
        self._perhaps()

    def touch(self, keys: Sequence[bytes]) -> None:
        super().touch(keys)
        self._perhaps()

    def victims(self, count: int, protected: Protected) -> list[bytes] | None:
        self._perhaps()
        return super().victims(count, protected)

    def _perhaps(self) -> None:
        if self._chance.random() < 0.002:
            raise RuntimeError("the policy")


POLICIES: tuple[PolicyChoice, ...] = ("prefix", "prefix", "lru", "s3fifo", Raises)


class Headers:
    """Compares what the headers of an owner's regions say with the rows, as the next owner would find them.

    Args:
        right: whether a row has the bytes of a key.
    """

    def __init__(self, right: Right, says: Callable[[str], None]) -> None:
        self._right, self._says = right, says
        self._memories: dict[Region, PoolMemory] = {}  # mapped once more: they outlive their regions

    def look(self, owner: PoolOwner) -> None:
        """At any moment of an owner that works. Its other threads change headers under the index's lock."""
        for region in list(owner._regions.values()):
            with region.index.lock:
                if region not in self._memories and region.memory.descriptor >= 0:
                    descriptor = os.dup(region.memory.descriptor)
                    self._memories[region] = PoolMemory([descriptor], region.memory.meaning, headers=True)
                if region in self._memories:
                    self._compare(self._memories[region], "while its owner works")
                    self._miss(region)

    def _miss(self, region: Region) -> None:
        """Keys that are ready have headers that say so, or the next owner would not have them."""
        state, found = region.index._state, self._memories[region].found()
        if state.journal is None:  # it is released without the index's lock, and may be the next owner's by now
            return
        there = dict(zip(found.keys, found.entries.tolist(), strict=True))
        for key, entry in state.table.of.items() if state.consistent else ():
            if key not in state.table.pending and there.get(key) != entry:
                self._says(f"entry {entry} has key {int(key)}, and its header says {there.get(key)}")
        for key, entry in there.items() if state.consistent else ():
            if state.table.of.get(key) != entry:
                self._says(f"a header says that entry {entry} has key {int(key)}, which it has not")

    def look_at_what_is_left(self) -> None:
        """After the owner's end, unless one of its tiers is still at work, or the next owner is."""
        for memory in self._memories.values():
            with suppress(BlockingIOError):
                memory.lock(OWNER)
                self._compare(memory, "that was left")
            memory.close()

    def _compare(self, memory: PoolMemory, what: str) -> None:
        found = memory.found()
        for key, entry in zip(found.keys, found.entries.tolist(), strict=True):
            if not self._right(key, memory.rows[entry]):
                self._says(f"a header {what} says that entry {entry} has key {int(key)}, and it has other bytes")


def right_of(plan: Plan) -> Right:
    expected = {PLANES * each.row_bytes: contents(each) for each in (plan, plan.other)}  # by bytes of a row
    return lambda key, row: np.array_equal(row, expected[row.size][int(key)].reshape(-1))


def tiers_of(
    plan: Plan, folder: Path, rng: random.Random, right: Right, says: Callable[[str], None]
) -> Callable[..., list[Tier]]:
    """Of an owner: a tier in memory, one on a disk, or both. Sometimes they cannot be made, and members try again."""
    kinds = rng.choice(("memory", "disk", "disk", "both"))

    def tiers(name: str, _: str) -> list[Tier]:
        made, nbytes = list[Tier](), plan.region_bytes * 3
        if rng.random() < 0.1:
            raise OSError("no tier today")
        if kinds != "disk":
            memory = RoughMemory(nbytes, limits=Limits(threads=4))
            memory.weather = Weather(rng, right, says)
            made.append(memory)
        if kinds != "memory":
            disk = RoughDisk(folder / f"tier-{name}", nbytes=nbytes, identity="chaos", limits=Limits(threads=4))
            disk.weather = Weather(rng, right, says)
            made.append(disk)
        return made

    return tiers


def delay_moves(rng: random.Random) -> None:
    """As on a busy machine, the thread that moves keys between entries and tiers gets its turns late."""
    step, longest = TierManager.step, rng.choice((0.0, 0.02, 0.2, 0.2))

    def late(manager: TierManager) -> float | None:
        time.sleep(rng.random() * longest)
        return step(manager)

    TierManager.step = late  # type: ignore[assignment, method-assign]


def run_owner(plan: Plan, path: str, word: Any, seed: int, errors: Path) -> None:
    """In a forked child: serves until it is killed, or told to close."""

    def says(text: str) -> None:
        with errors.open("a") as file:
            file.write(f"owner, seed {seed}: {text}\n")

    status, rng, right = 1, random.Random(seed), right_of(plan)
    headers = Headers(right, says)
    delay_moves(rng)
    pool_owner.GRACE_SECONDS = plan.grace_seconds
    try:
        quota, few = rng.randint(plan.capacity // 5, plan.capacity), TENANTS[1]
        options: dict[str, Any] = {"tenants": {few: Tenant(max_blocks=quota)}, "policy": rng.choice(POLICIES)}
        if rng.random() < 0.9:
            options |= {"tiers": tiers_of(plan, errors.parent, rng, right, says), "write": rng.choice(WRITES)}
        with begun(path, nbytes=plan.region_bytes, region_bytes=plan.region_bytes, **options) as owner:
            word["state"] = 1
            while not word["stop"] and owner.failure is None:
                time.sleep(0.01)
                headers.look(owner)
            held, end = 1, time.monotonic() + REST_SECONDS
            while word["stop"] == AT_REST and held and time.monotonic() < end:
                word["calls"] = held = sum(each["pending"] + each["pinned"] for each in owner.statistics())
        assert owner.failure is None, f"the owner's thread has ended: {owner.failure!r}"
        status, end = 0, time.monotonic() + rng.choice((0.0, 2.0 * HANG_SECONDS))
        while len(threading.enumerate()) > 1 and time.monotonic() < end:  # calls of tiers that hang
            time.sleep(0.01)
        headers.look_at_what_is_left()
    except BaseException:
        says(traceback.format_exc())
    finally:
        os._exit(status)


def begun(path: str, **options: Any) -> PoolOwner:
    """Once the last owner has closed its socket."""
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            return PoolOwner(path, **options)
        except ValueError:
            if time.monotonic() > end:
                raise
            time.sleep(0.002)
