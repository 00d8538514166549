"""`bench remote` over real servers: every record is compared, and none is left."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benching import run_json, times_in
from mooncake_servers import mooncake_program
from remote_stores import for_objects, for_valkey, names_in_s3, patient_mooncake, taken_from_mooncake
from servers import Process, ask, need_module

from kvoffload.cache.block_cache import BlockCache
from kvoffload.commands import main
from kvoffload.terminal.console import WIDTH
from kvoffload.tiers import Outcome, ValkeyTier
from kvoffload.tiers.remote import Parts
from kvoffload_bench import tier_calls
from kvoffload_bench.remote import BareLoop

pytestmark = pytest.mark.servers

SMALL = ("--sizes", "16384", "--in-flight", "1,3", "--nbytes", "131072", "--repeats", "1")
TINY = ("--sizes", "16384", "--in-flight", "2", "--nbytes", "32768", "--repeats", "1")
REMOTE = ("bench", "remote", "--backend", "simulated")
PROMOTED = 64
NOWHERE = ("--store", "valkey", "addresses=127.0.0.1:1")


def test_all_stores_are_measured_and_every_record_compared(
    capsys: pytest.CaptureFixture[str], valkey_server: Process, s3_server: Process
) -> None:
    before = ask(valkey_server.port, "DBSIZE")
    stores = [*for_valkey(valkey_server), *for_objects(s3_server, "bench")]
    with patient_mooncake() as (option, mooncake):
        fields = run_json(capsys, *REMOTE, *stores, *option, *SMALL)
        assert taken_from_mooncake(mooncake) == 0
    kinds = ("valkey", "objects", "mooncake")
    cells = [tuple(each[name] for name in ("store", "record_bytes", "in_flight", "operation", "records"))
             for each in fields["cells"]]  # fmt: skip
    planned = ((16384, 1, 8), (16384, 3, 6))
    assert cells == [
        (kind, size, count, name, records)
        for kind in kinds
        for size, count, records in planned
        for name in ("put", "get")
    ]
    rounds, readers = 2, 2
    compared = rounds * (readers * sum(records for _, _, records in planned) + PROMOTED)
    assert fields["verified_records"] == len(kinds) * compared
    assert (fields["wrong_records"], fields["missing_records"]) == (0, 0)
    assert [each["store"] for each in fields["calls"]] == [*kinds]
    assert [each["keys"] for each in fields["promotions"]] == [PROMOTED] * 3
    assert all(0 < each["first_ms"] <= each["all_ms"] for each in fields["promotions"])
    assert len(times_in(fields)) >= 5 * len(cells)
    assert ask(valkey_server.port, "DBSIZE") == before
    assert list(names_in_s3(s3_server, "bench")) == []


def test_mooncake_copies_nothing_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    with patient_mooncake() as (option, _):
        fields = run_json(capsys, *REMOTE, *option, *TINY, "--sizes", "262144")
    [calls] = fields["calls"]
    assert calls["record_bytes"] == 256 << 10
    assert calls["python_bytes_a_record"] < calls["record_bytes"] / 8


def test_what_is_printed(capsys: pytest.CaptureFixture[str], valkey_server: Process, tmp_path: Path) -> None:
    saved = tmp_path / "remote.json"
    assert main([*REMOTE, *for_valkey(valkey_server), *TINY, "--save", str(saved)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("bench remote: valkey ")
    assert max(map(len, text.splitlines())) <= WIDTH
    assert f"{2 * (2 * 2 + PROMOTED)} records verified, 0 wrong" in text
    for line in ("host time of put() of 64 keys, us a key", "promote(): first of 64 keys"):
        assert line in text
    assert '"verified_records"' in saved.read_text()
    assert "nan" not in text


@pytest.mark.parametrize("change", ["flip", "lose", "flip bare"])
def test_wrong_and_missing_records_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, valkey_server: Process, change: str
) -> None:
    real, real_bare = ValkeyTier.fetch_parts, BareLoop.get

    def fetch(tier: ValkeyTier, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        outcomes = real(tier, names, parts)
        return [Outcome.MISSING] * len(outcomes) if change == "lose" else outcomes

    def read(tier: Any, keys: Sequence[bytes], rows: Sequence[Parts]) -> list[Outcome]:
        outcomes = real_read(tier, keys, rows)
        rows[0][0][-1] ^= change == "flip"
        return outcomes

    def bare(loop: BareLoop, keys: Sequence[bytes], rows: Any) -> Any:
        found = real_bare(loop, keys, rows)
        found[0][-1] ^= change == "flip bare"
        return found

    real_read = ValkeyTier.read_records
    monkeypatch.setattr(ValkeyTier, "fetch_parts", fetch)
    monkeypatch.setattr(ValkeyTier, "read_records", read)
    monkeypatch.setattr(BareLoop, "get", bare)
    assert main([*REMOTE, *for_valkey(valkey_server), *TINY]) == 1
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "records verified" in line]
    assert (" 0 wrong" in said) == (change == "lose"), "what is missing was read, and not reported"
    assert ("missing" in said) == (change == "lose")


# interrupts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [(BareLoop, "get"), (tracemalloc, "start"), (BlockCache, "promote")], ids=str)
def test_an_interrupt_deletes_the_records(
    monkeypatch: pytest.MonkeyPatch, valkey_server: Process, where: tuple[Any, str]
) -> None:
    before = ask(valkey_server.port, "DBSIZE")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*where, interrupt)
    assert main([*REMOTE, *for_valkey(valkey_server), *TINY]) == 130
    assert ask(valkey_server.port, "DBSIZE") == before


# what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no store to measure: give --store KIND NAME=VALUE"),
        (["--store", "disk", "paths=x"], "--store must be valkey, objects, mooncake"),
        (["--store", "valkey", "x"], "arguments as name=value, got 'x'"),
        (["--store", "valkey", "password=env:NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
        (["--store", "valkey", "--store", "valkey"], "one store of each kind"),
        ([*NOWHERE, "timeout=0.5"], "--store valkey 127.0.0.1:1: the connection is refused"),
        (["--store", "valkey", "addresses=127.0.0.1"], 'addresses must be "host:port"'),
        (["--store", "valkey", "colour=red"], "unexpected keyword argument 'colour'"),
        (["--store", "objects", "store=bucket/folder"], "store must be a URL"),
        (["--store", "mooncake", "master=127.0.0.1:1"], "--store mooncake 127.0.0.1:1: the connection is refused"),
        ([*NOWHERE, "--sizes", "5000"], "multiples of 4096, got 5000"),
        ([*NOWHERE, "--in-flight", "1,2000"], "--in-flight must be at most 1024"),
        ([*NOWHERE, "--nbytes", str(1 << 40)], "are available; lower --nbytes, --in-flight"),
    ],
)
def test_what_cannot_be_done_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    for module in ("glide_sync", "obstore"):
        need_module(module)
    mooncake_program("mooncake_master")
    assert main([*REMOTE, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_client_that_is_missing_is_named_with_its_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "glide_sync", None)
    assert main([*REMOTE, *NOWHERE]) == 2
    assert "pip install 'kvoffload[valkey]'" in capsys.readouterr().err


def test_an_error_of_a_store_in_the_middle_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, valkey_server: Process
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("Connection refused")

    monkeypatch.setattr(tier_calls, "measure_calls", fail)
    assert main([*REMOTE, *for_valkey(valkey_server), *TINY]) == 2
    assert "the connection is refused" in capsys.readouterr().err
