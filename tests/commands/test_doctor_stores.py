"""`doctor --valkey --s3 --mooncake`: what is found of real stores, that nothing is left, words for what is wrong."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from benching import run_json
from mooncake_servers import MooncakeServers, mooncake_program
from servers import HOST, Process, ask, certificates, need_module, valkey
from store_arguments import for_mooncake, for_s3, for_valkey, names_in_s3, records_in_mooncake

from kvoffload.commands import main, store_findings
from kvoffload.terminal.stores import ValkeyStore
from kvoffload.tiers import ValkeyTier

DOCTOR = ("doctor", "--backend", "simulated")


def found(store: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Status and remedy by text."""
    fields = {"stores": [store], "extras": {"xxhash": "1"}}
    return {each.text: (each.status, each.remedy) for each in store_findings.of_stores(fields)}


def test_stores_are_tried_and_nothing_is_left(
    capsys: pytest.CaptureFixture[str],
    valkey_server: Process,
    s3_server: Process,
    mooncake_servers: MooncakeServers,
) -> None:
    arguments = [*for_valkey(valkey_server), *for_s3(s3_server, "doctor"), *for_mooncake(mooncake_servers)]
    before = ask(valkey_server.port, "DBSIZE"), records_in_mooncake(mooncake_servers)
    fields = run_json(capsys, *DOCTOR, *arguments)
    of_valkey, of_s3, of_mooncake = fields["stores"]
    for each in fields["stores"]:
        assert (each["problem"], each["remedy"]) == (None, None)
        assert each["client"]
        assert each["put_gb_per_s"] > 0
        assert each["get_gb_per_s"] > 0
    assert of_valkey["version"].startswith(("Valkey ", "Redis "))
    assert (of_valkey["max_bytes"], of_valkey["eviction_policy"]) == (0, "noeviction")
    assert of_valkey["used_bytes"] > 0
    assert (of_s3["used_bytes"], of_s3["keeps_first"]) == (None, True)
    assert of_mooncake["max_bytes"] == 64 << 20
    assert (ask(valkey_server.port, "DBSIZE"), records_in_mooncake(mooncake_servers)) == before
    assert list(names_in_s3(s3_server, "doctor")) == []
    assert [text for text, (status, _) in found(of_s3).items() if status != "ok"] == []
    assert main([*DOCTOR, *arguments]) == 0
    text = capsys.readouterr().out
    assert "\nstores\n" in text
    assert f"  ok    valkey {valkey_server.address}: " in text
    assert f"  warn  valkey {valkey_server.address}: eviction policy noeviction" in text
    assert any("maxmemory-policy" in advice for advice in fields["advice"])


def test_without_stores_none_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, *DOCTOR)["stores"] == []
    assert main(DOCTOR) == 0
    assert "\nstores\n" not in capsys.readouterr().out


def test_a_cluster_is_summed_up(capsys: pytest.CaptureFixture[str], valkey_cluster: Any) -> None:
    need_module("glide_sync")
    [store] = run_json(capsys, *DOCTOR, "--valkey", ",".join(valkey_cluster.addresses), "cluster=true")["stores"]
    assert store["problem"] is None
    assert store["eviction_policy"] == "noeviction"


# drawbacks ------------------------------------------------------------------------------------------------------------

GOOD = {
    "store": "valkey", "address": "h:1", "problem": None, "remedy": None, "package": "p", "client": "1", "version": "V",
    "used_bytes": 1 << 20, "max_bytes": 1 << 30, "eviction_policy": "allkeys-lru", "keeps_first": None,
    "probe_bytes": 16 << 20, "put_gb_per_s": 1.0, "get_gb_per_s": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text", "remedy"),
    [
        ({"eviction_policy": "noeviction"}, "it takes no more records", "maxmemory-policy to allkeys-lru"),
        ({"eviction_policy": "volatile-lru"}, "evicts only records that expire", "give the tier an expiry"),
        ({"max_bytes": 0}, "no limit: it takes memory until the machine has none", "set maxmemory"),
        ({"store": "mooncake", "eviction_policy": None, "max_bytes": 0}, "no process lends it memory", "segment_bytes"),
        ({"store": "mooncake", "used_bytes": None}, "does not say how much it holds", "metrics_port=PORT"),
        ({"store": "s3", "used_bytes": None, "keeps_first": False}, "overwrites where it is asked to create", "use a"),
    ],
)
def test_drawbacks_are_warnings_with_remedies(change: dict[str, Any], text: str, remedy: str) -> None:
    assert {status for status, _ in found(GOOD).values()} == {"ok"}
    [(said, given)] = [(said, given) for said, (status, given) in found(GOOD | change).items() if status != "ok"]
    assert text in said
    assert remedy in given


def test_a_store_that_overwrites_is_found_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, s3_server: Process
) -> None:
    arguments = for_s3(s3_server, "overwrites")
    obstore = need_module("obstore")
    real = obstore.put

    def put(store: Any, name: str, content: Any, **options: Any) -> Any:
        return real(store, name, content, **options | {"mode": "overwrite"})

    monkeypatch.setattr(obstore, "put", put)
    [store] = run_json(capsys, *DOCTOR, *arguments)["stores"]
    assert store["keeps_first"] is False
    assert list(names_in_s3(s3_server, "overwrites")) == []


def test_a_full_server_and_wrong_bytes_are_found_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with valkey(tmp_path, "--maxmemory", "8mb") as server:
        [store] = run_json(capsys, *DOCTOR, *for_valkey(server))["stores"]
        assert "could not be put" in store["problem"]
        assert "has no room" in store["remedy"]
    real = ValkeyTier.read_records

    def read(tier: ValkeyTier, keys: Any, rows: Any) -> Any:
        outcomes = real(tier, keys, rows)
        rows[0][0][5] ^= 1
        return outcomes

    monkeypatch.setattr(ValkeyTier, "read_records", read)
    with valkey(tmp_path) as server:
        [store] = run_json(capsys, *DOCTOR, *for_valkey(server))["stores"]
        assert store["problem"] == "records had wrong bytes"


# what is wrong --------------------------------------------------------------------------------------------------------


def problem(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Problem and remedy of one store."""
    fields = run_json(capsys, *DOCTOR, *arguments)
    [store] = fields["stores"]
    [(text, (status, remedy))] = found(store).items()
    assert status == "fail"
    assert store["problem"] in text
    assert any(remedy in advice for advice in fields["advice"])
    return store["problem"], remedy


def test_a_wrong_password_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path, s3_server: Process) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of-a-test\n")
    with valkey(tmp_path, "--requirepass", "of-a-test") as server:
        for given in ((), ("password=wrong",)):
            said, remedy = problem(capsys, *for_valkey(server, *given))
            assert said == "it refuses user or password"
            assert "password=@FILE" in remedy
        [store] = run_json(capsys, *DOCTOR, *for_valkey(server, f"password=@{secret}"))["stores"]
        assert store["problem"] is None
    said, remedy = problem(capsys, *for_s3(s3_server, secret="wrong"))
    assert said == "it refuses user or password"
    assert "secret_access_key=@FILE" in remedy


def test_a_store_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("glide_sync", "obstore"):
        need_module(module)
    mooncake_program("mooncake_master")
    of_s3 = ("--s3", "s3://b/f", "endpoint=http://127.0.0.1:1", "region=r", "access_key_id=a", "secret_access_key=b")
    for arguments in (("--valkey", "127.0.0.1:1"), of_s3, ("--mooncake", "127.0.0.1:1")):
        assert problem(capsys, *arguments) == (
            "the connection is refused",
            "start the server, or correct the port",
        )


def test_a_server_that_is_silent_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with valkey(tmp_path) as server:
        server.pause()
        said, remedy = problem(capsys, *for_valkey(server, "timeout=0.5"))
        server.resume()
    assert said == "it does not answer in time"
    assert "firewall" in remedy


def test_a_bucket_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str], s3_server: Process) -> None:
    option, _, *keys = for_s3(s3_server)
    said, _ = problem(capsys, option, "s3://no-such-bucket/folder", *keys)
    assert said == "there is no such bucket"


@contextmanager
def speaking_tls(folder: Path) -> Iterator[tuple[str, Path]]:
    """A server that shakes hands and says no more: its address, and who has signed its certificate."""
    files = certificates(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["certificate"], files["key"])
    with socket.create_server((HOST, 0)) as server:

        def talk(connection: socket.socket) -> None:
            try:
                with context.wrap_socket(connection, server_side=True) as secured:
                    secured.recv(1)
            except OSError:
                connection.close()

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=talk, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"{HOST}:{server.getsockname()[1]}", files["ca"]
        server.shutdown(socket.SHUT_RDWR)


def test_tls_on_one_side_and_unknown_certificates_are_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, valkey_server: Process
) -> None:
    one_side = "one side uses TLS, and the other does not"
    said, remedy = problem(capsys, *for_valkey(valkey_server, "tls=true", "timeout=1"))
    assert (said, remedy) == (one_side, "give tls=true, or leave it out")
    with speaking_tls(tmp_path) as (address, ca):
        assert problem(capsys, "--valkey", address, "timeout=1")[0] == one_side
        said, remedy = problem(capsys, "--valkey", address, "timeout=1", "tls=true")
        assert said == "its TLS certificate is not trusted"
        assert "ca_file=FILE" in remedy
        said, _ = problem(capsys, "--valkey", address, "timeout=1", "tls=true", f"ca_file={ca}")
        assert said == "it does not answer in time"


def test_a_package_that_is_missing_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "glide_sync", None)
    said, remedy = problem(capsys, "--valkey", "127.0.0.1:1")
    assert "valkey-glide-sync" in said
    assert remedy == "pip install 'kvoffload[valkey]'"


def test_an_error_without_a_known_meaning_is_quoted() -> None:
    explained = ValkeyStore("h:1", {}).explained(RuntimeError("the moon is full"))
    assert explained.problem == "the moon is full"
    assert str(explained).startswith("--valkey h:1: the moon is full; see that")
