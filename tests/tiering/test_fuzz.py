"""Random programs over failing tiers: never a wrong byte. The long form: `python tests/tiering/tier_fuzz.py`."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from seeds import rest_long
from tier_fuzz import fuzz

from kvoffload.layout.coding import CODECS, CodecName


@pytest.mark.parametrize(("codec", "round_"), rest_long(product(CODECS, [1, 2, 0, 3]), 1))
def test_no_byte_is_ever_wrong(codec: CodecName, round_: int, seed: int, tmp_path: Path) -> None:
    disk = tmp_path / "disk" if round_ % 2 else None
    operations = 750 if codec == "raw" else 250  # kernels are interpreted
    done = fuzz(operations, seed + round_, disk=disk, groups=1 + (round_ == 2), codec=codec)
    print(done)
    assert done["compared"] > operations // 15
    assert done["promoted"] > 0
