"""Several members, random calls, and a model of what each may find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool_fuzz import fuzz
from seeds import rest_long, seeds

from kvoffload import Tenant
from kvoffload.tiers import MemoryTier

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"policy": "lru"},
    {"policy": "s3fifo", "tenants": {"": Tenant(max_blocks=7)}},
    {"tiers": lambda *_: [MemoryTier(1 << 20)], "write": "through"},
)
STEPS = (120, 600)  # of those that run always, and of the others


@pytest.mark.parametrize("number", rest_long(seeds(16), 4))
def test_every_hit_has_the_bytes_of_its_last_store(number: int, tmp_path: Path) -> None:
    options = OPTIONS[number % len(OPTIONS)]
    counts = fuzz(tmp_path, number, STEPS[number >= 4], options=options, tiered="tiers" in options)
    print(counts)
    assert counts["stored"] > 30, counts
    assert sum(counts[what] for what in ("loaded", "loaded pending", "fetched", "leased")) > 10, counts
