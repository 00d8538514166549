"""What the network between the hosts of a replayed fleet and their store would have to carry: computed, not measured.

A request's reads and writes count at its timestamp, in one moment: how they are spread over its prefill and decoding is
not known without a GPU. So peaks are means of ten seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from kvoffload.replay.fleet import Flow

WINDOW_SECONDS = 10.0


class Load(NamedTuple):
    """Bytes between hosts and store, and how fast they would have to move.

    Attributes:
        bytes_read, bytes_written: from the store, and to it.
        bytes_per_request: both, of the mean request.
        bytes_per_1000_tokens: both, for 1,000 tokens of prompts.
        mean_gb_per_s, peak_gb_per_s: both, of all hosts, over the whole trace and in the busiest ten seconds. None, as
            the next two, without timestamps.
        host_mean_gb_per_s, host_peak_gb_per_s: of the host that has moved most over the whole trace, and of the
            busiest host and ten seconds.
    """

    bytes_read: int
    bytes_written: int
    bytes_per_request: float
    bytes_per_1000_tokens: float
    mean_gb_per_s: float | None
    peak_gb_per_s: float | None
    host_mean_gb_per_s: float | None
    host_peak_gb_per_s: float | None


class Delay(NamedTuple):
    """How long requests would have waited for their reads, at a store's speed.

    Attributes:
        requests: that read from the store.
        mean_seconds, most_seconds: from a request's timestamp until its last byte is there, the store serving reads one
            after the other at its full speed; without timestamps each alone.
    """

    requests: int
    mean_seconds: float
    most_seconds: float


def load_of(flow: Flow, seconds: Sequence[float] | None, block_bytes: int, tokens: int) -> Load:
    """What the network carries.

    Args:
        flow: of a fleet, in blocks.
        seconds: when each request came; None: not known.
        block_bytes: of a key.
        tokens: of all prompts.
    """
    read, written = block_bytes * sum(flow.read), block_bytes * sum(flow.written)
    both = read + written
    means = (both / max(1, len(flow.hosts)), 1000 * both / max(1, tokens))
    if seconds is None:
        return Load(read, written, *means, None, None, None, None)
    in_window: dict[int, int] = defaultdict(int)
    of_host: dict[int, int] = defaultdict(int)
    of_host_in_window: dict[tuple[int, int], int] = defaultdict(int)
    for host, reads, writes, second in zip(flow.hosts, flow.read, flow.written, seconds, strict=True):
        window = int(second / WINDOW_SECONDS)
        in_window[window] += reads + writes
        of_host[host] += reads + writes
        of_host_in_window[host, window] += reads + writes
    rates = (
        sum(in_window.values()) / seconds[-1],
        max(in_window.values()) / WINDOW_SECONDS,
        max(of_host.values()) / seconds[-1],
        max(of_host_in_window.values()) / WINDOW_SECONDS,
    )
    return Load(read, written, *means, *(block_bytes * rate / 1e9 for rate in rates))


def delay_of(flow: Flow, seconds: Sequence[float] | None, block_bytes: int, gb_per_s: float) -> Delay:
    """How long reads of a store of that speed would have taken; writes do not delay them."""
    free = 0.0  # when the store has served what came before
    waits = []
    for number, reads in enumerate(flow.read):
        if not reads:
            continue
        begin = max(free, seconds[number]) if seconds is not None else 0.0
        free = begin + reads * block_bytes / (gb_per_s * 1e9)
        waits.append(free - (seconds[number] if seconds is not None else 0.0))
    return Delay(len(waits), sum(waits) / max(1, len(waits)), max(waits, default=0.0))
