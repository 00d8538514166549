"""ValkeyTier over real servers: one, a cluster of three, TLS, passwords, expiry, a full one, and one that dies."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_proxy import FaultyProxy, ProxyFaults
from remote_sessions import RemoteSession
from servers import Process, ValkeyCluster, ask, certificates, need_module, valkey, wait_until

from kvoffload.testing import check_tier, fuzz_tier
from kvoffload.tiers import Limits, Outcome, ValkeyConnection, ValkeyTier

pytestmark = pytest.mark.servers

PATIENT = 40.0  # a timeout of calls that have to succeed, on a machine that is busy with other tests
DONE, MISSING, FAILED, DECLINED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED, Outcome.DECLINED


@pytest.fixture(autouse=True)
def _client() -> None:
    need_module("glide_sync")


@pytest.fixture
def session(valkey_server: Process, request: pytest.FixtureRequest) -> Iterator[RemoteSession]:
    with RemoteSession(ValkeyTier(valkey_server.address, identity=request.node.nodeid, timeout=PATIENT)) as session:
        yield session


def names(port: int) -> list[str]:
    """Of all values of a server, without blanks and counts."""
    return sorted(line for line in ask(port, "KEYS *").split("\r\n") if line.startswith("{"))


def one(folder: Path, *arguments: str) -> Process:
    folder.mkdir()
    return valkey(folder, *arguments)


@pytest.mark.parametrize("pools", [1, 2])
def test_one_server_conforms(valkey_server: Process, pools: int, seed: int) -> None:
    def make() -> ValkeyTier:
        return ValkeyTier(valkey_server.address, identity=f"conforms {pools}", timeout=PATIENT)

    check_tier(make, pools=pools, seed=seed)


def test_a_cluster_conforms(valkey_cluster: ValkeyCluster, seed: int) -> None:
    def make() -> ValkeyTier:
        return ValkeyTier(valkey_cluster.addresses, cluster=True, identity="conforms", timeout=PATIENT)

    check_tier(make, seed=seed)
    tier = ValkeyTier(valkey_cluster.addresses[0], cluster=True, identity="spread", timeout=PATIENT)
    fuzz_tier(tier, operations=500, lossless=True, pools=2, seed=seed)
    assert all(names(node.port) for node in valkey_cluster.nodes)  # each has a share of the records


def test_records_larger_than_a_read_of_the_client_come_back(valkey_server: Process) -> None:
    with RemoteSession(
        ValkeyTier(valkey_server.address, identity="large", timeout=PATIENT), row_bytes=3 << 20
    ) as session:
        assert session.put(b"k", 1) is DONE
        assert session.get(b"k") == 1


def test_tls_and_a_password(tmp_path: Path) -> None:
    files = certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["certificate"], files["key"])
    context.load_verify_locations(files["ca"])
    context.verify_mode = ssl.CERT_REQUIRED  # of clients
    server = one(tmp_path / "server", "--requirepass", "correct")
    with server, FaultyProxy(server.port, tls=context) as proxy:

        def outcome(**given: Any) -> Outcome:
            own: dict[str, Any] = {"tls": True, "ca_file": files["ca"], "password": "correct"}
            own |= {"cert_file": files["certificate"], "key_file": files["key"], **given}
            timeout = own.pop("timeout", 0.5)
            tier = ValkeyTier(proxy.address, identity="tls", connection=ValkeyConnection(**own), timeout=timeout)
            with RemoteSession(tier) as session:
                return session.put(b"k", 1)

        assert outcome(timeout=PATIENT) is DONE
        assert outcome(password="wrong") is FAILED
        assert outcome(password=None) is FAILED
        assert outcome(ca_file=None) is FAILED  # the server's certificate is not one of the system's
        assert outcome(cert_file=None, key_file=None) is FAILED
        assert outcome(tls=False, ca_file=None, cert_file=None, key_file=None) is FAILED
        assert outcome(timeout=PATIENT) is DONE


def test_an_acl_of_the_documented_commands_is_enough(tmp_path: Path) -> None:
    rule = "user kv on >pw ~{kvoffload/* +mget +set +strlen +unlink +scan +info +client +ping"
    with one(tmp_path / "server", "--user", *rule.split()[1:]) as server:
        login = ValkeyConnection(username="kv", password="pw")
        tier = ValkeyTier(server.address, identity="acl", connection=login, timeout=PATIENT)
        with RemoteSession(tier) as session:
            assert session.put(b"k", 1) is DONE
            assert session.get(b"k") == 1
            assert session.exists(b"k")
            assert session.remove(b"k") is DONE
            assert tier.clear().wait(30) == [DONE]
        with RemoteSession(ValkeyTier(server.address, identity="acl", connection=login, prefix="other")) as other:
            assert other.put(b"k", 1) is FAILED


def test_an_acl_for_a_cluster(valkey_cluster: ValkeyCluster) -> None:
    rules = "+mget +set +strlen +unlink +scan +info +client +ping +cluster|slots +cluster|myid"
    for node in valkey_cluster.nodes:
        assert ask(node.port, f"ACL SETUSER kv on >pw ~{{acl/* {rules}") == "+OK\r\n"
    tier = ValkeyTier(
        valkey_cluster.addresses,
        cluster=True,
        identity="x",
        prefix="acl",
        connection=ValkeyConnection(username="kv", password="pw"),
        timeout=PATIENT,
    )
    with RemoteSession(tier) as session:
        for number in range(8):
            key = b"%d" % number
            assert session.put(key, number) is DONE
            assert session.get(key) == number
        assert session.exists(b"1")
        assert session.remove(b"1") is DONE
        assert tier.clear().wait(30) == [DONE]
        assert not session.exists(b"2")


def test_the_server_deletes_records_after_their_expiry(valkey_server: Process) -> None:
    with RemoteSession(
        ValkeyTier(valkey_server.address, identity="expiry", prefix="expiring", expiry=100.0, timeout=PATIENT)
    ) as session:
        assert session.put(b"k", 1) is DONE
        assert session.get(b"k") == 1
    found = [name for name in names(valkey_server.port) if "expiring" in name]
    assert len(found) == 3  # header and two ranges
    for name in found:
        assert 0 < int(ask(valkey_server.port, f"PTTL {name}")[1:]) <= 100_000


def test_clearing_leaves_what_is_not_this_tiers(valkey_server: Process) -> None:
    first = RemoteSession(ValkeyTier(valkey_server.address, identity="one", timeout=PATIENT))
    second = RemoteSession(ValkeyTier(valkey_server.address, identity="two", timeout=PATIENT))
    ask(valkey_server.port, "SET other 1")
    with first, second:
        for number in range(50):
            assert first.put(b"%d" % number, number) is DONE
        assert second.put(b"k", 1) is DONE
        assert first.tier.clear().wait(30) == [DONE]
        assert not any(map(first.exists, (b"%d" % number for number in range(50))))
        assert second.get(b"k") == 1
    assert ask(valkey_server.port, "GET other") == "$1\r\n1\r\n"


# what a server does to records ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(3))
def test_a_record_that_was_evicted_in_part_is_a_miss_and_can_be_put_again(
    session: RemoteSession, valkey_server: Process, part: int
) -> None:
    assert session.put(b"k", 1) is DONE
    name = f"{{{session.tier.format.name(b'k')}}}:{part}"
    assert ask(valkey_server.port, f"UNLINK {name}") == ":1\r\n"
    assert not session.exists(b"k")
    assert session.get(b"k") is MISSING
    assert session.put(b"k", 2) is DONE
    assert session.get(b"k") == 2
    assert session.tier.statistics().corrupt == 0


@pytest.mark.parametrize("part", range(3))
def test_values_of_other_sizes_and_types_are_no_records(
    session: RemoteSession, valkey_server: Process, part: int
) -> None:
    assert session.put(b"k", 1) is DONE
    name = f"{{{session.tier.format.name(b'k')}}}:{part}"
    ask(valkey_server.port, f"SETRANGE {name} 0 XXXX")
    assert session.get(b"k") is MISSING
    assert session.tier.statistics().corrupt == 1
    assert session.put(b"k", 2) is DONE
    ask(valkey_server.port, f"SET {name} short")
    assert session.get(b"k") is MISSING
    assert session.put(b"k", 3) is DONE
    assert session.get(b"k") == 3
    assert session.tier.statistics().corrupt == 2


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("change", ["APPEND {} !", "a hash"])
def test_a_value_that_is_too_long_or_no_string_is_a_miss_and_spoils_no_neighbour(
    valkey_server: Process, change: str, part: int
) -> None:
    tier = ValkeyTier(
        valkey_server.address, identity=f"misfit {change} {part}", timeout=PATIENT, limits=Limits(threads=1)
    )
    keys = [b"%d" % number for number in range(4)]

    def spoil(port: int) -> None:
        name = f"{{{tier.format.name(keys[1])}}}:{part}"
        if change == "a hash":
            ask(port, f"UNLINK {name}")
            ask(port, f"HSET {name} field value")
        else:
            ask(port, change.format(name))

    with RemoteSession(tier) as session:
        for number, key in enumerate(keys):
            assert session.put(key, number) is DONE
        spoil(valkey_server.port)
        assert not session.exists(keys[1])
        assert tier.get(keys, range(4, 8)).wait(30) == [DONE, MISSING, DONE, DONE]
        assert [session.memory.version(entry) for entry in (4, 6, 7)] == [0, 2, 3]
        assert (tier.statistics().corrupt, tier.statistics().failed) == (1, 0)
        assert ask(valkey_server.port, f"EXISTS {{{tier.format.name(keys[1])}}}:{part}") == ":0\r\n"
        assert session.put(keys[1], 5) is DONE
        assert session.get(keys[1]) == 5
        spoil(valkey_server.port)
        assert session.put(keys[1], 6) is DONE, "a put writes over it, too"
        assert session.get(keys[1]) == 6


def test_mirrors_that_are_only_read(tmp_path: Path) -> None:
    """A login without the right to write, and a replica alone: puts fail, and records are read."""
    identity = "mirror"
    with one(tmp_path / "server") as server:
        rights = "~{kvoffload/1/* +mget +strlen +info +client +ping"
        assert ask(server.port, f"ACL SETUSER reader on >secret {rights}") == "+OK\r\n"
        with RemoteSession(ValkeyTier(server.address, identity=identity, timeout=PATIENT)) as session:
            assert session.put(b"k", 1) is DONE
        replica = one(tmp_path / "replica", "--replicaof", server.address.replace(":", " "))
        login = ValkeyConnection(username="reader", password="secret")
        alone = ValkeyConnection(options={"read_only": True})
        with replica:
            wait_until(lambda: bool(names(replica.port)), "the replica has the record")
            for address, connection in ((server.address, login), (replica.address, alone)):
                tier = ValkeyTier(address, identity=identity, connection=connection, timeout=PATIENT)
                with RemoteSession(tier) as session:
                    for _ in range(2):
                        assert session.put(b"new", 2) is FAILED
                        assert session.get(b"k") == 1
                        assert session.get(b"new") is MISSING
                    assert session.remove(b"k") is FAILED


def test_a_full_server_that_evicts_nothing_declines(tmp_path: Path) -> None:
    server = one(tmp_path / "server", "--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    tier = ValkeyTier(server.address, identity="full", timeout=PATIENT)
    with server, RemoteSession(tier, row_bytes=256 << 10) as session:
        outcomes = [session.put(b"%d" % number, number) for number in range(16)]
        assert outcomes[0] is DONE
        assert outcomes[-1] is DECLINED
        assert set(outcomes) == {DONE, DECLINED}
        assert session.get(b"0") == 0


def test_a_full_server_that_evicts_keeps_whole_records_or_none(tmp_path: Path) -> None:
    server = one(tmp_path / "server", "--maxmemory", "4mb", "--maxmemory-policy", "allkeys-random")
    tier = ValkeyTier(server.address, identity="full", timeout=PATIENT)
    with server, RemoteSession(tier, row_bytes=64 << 10) as session:
        for number in range(100):
            assert session.put(b"%d" % number, number) is DONE
            for each in range(max(0, number - 3), number + 1):
                assert session.get(b"%d" % each) in (each, MISSING)
        assert session.tier.statistics().corrupt == 0
        assert session.tier.statistics().missing > 0


# servers that go and come back ----------------------------------------------------------------------------------------


def test_a_server_that_is_gone_fails_and_is_noticed_when_it_is_back(tmp_path: Path) -> None:
    server = one(tmp_path / "server")
    with RemoteSession(ValkeyTier(server.address, identity="gone", timeout=0.2)) as session:  # it never was there
        assert session.put(b"k", 1) is FAILED
        assert session.get(b"k") is FAILED
        server.start()
        assert until(session, 1)
        server.kill()
        assert session.get(b"k") is FAILED
        assert session.remove(b"k") is FAILED
        assert session.tier.clear().wait(30) == [FAILED]
        with server:
            assert until(session, 2)
            server.pause()
            assert session.get(b"k") is FAILED
            server.resume()
            assert until(session, 2, put=False)


@pytest.mark.parametrize("extra", [b"$500000000\r\n", b"$500\r\n", b":7\r\n", b"+OK\r\n", b"*2\r\n", b"$-1\r\n"])
def test_a_connection_that_is_out_of_step_is_left(valkey_server: Process, extra: bytes) -> None:
    """The client itself waits for the rest of an answer, or takes answers for those of later commands, for ever."""
    with FaultyProxy(valkey_server.port) as proxy:
        tier = ValkeyTier(proxy.address, identity=f"out of step {extra!r}", timeout=0.2, limits=Limits(threads=1))
        with RemoteSession(tier) as session:
            assert until(session, 1)
            proxy.inject(extra)
            assert session.get(b"k") in (1, MISSING, FAILED)
            assert until(session, 1)


def test_a_cluster_whose_answers_do_not_end_hangs_no_call(tmp_path: Path) -> None:
    with ValkeyCluster(tmp_path, proxies_seed=0) as cluster:
        addresses = [proxy.address for proxy in cluster.proxies]
        with RemoteSession(
            ValkeyTier(addresses, cluster=True, identity="x", timeout=0.2, limits=Limits(threads=1))
        ) as session:
            assert until(session, 1)
            for proxy in cluster.proxies:
                proxy.inject(b"$500000000\r\n")
            assert session.tier.clear().wait(30) == [FAILED]
            assert session.get(b"k") is FAILED
            assert session.put(b"k", 2) is FAILED
            assert session.tier.exists([b"k"]).wait(30) == [FAILED]
            assert session.remove(b"k") is FAILED
            assert until(session, 1)


def test_a_clear_that_does_not_reach_all_servers_of_a_cluster_fails(tmp_path: Path) -> None:
    """The client leaves servers out that it has no connection with, and does not say so."""
    keys = [b"%d" % number for number in range(30)]
    with ValkeyCluster(tmp_path, proxies_seed=0) as cluster:
        addresses = [proxy.address for proxy in cluster.proxies]
        with RemoteSession(
            ValkeyTier(addresses, cluster=True, identity="x", timeout=1.0, limits=Limits(threads=1))
        ) as session:
            for key in keys:
                assert any(session.put(key, 1) is DONE for _ in range(100))
            cluster.proxies[1].faults = ProxyFaults(refuse=True)
            cluster.proxies[1].cut_all()
            assert {session.tier.clear().wait(30)[0] for _ in range(5)} == {FAILED}
            cluster.proxies[1].faults = ProxyFaults()
            assert any(session.tier.clear().wait(30) == [DONE] for _ in range(100))
            assert not any(map(session.exists, keys))


def until(session: RemoteSession, version: int, *, put: bool = True) -> bool:
    """Put and fetch until the client has connected again; at most a hundred calls."""
    tries = range(100)
    return any((not put or session.put(b"k", version) is DONE) and session.get(b"k") == version for _ in tries)
