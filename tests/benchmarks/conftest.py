"""Fixtures of the benchmarks' tests. These need `pip install ./benchmarks`, and run by a command of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvoffload
from kvoffload_bench.harness import SMALL, Lab


@pytest.fixture
def lab(device: kvoffload.Device, seed: int) -> Iterator[Lab]:
    """What benches measure with, small."""
    with Lab(device, SMALL._replace(contiguous_bytes=1 << 16), repeats=1, seed=seed) as lab:
        yield lab
