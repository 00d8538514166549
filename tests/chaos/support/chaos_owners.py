"""The owners of `chaos_pool.py`: each has tiers, a policy and quotas of its own, which follow from its seed."""

from __future__ import annotations

import os
import random
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from chaos_engines import PLANES, TENANTS, Plan, contents
from chaos_tiers import HANG_SECONDS, RoughDisk, RoughMemory, Row, Weather

from kvoffload import Tenant
from kvoffload.cache.tiering.manager import TierManager
from kvoffload.pool import PoolOwner
from kvoffload.pool import owner as pool_owner
from kvoffload.tiers import Limits, Tier

AT_WORK, AT_REST = 1, 2  # how an owner is told to end: while members work; once nothing is held any more
REST_SECONDS = 10.0  # in which that has to be
START_SECONDS = 20.0  # until the last owner has let go of the socket
POLICIES, WRITES = ("prefix", "lru", "s3fifo"), ("through", "through", "back", "admitted")


def tiers_of(plan: Plan, folder: Path, rng: random.Random, says: Callable[[str], None]) -> Callable[..., list[Tier]]:
    """Of an owner: a tier in memory, one on a disk, or both. Sometimes they cannot be made, and members try again."""
    kinds = rng.choice(("memory", "disk", "disk", "both"))
    expected = {PLANES * each.row_bytes: contents(each) for each in (plan, plan.other)}  # by bytes of a row

    def right(key: bytes, row: Row) -> bool:
        return np.array_equal(row, expected[row.size][int(key)].reshape(-1))

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

    status, rng = 1, random.Random(seed)
    delay_moves(rng)
    pool_owner.GRACE_SECONDS = plan.grace_seconds
    try:
        quota, few = rng.randint(plan.capacity // 5, plan.capacity), TENANTS[1]
        options: dict[str, Any] = {"tenants": {few: Tenant(max_blocks=quota)}, "policy": rng.choice(POLICIES)}
        if rng.random() < 0.9:
            options |= {"tiers": tiers_of(plan, errors.parent, rng, says), "write": rng.choice(WRITES)}
        with begun(path, nbytes=plan.region_bytes, region_bytes=plan.region_bytes, **options) as owner:
            word["state"] = 1
            while not word["stop"]:
                time.sleep(0.01)
            held, end = 1, time.monotonic() + REST_SECONDS
            while word["stop"] == AT_REST and held and time.monotonic() < end:
                word["calls"] = held = sum(each["pending"] + each["pinned"] for each in owner.statistics())
        status, end = 0, time.monotonic() + rng.choice((0.0, 2.0 * HANG_SECONDS))
        while len(threading.enumerate()) > 1 and time.monotonic() < end:  # calls of tiers that hang
            time.sleep(0.01)
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
