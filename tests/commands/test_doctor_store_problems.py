"""`doctor --store`: what is wrong with a store is said in words, with a remedy; drawbacks of real servers are found."""

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
from mooncake_servers import mooncake_program
from remote_stores import for_objects, for_valkey, names_in_s3, patient_mooncake, taken_from_mooncake
from servers import HOST, Process, ask, certificates, need_module, valkey

from kvoffload.commands import findings
from kvoffload.terminal.store_option import Store
from kvoffload.tiers import ValkeyTier

pytestmark = pytest.mark.servers

DOCTOR = ("doctor", "--backend", "simulated")


def statuses(store: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Status and remedy by text."""
    return {each.text: (each.status, each.remedy) for each in findings.of_stores({"stores": [store]})}


def problem(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Problem and remedy of one store."""
    fields = run_json(capsys, *DOCTOR, *arguments, code=1)
    [store] = fields["stores"]
    [(text, (status, remedy))] = statuses(store).items()
    assert status == "fail"
    assert store["problem"] in text
    assert any(remedy in advice for advice in fields["advice"])
    return store["problem"].partition(" (")[0], remedy


def test_nothing_is_left_in_any_store(
    capsys: pytest.CaptureFixture[str], valkey_server: Process, s3_server: Process
) -> None:
    before = ask(valkey_server.port, "DBSIZE")
    arguments = [*for_valkey(valkey_server), *for_objects(s3_server, "doctor")]
    with patient_mooncake() as (option, mooncake):
        stores = run_json(capsys, *DOCTOR, *arguments, *option)["stores"]
        assert taken_from_mooncake(mooncake) == 0
    assert [each["problem"] for each in stores] == [None] * 3
    assert "conditional_puts" not in stores[1]["says"]
    assert ask(valkey_server.port, "DBSIZE") == before
    assert list(names_in_s3(s3_server, "doctor")) == []


# drawbacks ------------------------------------------------------------------------------------------------------------


def test_a_store_that_overwrites_is_found_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, s3_server: Process
) -> None:
    arguments = for_objects(s3_server, "overwrites")
    obstore = need_module("obstore")
    real = obstore.put

    def put(store: Any, name: str, content: Any, **options: Any) -> Any:
        return real(store, name, content, **options | {"mode": "overwrite"})

    monkeypatch.setattr(obstore, "put", put)
    [store] = run_json(capsys, *DOCTOR, *arguments)["stores"]
    status, remedy = statuses(store)["overwrites objects that it should only create"]
    assert status == "warn"
    assert "conditional puts" in remedy
    assert list(names_in_s3(s3_server, "overwrites")) == []


@pytest.mark.parametrize(
    ("policy", "said"), [("volatile-lru", "evicts only records that expire"), ("noeviction", "evicts nothing")]
)
def test_what_a_full_server_would_do_is_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, policy: str, said: str
) -> None:
    with valkey(tmp_path, "--maxmemory", "200mb", "--maxmemory-policy", policy) as server:
        [store] = run_json(capsys, *DOCTOR, *for_valkey(server, "timeout=10"))["stores"]
    assert store["says"]["max_bytes"] == 200 << 20
    assert statuses(store)[said][0] == "warn"


# what is wrong --------------------------------------------------------------------------------------------------------


def test_a_full_server_has_no_room(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with valkey(tmp_path, "--maxmemory", "8mb") as server:
        said, remedy = problem(capsys, *for_valkey(server, "timeout=10"))
    assert "were written; outcomes: " in said
    assert "it has no room" in remedy


def test_wrong_bytes_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, valkey_server: Process
) -> None:
    real = ValkeyTier.read_records

    def read(tier: ValkeyTier, keys: Any, rows: Any) -> Any:
        outcomes = real(tier, keys, rows)
        rows[0][0][5] ^= 1
        return outcomes

    monkeypatch.setattr(ValkeyTier, "read_records", read)
    said, remedy = problem(capsys, *for_valkey(valkey_server, "timeout=10"))
    assert said == "it returned other bytes than were written"
    assert remedy == "do not use it"


def test_a_wrong_password_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, s3_server: Process
) -> None:
    monkeypatch.setenv("PASSWORD_OF_A_TEST", "of-a-test")
    with valkey(tmp_path, "--requirepass", "of-a-test") as server:
        for given in ((), ("password=wrong",)):
            said, remedy = problem(capsys, *for_valkey(server, "timeout=10", *given))
            assert said == "it refuses user or password"
            assert "password=env:VARIABLE" in remedy
        [store] = run_json(capsys, *DOCTOR, *for_valkey(server, "timeout=10", "password=env:PASSWORD_OF_A_TEST"))[
            "stores"
        ]
        assert store["problem"] is None
    said, remedy = problem(capsys, *for_objects(s3_server, "wrong", secret_access_key="wrong"))
    assert said == "it refuses this user"
    assert "see name and password" in remedy


def test_a_store_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str], s3_server: Process) -> None:
    mooncake_program("mooncake_master")
    *_, config, options = for_objects(s3_server, "f", endpoint="http://127.0.0.1:1")
    of_objects = ("--store", "objects", "store=s3://b/f", config, options)
    of_mooncake = ("--store", "mooncake", "master=127.0.0.1:1")
    for arguments in (("--store", "valkey", "addresses=127.0.0.1:1", "timeout=1"), of_objects, of_mooncake):
        said, remedy = problem(capsys, *arguments)
        assert said == "the connection is refused"
        assert remedy == "start the server, or correct the address"
    said, _ = problem(capsys, "--store", "valkey", "addresses=no-such-host.invalid:1", "timeout=1")
    assert said == "there is no host of that name"


def test_a_server_that_is_silent_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with valkey(tmp_path) as server:
        server.pause()
        said, remedy = problem(capsys, *for_valkey(server, "timeout=0.5"))
        server.resume()
    assert said == "it does not answer in time"
    assert "timeout" in remedy


@contextmanager
def speaking_tls(folder: Path) -> Iterator[tuple[str, Path]]:
    """A server that shakes hands and says no more: its address, and who has signed its certificate."""
    files = certificates(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["certificate"], files["key"])

    def talk(connection: socket.socket) -> None:
        try:
            with context.wrap_socket(connection, server_side=True) as secured:
                secured.recv(1)
        except OSError:
            connection.close()

    def serve(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    with socket.create_server((HOST, 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield f"{HOST}:{server.getsockname()[1]}", files["ca"]
        server.shutdown(socket.SHUT_RDWR)


def test_tls_on_one_side_and_unknown_certificates_are_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, valkey_server: Process
) -> None:
    one_side = "one side uses TLS, and the other does not"
    assert problem(capsys, *for_valkey(valkey_server, "tls=true", "timeout=1"))[0] == one_side
    with speaking_tls(tmp_path) as (address, ca):
        plain = ("--store", "valkey", f"addresses={address}", "timeout=1")
        assert problem(capsys, *plain)[0] == one_side
        said, remedy = problem(capsys, *plain, "tls=true")
        assert said == "its TLS certificate is not trusted"
        assert "ca_file" in remedy
        assert problem(capsys, *plain, "tls=true", f"ca_file={ca}")[0] == "it does not answer in time"


def test_a_package_that_is_missing_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "glide_sync", None)
    said, remedy = problem(capsys, "--store", "valkey")
    assert "valkey-glide-sync" in said
    assert remedy == "pip install 'kvoffload[valkey]'"


def test_a_bucket_that_is_missing_is_said() -> None:
    explained = Store("objects", {"store": "s3://b"}).explained(OSError("404 Not Found: <Code>NoSuchBucket</Code>"))
    assert str(explained).startswith("--store objects s3://b: there is no such bucket (404")


def test_an_error_without_a_known_meaning_is_quoted() -> None:
    explained = Store("valkey", {}).explained(RuntimeError("the moon is full"))
    assert explained.problem == "the moon is full"
    assert str(explained) == "--store valkey: the moon is full; see what the store's log says"
