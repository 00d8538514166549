"""`doctor --store`: what is found of remote stores, and that nothing is left in them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benching import run_json
from mooncake_servers import MooncakeServers
from servers import Process, ask, need_module

from kvoffload.commands import findings, main
from kvoffload.terminal import store_option

DOCTOR = ("doctor", "--backend", "simulated")


def found(**fields: Any) -> list[tuple[str, str]]:
    store: dict[str, Any] = {
        "store": "valkey",
        "problem": None,
        "says": {},
        "ask_seconds": 1e-4,
        "probe_bytes": 1 << 25,
    }
    store |= {"ask_seconds": 1e-4, "write_gb_per_s": 1.0, "read_gb_per_s": 2.0} | fields
    return [(each.status, each.text) for each in findings.of_stores({"stores": [store]})]


def test_a_folder_as_an_object_store_is_tried_and_left_empty(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    need_module("obstore")
    given = (*DOCTOR, "--store", "objects", f"store=file://{tmp_path}")
    (store,) = run_json(capsys, *given)["stores"]
    assert store["problem"] is None
    assert store["probe_bytes"] == 32 << 20
    assert min(store[each] for each in ("write_gb_per_s", "read_gb_per_s", "ask_seconds")) > 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert main([*given]) == 0
    assert "\nstores\n  ok    objects: 32.00 MiB, 1 MiB each: write " in capsys.readouterr().out


@pytest.mark.servers
def test_a_valkey_server_is_asked_what_it_is(
    capsys: pytest.CaptureFixture[str], valkey_server: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_module("glide_sync")
    monkeypatch.setenv("ADDRESS_OF_A_TEST", valkey_server.address)
    fields = run_json(capsys, *DOCTOR, "--store", "valkey", "addresses=env:ADDRESS_OF_A_TEST", "timeout=40")
    (store,) = fields["stores"]
    assert store["problem"] is None
    assert store["says"]["version"][0].isdigit()
    assert store["says"]["used_bytes"] > 0
    assert "kvoffload-doctor" not in ask(valkey_server.port, "KEYS *")
    assert "valkey: set maxmemory, or it grows until it is killed" in fields["advice"]


@pytest.mark.servers
def test_a_mooncake_store_is_tried(capsys: pytest.CaptureFixture[str], mooncake_servers: MooncakeServers) -> None:
    fields = run_json(capsys, *DOCTOR, "--store", "mooncake", f"master={mooncake_servers.master.address}")
    (store,) = fields["stores"]
    assert store["problem"] is None
    assert re.fullmatch(r"client \d+\.\d+.*, (tcp|rdma)", store["says"]["version"])
    gone = run_json(capsys, *DOCTOR, "--store", "mooncake", "master=127.0.0.1:1", code=1)["stores"][0]
    assert "no connection to the Mooncake master at 127.0.0.1:1" in gone["problem"]


@pytest.mark.parametrize(
    ("words", "problem", "remedy"),
    [
        (("nothing",), "kind must be one of", "see the arguments of its tier in docs/reference/tiers.md"),
        (("valkey", "addresses"), "takes arguments as name=value", "see the arguments"),
        (("valkey", "password=env:NOT_A_VARIABLE"), "has no variable NOT_A_VARIABLE", "see the arguments"),
        (("memory", "nbytes=5"), "unexpected keyword argument", "see the arguments"),
        (("valkey", "addresses=127.0.0.1:1", "timeout=0.05"), "127.0.0.1:1", "start the server, or correct"),
    ],
)
def test_a_store_that_cannot_be_used_fails(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str, remedy: str
) -> None:
    need_module("glide_sync")
    fields = run_json(capsys, *DOCTOR, "--store", *words, code=1)
    assert problem in fields["stores"][0]["problem"]
    assert any(each.startswith(f"{words[0]}: {remedy}") for each in fields["advice"])


def test_nothing_but_the_result_is_on_standard_output() -> None:
    """The client writes its own log there, from outside Python."""
    need_module("glide_sync")
    words = ["--store", "valkey", "addresses=127.0.0.1:1", "timeout=0.2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "kvoffload", *DOCTOR, *words], stdout=subprocess.PIPE, timeout=100, check=False
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["stores"][0]["problem"]


def test_drawbacks_of_a_server_are_named() -> None:
    assert [status for status, _ in found()] == ["ok"]
    assert found(says={"max_bytes": 0})[1] == ("warn", "its memory has no limit")
    assert found(says={"max_bytes": 1, "when_full": "noeviction"})[1] == ("warn", "evicts nothing")
    assert len(found(says={"max_bytes": 1, "when_full": "allkeys-lru"})) == 1


def test_arguments_are_json_environment_variables_or_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_A_TEST", "12")
    assert store_option.argument("cluster=true") == ("cluster", True)
    assert store_option.argument('config={"region": "x"}') == ("config", {"region": "x"})
    assert store_option.argument("store=s3://a=b") == ("store", "s3://a=b")
    assert store_option.argument("password=env:SECRET_OF_A_TEST") == ("password", "12")
