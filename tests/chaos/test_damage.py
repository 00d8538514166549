"""Damage at rest: what is damaged is a miss, everything else is there, and no byte is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import chaos_damage
import pytest
from chaos_damage import KEYS, Damaged, Lab, full

pytestmark = pytest.mark.long


@pytest.fixture
def lab() -> Iterator[Lab]:
    opened = Lab()
    yield opened
    opened.close()


def test_a_byte_flipped_anywhere_a_file_cut_off_slots_swapped_and_older_sectors(seed: int) -> None:
    counts, wrong = chaos_damage.run(1009, seed, every=3)
    assert wrong == []
    assert counts["flipped"] > 900
    assert counts["truncated"] > 10
    assert counts["swapped"] > 5
    assert counts["older"] > 100


def test_the_check_finds_a_record_that_should_not_be_there(lab: Lab) -> None:
    _, state, versions = full(lab)
    gone = {key: version for key, version in versions.items() if key != KEYS[0]}
    assert lab.check(Damaged("nothing", state, versions, versions)) is None
    assert lab.check(Damaged("nothing", state, gone, gone)) is not None
    assert lab.check(Damaged("nothing", state, versions | {b"other": 1}, versions | {b"other": 1})) is not None


def test_the_documents_say_that_the_default_checksum_is_no_signature() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for page in ("security.md", "disk-format.md", "guides/add-a-disk.md"):
        assert "no signature" in " ".join((docs / page).read_text().split()), page
