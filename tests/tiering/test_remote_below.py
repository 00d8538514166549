"""A cache over a real Valkey server: shared by two machines, killed and started again below a cache that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import Process, need_module, valkey
from tiering import SECONDS, Bench, keys, tiered, until

from kvoffload.cache.tiering import BreakerState
from kvoffload.tiers import ValkeyTier

pytestmark = pytest.mark.servers

SIX = range(6)


@pytest.fixture(autouse=True)
def _client() -> None:
    need_module("glide_sync")


def below(server: Process, timeout: float = SECONDS) -> ValkeyTier:
    return ValkeyTier(server.address, identity="one model", timeout=timeout)


def promoted(bench: Bench) -> int:
    with bench.cache.promote(keys(SIX)) as promotion:
        return promotion.wait(SECONDS)


def written(bench: Bench) -> bool:
    bench.written(SIX)
    return promoted(bench) == 6


def test_what_one_machine_has_stored_another_loads(tmp_path: Path) -> None:
    with valkey(tmp_path) as server:
        with tiered(below(server), capacity=32) as first:
            first.store(SIX)
            assert first.cache.drain(SECONDS)
        with tiered(below(server), capacity=32) as second:
            with second.cache.promote(keys(range(8))) as promotion:
                assert promotion.wait(SECONDS) == 6
                second.check_loaded(SIX)
            second.cache.remove(keys([0]))
        with tiered(below(server), capacity=32) as third:
            assert promoted(third) == 0  # keys need those before them


def test_a_server_that_dies_is_a_miss_and_a_breaker_and_its_return_is_noticed(tmp_path: Path) -> None:
    server = valkey(tmp_path)
    server.start()
    with tiered(below(server, timeout=0.5), capacity=32) as bench:
        until(lambda: written(bench), "writing")
        bench.check_loaded(SIX)
        bench.cache.clear(below=False)
        server.kill()

        def breaker() -> BreakerState:
            [statistics] = bench.cache.tier_statistics()
            return statistics.state

        until(lambda: promoted(bench) == 0 and breaker() is BreakerState.OPEN, "the breaker's opening")
        with server:  # empty
            until(lambda: promoted(bench) == 0 and breaker() is BreakerState.CLOSED, "the breaker's closing")
            until(lambda: written(bench), "writing again")
            bench.check_loaded(SIX)
