"""Two processes with an engine and a pool each over one Mooncake Store; one of them is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mooncake_servers import Host, MooncakeServers
from servers import wait_until

pytestmark = pytest.mark.servers

SEGMENT = 16 << 20


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[MooncakeServers]:
    """A master; the hosts bring the memory."""
    with MooncakeServers(tmp_path, stores=0) as servers:
        yield servers


def test_what_one_host_stored_another_loads_also_after_its_death_from_a_replica(servers: MooncakeServers) -> None:
    with (
        Host(servers, segment_bytes=SEGMENT, replicas=2) as first,
        Host(servers, segment_bytes=SEGMENT, replicas=2) as second,
    ):
        wait_until(lambda: servers.known() == 2, "the memory of both")
        assert first.ask("store 0 12") == 12
        assert second.ask("load 0 12") == 12
        assert second.ask("load 6 14") == 6
        assert second.ask("store 20 24") == 4
        assert first.ask("load 20 24") == 4
        first.kill()
        wait_until(lambda: servers.known() == 1, "the master notices")
        wait_until(lambda: second.ask("load 0 12") == 12, "the replicas are read")
        assert second.ask("load 20 24") == 4


def test_without_a_replica_the_records_of_a_dead_host_are_misses(servers: MooncakeServers) -> None:
    with Host(servers, segment_bytes=0, replicas=1) as second:
        with Host(servers, segment_bytes=SEGMENT, replicas=1) as first:
            assert first.ask("store 0 12") == 12
            assert second.ask("load 0 12") == 12
        assert second.ask("load 0 12") == 0
        with Host(servers, segment_bytes=SEGMENT, replicas=1) as third:
            wait_until(lambda: servers.known() == 1, "the master forgets the first one")
            assert third.ask("load 0 12") == 0
            assert third.ask("store 0 12") == 12
            wait_until(lambda: second.ask("load 0 12") == 12, "the records that were stored again")
