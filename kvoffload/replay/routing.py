"""Which host of a fleet serves a request: a random one, or one that holds its beginning."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvoffload.replay.trace import Request

ROUTINGS = ("random", "prefix")
_BOUND = 1.25  # times the mean load: more than that, and a host gets no request
_REQUESTS_A_HOST = 32  # after so many the load of a request counts 1/e

Leading = Callable[[int, Request], int]
"""How many leading keys of a request a host holds, by its number."""


class RandomRouting:
    """Every host is equally likely."""

    def __init__(self, hosts: int, seed: int) -> None:
        self._hosts = hosts
        self._random = np.random.default_rng(seed)

    def choose(self, keys: Request) -> int:  # noqa: ARG002
        """The number of the host that serves the request."""
        return int(self._random.integers(self._hosts))


class PrefixRouting:
    """The host that holds the longest leading part of the request, of those that are not overloaded.

    The router knows at once what pools and disks of all hosts hold, as a router does that follows their events. The
    load of a host is the blocks that its latest requests asked for and that it did not hold, those of older requests
    counting less. A host whose load is above 1.25 times the mean gets no request ("Consistent Hashing with Bounded
    Loads", Mirrokni, Thorup and Zadimoghaddam, SODA 2018): else the host that is first to hold what all requests begin
    with would get them all. Of hosts that hold as much, the one with the least load is chosen.
    """

    def __init__(self, hosts: int, leading: Leading) -> None:
        self._leading = leading
        self._loads = [0.0] * hosts
        self._fading = 1 - 1 / (_REQUESTS_A_HOST * hosts)

    def choose(self, keys: Request) -> int:
        """The number of the host that serves the request."""
        loads = self._loads
        most = _BOUND * sum(loads) / len(loads)
        free = [host for host, load in enumerate(loads) if load <= most]
        held = [self._leading(host, keys) for host in free]
        longest = max(held)
        chosen = min(
            (host for host, length in zip(free, held, strict=True) if length == longest), key=loads.__getitem__
        )
        self._loads = [load * self._fading for load in loads]
        self._loads[chosen] += len(keys) - longest
        return chosen


def make_routing(name: str, hosts: int, seed: int, leading: Leading) -> RandomRouting | PrefixRouting:
    """What `--routing` names."""
    return RandomRouting(hosts, seed) if name == "random" else PrefixRouting(hosts, leading)
