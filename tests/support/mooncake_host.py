"""A host of a fleet: an engine on a device with its own pool, over a MooncakeTier. Lines of stdin are calls.

python tests/support/mooncake_host.py master identity segment_bytes replicas backend

store 0 8    store the keys 0 to 7 with their contents, and wait until the tier has them; prints 8
load 0 8     forget the slots, promote the keys and compare every byte; prints how many leading ones were there
"""

from __future__ import annotations

import sys

from tiering import SECONDS, keys, tiered

import kvoffload
from kvoffload.tiers import MooncakeTier


def main(master: str, identity: str, segment_bytes: str, replicas: str, backend: str) -> None:
    tier = MooncakeTier(
        master, identity=identity, segment_bytes=int(segment_bytes), replicas=int(replicas), timeout=1.0
    )
    device = kvoffload.open_device(backend="cuda") if backend == "cuda" else None
    block_bytes = 64 if device is None else 512 << 10
    with tiered(tier, capacity=32, device=device, block_bytes=block_bytes) as bench:
        print("ready", flush=True)
        for line in sys.stdin:
            call, first, last = line.split()
            numbers = list(range(int(first), int(last)))
            if call == "store":
                bench.store(numbers)
                assert bench.cache.drain(SECONDS)
                print(len(numbers), flush=True)
            else:
                bench.cache.clear(below=False)
                with bench.cache.promote(keys(numbers)) as promotion:
                    found = promotion.wait(SECONDS)
                    bench.check_loaded(numbers[:found])
                print(found, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
