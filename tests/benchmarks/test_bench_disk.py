"""`bench disk`: every record is compared, the bare loop works on the tier's slots, and no file is left."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benching import refused, run_json

from kvoffload.commands import main
from kvoffload.tiers import DiskTier, Outcome
from kvoffload.tiers.files import OpenFile
from kvoffload.tiers.threaded import Rows
from kvoffload_bench.disk import BareLoop, measure_cell, open_tier
from kvoffload_bench.tier_calls import Verified, pages

SMALL = ("--sizes", "16384,1048576", "--threads", "1,3", "--nbytes", "2097152", "--repeats", "1", "--records", "1000")


def run(folder: Path, *more: str) -> tuple[str, ...]:
    return ("bench", "disk", "--path", str(folder), *SMALL, *more)


def test_all_is_measured_and_every_record_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fields = run_json(capsys, *run(tmp_path), "--io", "buffered")
    cells = [(each["record_bytes"], each["threads"], each["operation"]) for each in fields["cells"]]
    operations = ("write", "cold read", "warm read")
    assert cells == [(size, count, name) for size in (16384, 1 << 20) for count in (1, 3) for name in operations]
    assert all(each["ratio"] > 0 for each in fields["cells"])
    assert [each["records"] for each in fields["cells"]][::3] == [128, 128, 2, 3]
    rounds, readers, warm_and_cold = 2, 2, 2
    in_rounds = rounds * readers * warm_and_cold * (128 + 128 + 2 + 3)
    assert fields["verified_records"] == in_rounds + 64, "and 64 of the restart"
    assert (fields["wrong_records"], fields["missing_records"]) == (0, 0)
    assert fields["restart"]["records"] == 1000
    assert fields["restart"]["python_bytes_a_record"] > 16
    assert all(fields["calls"][f"{name}_us"] > 0 for name in ("put", "get"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["flip", "lose"])
def test_wrong_and_missing_records_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    real = DiskTier.read_records

    def read(tier: DiskTier, keys: Sequence[bytes], rows: Sequence[Rows]) -> list[Outcome]:
        outcomes = real(tier, keys, rows)
        for at, key in enumerate(keys):
            if int.from_bytes(key[:4], "little") == 5:
                if change == "lose":
                    outcomes[at] = Outcome.MISSING
                else:
                    rows[at][0][-1] ^= 1
        return outcomes

    monkeypatch.setattr(DiskTier, "read_records", read)
    assert main(run(tmp_path, "--io", "buffered", "--sizes", "16384", "--threads", "2")) == 1
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "records verified" in line]
    assert (" 0 wrong" in said) == (change == "lose"), "what is missing was read, and not reported"
    assert ("missing" in said) == (change == "lose")


def test_the_bare_loop_works_on_the_slots_of_the_tier(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    pool = pages(16, 8192)
    pool[:8] = [[number] for number in range(1, 9)]
    keys = [b"key %d" % number for number in range(8)]
    tier = open_tier(path, pool, 8, direct=False)
    assert tier.put(keys, range(8)).wait() == [Outcome.DONE] * 8
    with BareLoop(path, tier, threads=3, direct=False) as bare:
        bare.settle(keys)
        bare.get(keys, list(pool[8:]))
        assert (pool[8:] == pool[:8]).all()
        bare.put(keys, list(pool[:8]))
        assert tier.get(keys, range(8, 16)).wait() == [Outcome.DONE] * 8
        bare.put(keys, list(pool[1:9]))
        assert tier.get(keys, range(8, 16)).wait() == [Outcome.MISSING] * 8
    tier.close()


def test_without_direct_io_that_is_said_and_the_rest_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(OpenFile, "try_direct", lambda *_: None)
    assert main(run(tmp_path)) == 0
    text = capsys.readouterr().out
    assert "direct I/O does not work here" in text
    assert "direct I/O, " not in text
    assert "buffered I/O, 2.00 MiB a round" in text
    assert measure_cell(tmp_path / "a.kv", slot_bytes=8192, threads=1, direct=True, nbytes=8192, repeats=1,
                        verified=Verified()) == []  # fmt: skip


def test_all_figures_can_be_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "disk.json"
    fields = run_json(capsys, *run(tmp_path, "--io", "buffered", "--save", str(saved)))
    assert f'"verified_records": {fields["verified_records"]}' in saved.read_text()
    assert list(tmp_path.iterdir()) == [saved]


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(5, "Input/output error")], ids=["Ctrl-C", "EIO"])
def test_no_file_is_left_when_it_ends_early(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stop: BaseException
) -> None:
    calls: list[Any] = []

    def read(*_: object) -> float:
        calls.extend(tmp_path.rglob("*.kv"))
        raise stop

    monkeypatch.setattr(BareLoop, "get", read)
    assert main(run(tmp_path)) == (130 if isinstance(stop, KeyboardInterrupt) else 2)
    assert len(calls) == 1
    assert list(tmp_path.iterdir()) == []
    error = capsys.readouterr().err
    assert ("interrupted" in error) or ("Input/output error" in error)


def test_what_cannot_be_done_is_refused_before_a_file_is_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "are free; lower --nbytes or --records" in refused(capsys, *run(tmp_path, "--records", "4000000000"))
    assert "multiples of 4096, got 5000" in refused(capsys, *run(tmp_path, "--sizes", "5000"))
    assert "--threads must be at most 256" in refused(capsys, *run(tmp_path, "--threads", "1,300"))
    assert "there is no such folder" in refused(capsys, *run(tmp_path / "none"))
    monkeypatch.setattr("kvoffload.internal.hostinfo.available_bytes", lambda: 1 << 20)
    assert "1.00 MiB are available; lower --nbytes" in refused(capsys, *run(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 9, 9, 9, 0, 0, 0, 0, 255)))
    assert "36.0 KiB are free" in refused(capsys, *run(tmp_path))
    assert list(tmp_path.iterdir()) == []
