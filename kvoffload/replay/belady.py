"""The most hits that any cache of a size can have: Belady's rule, which knows the future."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from kvoffload.replay.trace import Request

_NEVER = 1 << 62  # above every request's number


def belady_hits(requests: Sequence[Request], capacity: int) -> int:
    """Leading keys found in all requests, by a cache that evicts, or does not store, the keys whose next use is last.

    No other use of `capacity` places finds more, if a key is always preceded by the same keys, as hashes of
    prefixes are, and no request repeats a key.

    Args:
        requests: in the order of their arrival.
        capacity: keys that the cache holds.

    Raises:
        ValueError: `capacity` is not positive.
    """
    return sum(belady_hits_by_request(requests, capacity))


def belady_hits_by_request(requests: Sequence[Request], capacity: int) -> list[int]:
    """The same for each request.

    Of keys that are used next by the same request the deepest goes first. So what is held is at any time whole
    prefixes, all of it counts as hits, and the rule that maximises hits of any kind maximises leading ones.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    held: dict[bytes, tuple[int, int, bytes]] = {}  # the key whose next use is last and deepest comes first
    queue: list[tuple[int, int, bytes]] = []  # all held keys, and outdated entries
    found = []
    for request, following in zip(requests, _next_uses(requests), strict=True):
        hits = 0
        while hits < len(request) and request[hits] in held:
            hits += 1
        found.append(hits)
        for depth, (key, use) in enumerate(zip(request, following, strict=True)):
            if use == _NEVER:
                held.pop(key, None)
            else:
                entry = held[key] = (-use, -depth, key)
                heappush(queue, entry)
        while len(held) > capacity:
            entry = heappop(queue)
            if held.get(entry[2]) == entry:
                del held[entry[2]]
    return found


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """For each key of each request the number of the next request with that key, or `_NEVER`."""
    following: dict[bytes, int] = {}
    uses = []
    for number in range(len(requests) - 1, -1, -1):
        request = requests[number]
        uses.append([following.get(key, _NEVER) for key in request])
        following.update(dict.fromkeys(request, number))
    return uses[::-1]
