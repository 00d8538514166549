"""Random programs over failing tiers: never a wrong byte. The long form: `python tests/tiering/tier_fuzz.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from seeds import rest_long
from tier_fuzz import fuzz


@pytest.mark.parametrize("round_", rest_long([1, 2, 0, 3], 2))
def test_no_byte_is_ever_wrong(round_: int, seed: int, tmp_path: Path) -> None:
    done = fuzz(750, seed + round_, disk=tmp_path / "disk" if round_ % 2 else None, groups=1 + (round_ == 2))
    print(done)
    assert done["compared"] > 50
    assert done["promoted"] > 0
