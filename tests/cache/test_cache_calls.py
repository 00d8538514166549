"""How many Python calls the cache adds to a transfer, and in how many files; counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from call_counts import count_calls
from helpers import keys, simulated

import kvoffload
from kvoffload import NO_WAIT, BlockCache, CacheIndex, KVLayout, OffloadEngine


def own_calls(call: Callable[[], kvoffload.CacheJob]) -> list[str]:
    """The file of each Python function of the cache that a call enters."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "kvoffload/cache/" in frame.f_code.co_filename:
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        job = call()
    finally:
        sys.setprofile(None)
    job.wait(10)
    return files


@pytest.mark.parametrize("settled", [False, True])
def test_a_warm_store_and_load_take_few_calls(settled: bool) -> None:
    """Of 8 blocks x 64 planes; `settled`: what was submitted before has been settled by another call."""
    blocks = list(range(8))
    with simulated() as device:
        planes = device.allocate_planes(64, block_bytes=256, num_blocks=16)
        with OffloadEngine(KVLayout([planes]), device=device, num_slots=256, staging_bytes=0) as engine:
            cache = BlockCache(engine)
            for start in range(0, 80, 8):
                cache.store(keys(*range(start, start + 8)), blocks, after=NO_WAIT).wait(10)
                cache.load(keys(*range(start, start + 8)), blocks, after=NO_WAIT).wait(10)
                cache.touch(keys(*range(start, start + 8)))
            stored = own_calls(lambda: cache.store(keys(*range(100, 108)), blocks, after=NO_WAIT))
            if settled:
                cache.lookup(keys(100))
            loaded = own_calls(lambda: cache.load(keys(*range(100, 108)), blocks, after=NO_WAIT))
    for files in (stored, loaded):
        assert len(files) <= 60, files
        assert len(set(files)) <= 6, sorted(set(files))


def test_no_call_leaves_anything_to_be_repaired() -> None:
    """A repair takes time in proportion to the cache: only a call that an exception has ended may cause one."""
    index = CacheIndex(4)
    open_ones = [index.reserve(keys(number)) for number in range(2)]
    lease: list[kvoffload.Lease] = []
    request = index.open_request()
    calls: dict[str, Callable[[], object]] = {
        "reserve": lambda: index.reserve(keys(2)).commit(),
        "commit": open_ones[0].commit,
        "abort": open_ones[1].abort,
        "load": lambda: index.load(keys(0)),
        "load for a request": lambda: index.load(keys(0), request=request),
        "end": request.end,
        "touch": lambda: index.touch(keys(0)),
        "acquire": lambda: lease.append(index.acquire(keys(0))),
        "release": lambda: lease[0].release(),
        "evict": lambda: index.reserve(keys(3, 4, 5)).commit(),
        "remove": lambda: index.remove(keys(0, 3)),
        "reserve_each": lambda: index.records.reserve_each((keys(6, 7), "", None)),
        "clear": index.clear,
    }
    for name, call in calls.items():
        call()
        following = count_calls(lambda: index.lookup(keys(0)))
        assert following.by_file["cache/repair.py"] == 0, name
    index.check()
