"""Servers that are killed, paused and cut off, and proxies that change bytes: the short forms of exhaust_remote.py."""

from __future__ import annotations

from pathlib import Path

import exhaust_remote
import pytest
from servers import need_module

pytestmark = pytest.mark.servers

SHARES = {"valkey": 1.0, "cluster": 0.6, "s3": 0.25, "mooncake": 0.3}


@pytest.mark.parametrize(
    ("kind", "client"),
    [("valkey", "glide_sync"), ("cluster", "glide_sync"), ("s3", "obstore"), ("mooncake", "mooncake")],
)
def test_servers_that_fail_in_every_manner(kind: str, client: str, tmp_path: Path, seed: int) -> None:
    need_module(client)
    make, timeout = exhaust_remote.MACHINES[kind]
    with make(tmp_path, exhaust_remote.Timed(timeout), seed) as machine:
        machine.share = SHARES[kind]
        counts = machine.run(0)
    assert counts["operations"] > 100
    assert min(counts[each] for each in ("get done", "put done", "remove done", "put failed", "get failed")) > 0
    assert min(counts[each] for each in ("kills", "pauses", "all cut", "reopened")) > 0
