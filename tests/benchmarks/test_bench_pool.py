"""`bench pool`: what it measures and prints; the table in shared memory; that wrong bytes would be counted."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from benching import times_in
from printed import GPU, SIMULATED, check

from kvoffload.commands import main
from kvoffload.pool import PoolOwner
from kvoffload.terminal.console import CommandError, Output
from kvoffload_bench import pool
from kvoffload_bench.pool_processes import LOAD, OWN, POOL, STORE, TABLE, Asker, Mover, Moves, Owner, Process, keys_of
from kvoffload_bench.pool_table import SharedTable

MOVES = Moves(planes=2, block_bytes=2048, blocks=4, transfers=2, calls=1)


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run without a GPU."""
    saved = tmp_path_factory.mktemp("bench") / "pool.json"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["bench", "pool", "--quick", "--json", "--save", str(saved), *SIMULATED]) == 0
    found: dict[str, Any] = json.loads(printed.getvalue())
    assert json.loads(saved.read_text()) == found
    return found


@pytest.mark.timeout(300)
def test_all_is_measured_and_no_time_is_of_the_simulated_device(fields: dict[str, Any]) -> None:
    asked = [(each["how"], each["keys"]) for each in fields["lookups"]]
    assert asked == [(how, count) for count in (1, 32, 512) for how in (OWN, POOL, TABLE)]
    assert all(0 < each["median_us"] <= each["p99_us"] and each["lookups"] == 200 for each in fields["lookups"])
    members = fields["members"]
    assert (members["members"], members["keys"]) == (8, 32)
    assert 0 < members["median_us"] <= members["p99_us"]
    assert members["lookups"] >= 8 * 30
    assert all(each > 0 for each in fields["table_upkeep"].values())
    assert [(each["blocks"], each["direction"]) for each in fields["calls"]] == [
        (blocks, direction) for blocks in (8, 32) for direction in (STORE, LOAD)
    ]
    assert [each["direction"] for each in fields["transfers"]] == [STORE, LOAD]
    assert times_in([fields["calls"], fields["transfers"]]) == []
    assert fields["wrong"] == 0


def test_without_a_gpu_it_prints_look_ups_and_says_what_is_missing(
    fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pool.show(fields, Output(as_json=False))
    text = check(capsys.readouterr().out, "bench pool: a look-up of 32 keys through the owner takes ")
    assert "transfers were verified on the simulated device; their times need a GPU" in text
    assert "GB/s" not in text
    pool.show(fields | {"wrong": 3}, Output(as_json=False))
    assert "3 answers or blocks WRONG" in " ".join(capsys.readouterr().out.partition("\n\n")[0].split())


def test_with_figures_of_a_gpu(fields: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    random, measured = Random(0), json.loads(json.dumps(fields)) | GPU
    for call in measured["calls"]:
        call |= {
            f"{what}_{name}_us": random.uniform(30, 9000)
            for what in ("own", "pool", "more")
            for name in ("call", "end")
        }
    both = measured["transfers"]
    measured["transfers"] = [each | {"devices": devices} for devices in ([0, 0], [0, 1]) for each in both]
    for each in measured["transfers"]:
        each |= {f"{how}_alone_gb_per_s": [51.23, 51.5] for how in (OWN, POOL)}
        each |= {f"{how}_together_gb_per_s": 101.6 for how in (OWN, POOL)}
    pool.show(measured, Output(as_json=False))
    text = check(capsys.readouterr().out, "bench pool: ")
    assert text.count("GPU 0 and 1") == text.count("GPU 0  ") == 4
    assert "one pool" in text
    assert "101.6" in text


# the processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[str]:
    with PoolOwner(tmp_path / "pool", nbytes=1 << 20) as owner:
        yield owner.path


def test_blocks_that_are_wrong_or_not_there_are_counted(owned: str) -> None:
    with Mover(owned, 1, None, MOVES) as first, Mover(owned, 2, None, MOVES) as second:
        _, _, moved = first.series(POOL, STORE, 1, 0.0)
        assert moved == MOVES.slots
        assert second.hits(1) == MOVES.slots
        second.poison()
        assert second.wrong(1, MOVES.blocks) == MOVES.blocks
        second.series(POOL, LOAD, 1, 0.0)
        assert (second.wrong(1, MOVES.blocks), second.wrong(2, MOVES.blocks)) == (0, MOVES.blocks)
        first.remove(POOL)
        assert second.hits(1) == 0
        medians, wrong = first.calls(2)
        assert wrong == 0
        assert {(how, direction) for how in medians for direction in medians[how]} == {
            (how, direction) for how in (OWN, POOL) for direction in (STORE, LOAD)
        }


def test_answers_that_are_wrong_are_counted(tmp_path: Path) -> None:
    with Owner(str(tmp_path / "pool"), 2 << 20, 256) as owner:
        table = owner.table()
        with Asker(str(tmp_path / "pool"), table, 256, True) as asker:
            for how in (OWN, POOL, TABLE):
                found, wrong = asker.look_up(how, 40, 30)
                assert (len(found), wrong) == (30, 0)
            owner._table.remove(keys_of(0, 0, 256))
            assert asker.look_up(TABLE, 40, 30)[1] == 50, "all of them"
        stored, evicted = owner.upkeep(3)
        assert min(stored, evicted) > 0


def raising(text: str) -> Any:
    raise ValueError(text)


def test_a_process_that_fails_is_an_error_with_what_it_said() -> None:
    with Process(raising, "no such thing") as process, pytest.raises(CommandError, match="ValueError: no such thing"):
        process.result()


# the table ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 32, 33, 200])
def test_a_table_has_the_keys_that_were_put_and_not_removed(count: int, seed: int) -> None:
    random, table, keys = Random(seed), SharedTable(1024), keys_of(seed % 1000, 0, 250)
    reader = SharedTable(1024, os.open(f"/proc/self/fd/{table.descriptor}", os.O_RDONLY))
    there = set[bytes]()
    for _ in range(200):
        some = random.sample(keys, 20)
        gone = [key for key in some if key in there]
        new = [key for key in some if key not in there]
        table.remove(gone)
        table.put(new, range(len(new)))
        there = there - {*gone} | {*new}
        asked = [*random.sample(keys, count), keys[0]][:count]
        right = next((place for place, key in enumerate(asked) if key not in there), count)
        assert reader.lookup(asked) == right
    with pytest.raises(TypeError, match="read-only"):
        reader.put(keys_of(7, 0, 1), [0])
    reader.close()
    table.close()
