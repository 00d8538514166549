"""Fixtures for tests of disks: a small set, and its system calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_sets import FaultyFiles, open_set

from kvoffload.tiers.slot_files import SlotFiles


@pytest.fixture
def operations() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def files(tmp_path: Path, operations: FaultyFiles) -> SlotFiles:
    """A set of one file, `a.kv`, of eight slots."""
    return open_set(tmp_path / "a.kv", operations=operations)
