"""Several members, random calls, and a model of what each may find."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pool_fuzz import fuzz
from seeds import rest_long, seeds

from kvoffload import Tenant
from kvoffload.layout.coding import CODECS, CodecName
from kvoffload.tiers import MemoryTier

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"policy": "lru"},
    {"policy": "s3fifo", "tenants": {"": Tenant(max_blocks=7)}},
    {"tiers": lambda *_: [MemoryTier(1 << 20)], "write": "through"},
)
STEPS = (120, 600)  # of those that run always, and of the others


@pytest.mark.parametrize(("codec", "number"), rest_long(product(CODECS, seeds(16)), 4))
def test_every_hit_has_the_bytes_of_its_last_store(codec: CodecName, number: int, tmp_path: Path) -> None:
    options = OPTIONS[number % len(OPTIONS)]
    steps = STEPS[number >= 4] if codec == "raw" else 200  # kernels are interpreted
    counts = fuzz(tmp_path, number, steps, options=options, tiered="tiers" in options, codec=codec)
    print(counts)
    assert codec == "raw" or counts["unfit"], counts
    assert counts["stored"] > 30, counts
    found = sum(counts[what] for what in ("loaded", "loaded pending", "fetched", "leased"))
    assert found > (10 if codec == "raw" else 3), counts
