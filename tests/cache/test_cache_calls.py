"""How many Python calls the cache adds to a transfer, and in how many files; counted, not timed."""

from __future__ import annotations

from collections.abc import Callable

from call_counts import count_calls
from helpers import keys

import kvoffload
from kvoffload import CacheIndex


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
