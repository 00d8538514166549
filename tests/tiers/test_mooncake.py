"""MooncakeTier over a real store: bytes, copies, what the client refuses, and processes that die and come back."""

from __future__ import annotations

import importlib.abc
import os
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mooncake_servers import MooncakeServers, mooncake_program
from remote_sessions import RemoteSession
from servers import wait_until

from kvoffload.errors import CapabilityError
from kvoffload.internal.types import UInt8Array
from kvoffload.testing import check_tier
from kvoffload.testing.tier_pools import TierPools
from kvoffload.tiers import Limits, MooncakeConnection, MooncakeTier, Outcome

pytestmark = pytest.mark.servers

TCP = MooncakeConnection(protocol="tcp")
DONE, MISSING, FAILED, DECLINED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED, Outcome.DECLINED
SECONDS = 30.0
ROW = 1 << 20
ENDS_IN_A_CALL = """
import sys, threading, time
from kvoffload.testing.tier_pools import TierPools
from kvoffload.tiers import MooncakeTier
tier, memory = MooncakeTier(sys.argv[1], identity="end"), TierPools(8, 4096, 1, 0)
tier.attach(memory.arrays, memory.layout)

def ask():
    while True:
        tier.exists([b"k"] , notify=None).wait(10)

threading.Thread(target=ask, daemon=True).start()
time.sleep(0.3)
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[MooncakeServers]:
    """Some that the test kills."""
    with MooncakeServers(tmp_path) as servers:
        yield servers


def one_client(kind: Any) -> Any:
    """A class for the client's: all tiers of a test share a client, as closing each would take a second."""

    class OneClient:
        client: Any = None

        def setup(self, config: dict[str, str]) -> int:
            self._registered: list[int] = []
            if OneClient.client is None:
                OneClient.client = kind()
                assert OneClient.client.setup(config) == 0
            return 0

        def register_buffer(self, address: int, nbytes: int) -> int:
            self._registered.append(address)
            return int(self.client.register_buffer(address, nbytes))

        def close(self) -> int:
            assert {self.client.unregister_buffer(address) for address in self._registered} <= {0}
            return 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.client, name)

    return OneClient


# arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master": "localhost"}, 'master must be "host:port"'),
        ({"master": "localhost:port"}, "got 'localhost:port'"),
        ({"master": None}, "got None"),
        ({"master": "etcd://one:2379;two"}, "master must be"),
        ({"segment_bytes": -1}, "segment_bytes"),
        ({"replicas": 0}, "replicas"),
        ({"soft_pin": 0.0}, "soft_pin"),
        ({"soft_pin": "a"}, "soft_pin must be a number of seconds, 0.001 or more, got 'a'"),
        ({"timeout": 0.0}, "timeout"),
        ({"prefix": "../x"}, "prefix"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    mooncake_program("mooncake_master")
    with pytest.raises(ValueError, match=message):
        MooncakeTier(**{"identity": "t", **options})


def test_a_protocol_that_is_none_is_refused() -> None:
    unchecked: Any = "udp"
    with pytest.raises(ValueError, match='protocol must be "tcp", "rdma" or None, got \'udp\''):
        MooncakeConnection(protocol=unchecked)


class Missing(importlib.abc.MetaPathFinder):
    """Makes the import of mooncake fail."""

    def __init__(self, text: str) -> None:
        self.text = text

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "mooncake":
            raise ImportError(self.text)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("No module named 'mooncake'", r"pip install 'kvoffload\[mooncake\]'"),
        ("libibverbs.so.1: cannot open shared object file", "apt-get install libibverbs1"),
    ],
)
def test_what_is_missing_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch, text: str, remedy: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(text), *sys.meta_path])
    with pytest.raises(CapabilityError, match=remedy) as found:
        MooncakeTier(identity="t")
    assert text in str(found.value)


def test_few_threads_wait_for_tcp(mooncake_servers: MooncakeServers) -> None:
    def threads(**options: Any) -> int:
        return MooncakeTier(mooncake_servers.master.address, identity="t", connection=TCP, **options).threads

    assert threads() == (4 if len(os.sched_getaffinity(0)) >= 8 else 1)
    assert threads(limits=Limits(threads=3)) == 3


def test_rdma_needs_a_device(mooncake_servers: MooncakeServers) -> None:
    if any(Path("/sys/class/infiniband").glob("*/ports/*/state")):
        pytest.skip("this machine has one")
    assert MooncakeTier(mooncake_servers.master.address, identity="t").protocol == "tcp"
    rdma = MooncakeConnection(protocol="rdma")
    with pytest.raises(CapabilityError, match="/sys/class/infiniband"):
        MooncakeTier(mooncake_servers.master.address, identity="t", connection=rdma)


# bytes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pools", [1, 2])
def test_it_conforms(mooncake_servers: MooncakeServers, monkeypatch: pytest.MonkeyPatch, pools: int, seed: int) -> None:
    import mooncake.store

    one = one_client(mooncake.store.MooncakeDistributedStore)
    monkeypatch.setattr(mooncake.store, "MooncakeDistributedStore", one)
    prefixes = (f"conforms/{pools}/{number}" for number in range(1000))

    def make() -> MooncakeTier:
        return MooncakeTier(mooncake_servers.master.address, identity="t", prefix=next(prefixes))

    check_tier(make, pools=pools, seed=seed)
    one.client.close()


def test_pools_are_registered_once_and_nothing_is_copied_in_python(
    mooncake_servers: MooncakeServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mooncake.store

    counts: Counter[str] = Counter()
    ranges: list[tuple[int, int]] = []

    class Client(mooncake.store.MooncakeDistributedStore):  # type: ignore[misc]
        def register_buffer(self, address: int, nbytes: int) -> Any:
            counts["pools registered"] += nbytes > ROW
            return super().register_buffer(address, nbytes)

        def batch_put_from_multi_buffers(self, names: Any, addresses: Any, sizes: Any, config: Any) -> Any:
            self._note("puts", addresses, sizes)
            return super().batch_put_from_multi_buffers(names, addresses, sizes, config)

        def batch_get_into_multi_buffers(self, names: Any, addresses: Any, sizes: Any) -> Any:
            self._note("gets", addresses, sizes)
            return super().batch_get_into_multi_buffers(names, addresses, sizes)

        def _note(self, call: str, addresses: Any, sizes: Any) -> None:
            counts[call] += 1
            for record in zip(addresses, sizes, strict=True):
                ranges.extend(zip(*record, strict=True))

    monkeypatch.setattr(mooncake.store, "MooncakeDistributedStore", Client)
    memory = TierPools(16, ROW, 2, 0)
    one = MooncakeTier(mooncake_servers.master.address, identity="copies", limits=Limits(threads=1))
    one.attach(memory.arrays, memory.layout)
    for entry in range(4):
        memory.fill(entry, entry)
    keys = [b"%d" % number for number in range(4)]
    tracemalloc.start()
    assert one.put(keys, range(4)).wait(SECONDS) == [DONE] * 4
    assert one.get(keys, range(8, 12)).wait(SECONDS) == [DONE] * 4
    allocated = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [memory.version(entry) for entry in range(8, 12)] == [0, 1, 2, 3]
    assert counts == {"pools registered": 2, "puts": 1, "gets": 1}
    rows = [each for each in ranges if each[1] == ROW]
    assert sorted(rows) == sorted(
        (address(pool, at), ROW) for pool in memory.arrays for at in (0, 1, 2, 3, 8, 9, 10, 11)
    )
    assert allocated < ROW // 4
    assert one.close(SECONDS)


def test_a_pool_that_cannot_be_registered_is_refused_with_a_remedy(
    mooncake_servers: MooncakeServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mooncake.store

    calls: list[str] = []

    class Client(mooncake.store.MooncakeDistributedStore):  # type: ignore[misc]
        def register_buffer(self, address: int, nbytes: int) -> Any:
            calls.append("register")
            return super().register_buffer(address, nbytes) if len(calls) != 2 else -1

        def close(self) -> Any:
            calls.append("close")
            return super().close()

    monkeypatch.setattr(mooncake.store, "MooncakeDistributedStore", Client)
    tier, memory = MooncakeTier(mooncake_servers.master.address, identity="refused"), TierPools(8, 4096, 2, 0)
    with pytest.raises(CapabilityError, match=r"32768 bytes of the pool .*ulimit -l"):
        tier.attach(memory.arrays, memory.layout)
    assert calls == ["register", "register", "close"]
    tier.attach(memory.arrays, memory.layout)
    assert tier.put([b"k"], [0]).wait(SECONDS) == [DONE]
    assert tier.close(SECONDS)


def address(pool: UInt8Array, entry: int) -> int:
    found: int = pool[entry].__array_interface__["data"][0]
    return found


def test_what_one_process_puts_another_one_finds(mooncake_servers: MooncakeServers) -> None:
    master = mooncake_servers.master.address
    with RemoteSession(MooncakeTier(master, identity="shared")) as first:
        assert first.put(b"k", 5) is DONE
        with RemoteSession(MooncakeTier(master, identity="shared")) as second:
            assert second.exists(b"k")
            assert second.get(b"k") == 5
            assert second.remove(b"k") is DONE  # although it was read a moment ago, and the store has a lease on it
        assert first.get(b"k") is MISSING
        assert first.remove(b"k") is MISSING


def test_clear_leaves_the_records_of_others(mooncake_servers: MooncakeServers) -> None:
    master = mooncake_servers.master.address
    with (
        RemoteSession(MooncakeTier(master, identity="a", prefix="a.b")) as first,
        RemoteSession(MooncakeTier(master, identity="b", prefix="a.b")) as second,
        RemoteSession(MooncakeTier(master, identity="a", prefix="a_b")) as third,
    ):
        for session in (first, second, third):
            assert session.put(b"k", 1) is DONE
        assert first.tier.clear().wait(SECONDS) == [DONE]
        assert [each.get(b"k") for each in (first, second, third)] == [MISSING, 1, 1]


@pytest.mark.parametrize("nbytes", [100, 2 * 4096 + 191, 2 * 4096 + 192, 2 * 4096 + 193, 1 << 20])
def test_foreign_bytes_under_a_name_are_deleted(mooncake_servers: MooncakeServers, nbytes: int) -> None:
    import mooncake.store

    foreign = mooncake.store.MooncakeDistributedStore()
    assert foreign.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", mooncake_servers.master.address) == 0
    tier = MooncakeTier(mooncake_servers.master.address, identity=f"foreign {nbytes}")
    with RemoteSession(tier) as session:
        assert foreign.put(tier.format.name(b"k"), bytes(nbytes)) == 0
        assert session.get(b"k") is MISSING
        assert tier.statistics().corrupt == 1
        assert not session.exists(b"k")
        assert session.put(b"k", 3) is DONE
        assert session.get(b"k") == 3
    foreign.close()


def test_a_full_store_declines_or_evicts(servers: MooncakeServers) -> None:
    with RemoteSession(MooncakeTier(servers.master.address, identity="full", soft_pin=60.0), row_bytes=ROW) as session:
        outcomes = Counter(session.put(b"%d" % number, number) for number in range(100))
        found = [session.get(b"%d" % number) for number in range(100)]
    assert set(outcomes) <= {DONE, DECLINED}
    assert all(each in (MISSING, number) for number, each in enumerate(found))
    assert MISSING in found


# processes that die ---------------------------------------------------------------------------------------------------


def test_a_record_whose_owner_dies_is_lost_unless_it_has_a_replica(servers: MooncakeServers) -> None:
    servers.add_store()
    servers.settle()
    master = servers.master.address
    with (
        RemoteSession(MooncakeTier(master, identity="one", timeout=1.0)) as one,
        RemoteSession(MooncakeTier(master, identity="two", timeout=1.0, replicas=2)) as two,
    ):
        keys = [b"%d" % number for number in range(20)]
        assert {session.put(key, 7) for session in (one, two) for key in keys} == {DONE}
        servers.stores[0].kill()
        assert {one.get(key) for key in keys} <= {7, FAILED, MISSING}
        servers.settle()
        assert {one.get(key) for key in keys} == {7, MISSING}
        assert {two.get(key) for key in keys} == {7}


def test_a_master_that_comes_back_is_found(servers: MooncakeServers) -> None:
    with RemoteSession(MooncakeTier(servers.master.address, identity="back", timeout=0.5)) as session:
        assert session.put(b"k", 1) is DONE
        servers.master.kill()
        assert session.get(b"k") is FAILED
        assert session.remove(b"k") is FAILED
        servers.master.start()
        servers.settle()
        wait_until(lambda: session.put(b"k", 3) is DONE, "the tier finds the master")
        assert session.get(b"k") == 3


def test_a_master_that_is_silent_does_not_hang_a_call(servers: MooncakeServers) -> None:
    with RemoteSession(MooncakeTier(servers.master.address, identity="silent", timeout=0.3)) as session:
        assert session.put(b"k", 1) is DONE
        servers.master.pause()
        assert session.get(b"k") is FAILED
        assert session.tier.exists([b"k"]).wait(SECONDS) == [FAILED]
        servers.master.resume()
        servers.settle()
        wait_until(lambda: session.get(b"k") in (1, MISSING), "the tier finds the master")


def test_a_store_that_is_silent_does_not_hang_a_call(servers: MooncakeServers) -> None:
    with RemoteSession(MooncakeTier(servers.master.address, identity="silent store", timeout=1.0)) as session:
        assert session.put(b"k", 1) is DONE
        servers.stores[0].pause()
        assert session.get(b"k") is FAILED
        servers.stores[0].resume()
        servers.settle()
        assert session.get(b"k") in (1, MISSING)


@pytest.fixture
def setups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has an element for each time that a client was set up in this process."""
    mooncake_program("mooncake_master")
    import mooncake.store

    calls: list[int] = []

    class Client(mooncake.store.MooncakeDistributedStore):  # type: ignore[misc]
        def setup(self, config: dict[str, str]) -> Any:
            calls.append(1)
            return super().setup(config)

    monkeypatch.setattr(mooncake.store, "MooncakeDistributedStore", Client)
    return calls


def test_without_a_master_a_cache_starts_and_finds_it_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, setups: list[int]
) -> None:
    servers = MooncakeServers(tmp_path)
    with RemoteSession(MooncakeTier(servers.master.address, identity="late")) as session:
        assert "no connection to the Mooncake master" in caplog.text
        assert session.get(b"k") is FAILED
        assert not setups  # it would hold the interpreter's lock until it gives up
        with servers:
            assert session.put(b"k", 1) is DONE
            assert session.get(b"k") == 1
        assert len(setups) == 1


def test_a_master_that_is_silent_from_the_start_stops_no_thread(
    servers: MooncakeServers, caplog: pytest.LogCaptureFixture, setups: list[int]
) -> None:
    """`setup` is not called here: it would hold the interpreter's lock for the timeout, at each try."""
    servers.master.pause()
    with RemoteSession(MooncakeTier(servers.master.address, identity="mute", timeout=0.5)) as session:
        assert "no Mooncake master answers" in caplog.text
        assert session.get(b"k") is FAILED
        assert session.remove(b"k") is FAILED
        assert not setups
        servers.master.resume()
        servers.settle()
        wait_until(lambda: session.put(b"k", 1) is DONE, "the tier finds the master")
        assert session.get(b"k") == 1
        assert len(setups) == 1


# the process ----------------------------------------------------------------------------------------------------------


def test_an_interpreter_that_ends_in_a_call_ends_well(mooncake_servers: MooncakeServers) -> None:
    command = [sys.executable, "-c", ENDS_IN_A_CALL, mooncake_servers.master.address]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == 0, done.stderr


def test_settings_of_the_user_are_kept(mooncake_servers: MooncakeServers) -> None:
    program = """
import os
from kvoffload.tiers import MooncakeTier
MooncakeTier(identity="t", timeout=3.0)
print(os.environ["MC_RPC_TIMEOUT_MS"], os.environ["MC_RPC_CONNECT_TIMEOUT_MS"])
MooncakeTier(identity="t", timeout=4.0)
print(os.environ["MC_RPC_TIMEOUT_MS"], os.environ["MC_RPC_CONNECT_TIMEOUT_MS"])
print(os.environ["MC_STORE_CLIENT_SETUP_RETRIES"], os.environ["MC_LOG_LEVEL"])
"""
    assert mooncake_servers.known() == 1
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MC_RPC_TIMEOUT_MS": "77"}
    environment["MC_LOG_LEVEL"] = "FATAL"
    for unset in ("MC_RPC_CONNECT_TIMEOUT_MS", "MC_STORE_CLIENT_SETUP_RETRIES"):
        environment.pop(unset, None)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["77", "3000", "77", "4000", "1", "FATAL"]


def test_tiers_that_open_and_close_leave_no_threads_and_descriptors(mooncake_servers: MooncakeServers) -> None:
    def use(number: int) -> None:
        with RemoteSession(MooncakeTier(mooncake_servers.master.address, identity="soak")) as session:
            assert session.put(b"%d" % number, number) is DONE
            assert session.get(b"%d" % number) == number

    def held() -> list[int]:
        return [len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd")]

    for number in range(2):  # of the client some stay
        use(number)
    before = held()
    for number in range(2, 6):
        use(number)
    wait_until(lambda: all(now <= most for now, most in zip(held(), before, strict=True)), f"as before, {before}")
