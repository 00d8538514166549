"""A remote tier with a small pool, for tests: put, fetch and compare one record at a time."""

from __future__ import annotations

from kvoffload.testing.tier_pools import TierPools
from kvoffload.tiers import Outcome, RemoteTier

SECONDS = 30.0  # that a job may take
ENTRIES = 8
ROW_BYTES = 4096


class RemoteSession:
    """A tier with a pool of 8 entries, closed at the end of a `with` block.

    Attributes:
        memory: the pool. Entry 0 is put from, entry 1 fetched into.
    """

    def __init__(
        self, tier: RemoteTier, *, pools: int = 2, layout: bytes | None = None, row_bytes: int = ROW_BYTES
    ) -> None:
        self.tier, self.memory = tier, TierPools(ENTRIES, row_bytes, pools, 0)
        tier.attach(self.memory.arrays, layout or self.memory.layout)

    def put(self, key: bytes, version: int) -> Outcome:
        self.memory.fill(0, version)
        return self.tier.put([key], [0]).wait(SECONDS)[0]

    def get(self, key: bytes) -> int | Outcome | None:
        """The version that was fetched, every byte of which was compared; or the outcome if that is not DONE."""
        self.memory.poison(1)
        outcome = self.tier.get([key], [1]).wait(SECONDS)[0]
        return self.memory.version(1) if outcome is Outcome.DONE else outcome

    def exists(self, key: bytes) -> bool:
        return self.tier.exists([key]).wait(SECONDS) == [Outcome.DONE]

    def remove(self, key: bytes) -> Outcome:
        return self.tier.remove([key]).wait(SECONDS)[0]

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.tier.close(SECONDS)
        self.memory.check_guards()
