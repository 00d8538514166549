"""Tiers below the workers' slots, under vLLM's scheduler and connector, on simulated GPUs: what is read is compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm_environment import need_vllm

need_vllm()

from vllm_worker import GroupShape, Shape  # noqa: E402
from vllm_world import Setting, World  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

ONE = Shape((GroupShape(3),), num_blocks=60)
WINDOW = Shape((GroupShape(3), GroupShape(2, window=16)), num_blocks=100)
MEMORY: dict[str, Any] = {"kind": "memory", "nbytes": 1 << 24}


def with_tiers(*tiers: dict[str, Any], write: str = "through") -> tuple[tuple[str, Any], ...]:
    return (("kvoffload_tiers", list(tiers)), ("kvoffload_tier_write", write))


SETTINGS = {
    "memory": Setting(ONE, chunks=40, extra=with_tiers(MEMORY)),
    "admitted": Setting(ONE, chunks=40, extra=with_tiers(MEMORY, write="admitted")),
    "back": Setting(ONE, chunks=40, policy="lru", extra=with_tiers(MEMORY, write="back")),
    "a window": Setting(WINDOW, chunks=60, extra=with_tiers(MEMORY)),
    "two workers, asynchronous": Setting(ONE, chunks=40, workers=2, asynchronous=True, extra=with_tiers(MEMORY)),
    "resets": Setting(ONE, chunks=40, reset=0.02, requests=150, extra=with_tiers(MEMORY)),
    "failing transfers": Setting(ONE, chunks=40, fail=0.3, extra=with_tiers(MEMORY)),
}


def run(setting: Setting, seed: int, folder: Path) -> tuple[World, dict[str, int]]:
    with World(setting, seed, folder) as world:
        world.run()
        index = world.manager.index
        assert index.drain(30)
        world.check()
        [tier] = index.tier_statistics()
        counts = {**world.counts, "promoted": tier.promoted, "written": tier.written, "missing": tier.not_found}
    return world, counts


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_model_reads_is_what_it_has_written(name: str, tmp_path: Path) -> None:
    _, counts = run(SETTINGS[name], 0, tmp_path)
    print(name, counts)
    assert counts["compared blocks"] > 300
    assert counts["written"] > 0
    assert counts["promoted"] > 0
