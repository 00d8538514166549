"""Engines, made once a process: that takes 15 seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """eSurge on JAX's device, whose cache has few pages. Its loop is stopped: tests run its steps."""
    from esurge_world import sizes_here
    from small_esurge import make_engine

    made = make_engine(sizes_here())
    yield made
    made._worker_manager.shutdown()
