"""`kvoffload replay` in this process, and a small cache that serves overlapping requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from replay_oracles import generated_trace, keys_of

import kvoffload
from kvoffload.commands import main
from kvoffload.internal.models import MODELS
from kvoffload.replay.verified import VerifiedCache

TINY = MODELS["llama-3.1-8b"].scaled(1e-6)
HYBRID = MODELS["gpt-oss-20b"].scaled(1e-6)


def replay(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["replay", *map(str, arguments), "--backend", "simulated", "--json"])
    printed = capsys.readouterr().out
    return code, json.loads(printed) if printed else {}


def serve_overlapping(device: kvoffload.Device, seed: int, in_flight: int, policy: str = "lru") -> VerifiedCache:
    """What is left of a cache that has served a generated trace; closed."""
    trace = [keys_of(ids) for ids in generated_trace(seed)]
    ended: list[int] = []
    with VerifiedCache(
        device, HYBRID, capacity=60, longest=max(map(len, trace)), policy=policy, in_flight=in_flight, seed=seed
    ) as served:
        served.serve_all(trace, lambda done, total: ended.append(total - done))
        served.cache.check()
        assert served.cache.statistics().evicted > 0
        assert served.counts.blocks_stored <= 60 + served.cache.statistics().evicted
    assert ended == list(range(len(trace) - 1, -1, -1))
    return served
