"""`bench disk --gpu` on the simulated device: every block and record is compared, and nothing is timed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benching import run_json, times_in

import kvoffload
from kvoffload import OffloadEngine
from kvoffload.commands import main
from kvoffload.terminal.console import Output
from kvoffload.tiers import DiskTier, Outcome
from kvoffload.tiers.threaded import Rows
from kvoffload_bench import disk_gpu
from kvoffload_bench.field_compute import Situation
from kvoffload_bench.harness import SMALL as SMALL_SIZE
from kvoffload_bench.harness import WARM_UP

BLOCKS, SERIES, MOVES, SITUATIONS = 8, 1, 3, 2
SMALL = (
    "bench", "disk", "--gpu", "--backend", "simulated", "--sizes", "16384", "--threads", "1", "--nbytes", "16384",
    "--io", "buffered", "--repeats", "1", "--records", "64",
)  # fmt: skip


def test_every_block_and_record_is_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = run_json(capsys, *SMALL, "--path", str(tmp_path))["transfers"]
    places = [(each["situation"], each["moves"]) for each in found["records"]]
    situations = ("idle", "large-products")
    assert places == [(situation, move) for situation in situations for move in ("store", "load", "both")]
    assert found["verified_blocks"] == SITUATIONS * MOVES * 2 * SERIES * BLOCKS
    assert found["verified_records"] >= SITUATIONS * MOVES * BLOCKS, "a batch for each time that the disk works"
    assert (found["wrong_blocks"], found["wrong_records"], found["missing_records"]) == (0, 0, 0)
    assert times_in(found) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("direction", ["store", "load"])
def test_wrong_transfers_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direction: str
) -> None:
    """A byte of the slots is wrong after stores, and before loads, of the pool."""
    real = OffloadEngine.submit

    def submit(engine: OffloadEngine, towards: Any, blocks: Any, slots: Any, **options: Any) -> Any:
        if towards == direction == "load":
            engine.slots[slots[0], 0] = ~engine.slots[slots[0], 0]
        job = real(engine, towards, blocks, slots, **options)
        job.wait()
        if towards == direction == "store":
            engine.slots[slots[0], 0] ^= 1
        return job

    monkeypatch.setattr(OffloadEngine, "submit", submit)
    monkeypatch.setattr(disk_gpu, "TRANSFERS", 1)
    assert main([*SMALL, "--path", str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()[-2:]
    assert f" {SITUATIONS * 2 * 2 * SERIES} wrong" in " ".join(said), "of stores, or loads, and of both"


def test_wrong_records_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = DiskTier.read_records

    def read(tier: DiskTier, keys: Sequence[bytes], rows: Sequence[Rows]) -> list[Outcome]:
        outcomes = real(tier, keys, rows)
        for row in rows if tier.record_bytes != 16384 else ():
            row[0][-1] ^= 1
        return outcomes

    monkeypatch.setattr(DiskTier, "read_records", read)
    found = run_json(capsys, *SMALL, "--path", str(tmp_path), code=1)["transfers"]
    assert found["wrong_records"] == found["verified_records"] > 0
    assert found["wrong_blocks"] == 0


def test_figures_are_medians_of_the_counted_rounds(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A simulated device that says it is none keeps times."""
    monkeypatch.setattr(device, "simulated", False)
    for name, value in (("FULL", SMALL_SIZE), ("_BLOCKS", BLOCKS), ("_SITUATIONS", (Situation.IDLE,))):
        monkeypatch.setattr(disk_gpu, name, value)
    found = disk_gpu.measure(device, tmp_path / "records.kv", repeats=3)
    assert found["verified_blocks"] == MOVES * 2 * (WARM_UP + 3) * BLOCKS
    assert disk_gpu.wrong(found) == 0
    for each in found["records"]:
        assert min(each["idle_gb_per_s"], each["busy_gb_per_s"], each["ratio"]) > 0
        assert each["disk_gb_per_s"] >= 0, "a slow disk may end no call during so few transfers"
        assert (each["product_ratio"], each["series_compute_ended"]) == (None, 0)


def test_figures_of_a_gpu_are_printed_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    times = {
        "idle_gb_per_s": 54.25, "busy_gb_per_s": 53.5, "ratio": np.float64(0.98), "product_ratio": 1.01,
        "disk_gb_per_s": 2.25,
    }  # fmt: skip
    record = {"situation": "large-products", "moves": "both"}
    fields = {
        "simulated": False, "model": "llama-3.1-8b", "blocks": 128, "verified_blocks": 4096, "verified_records": 999,
        "wrong_blocks": 0, "wrong_records": 0, "missing_records": 0,
        "records": [record | times, record | dict.fromkeys(times)],
    }  # fmt: skip
    disk_gpu.show(fields, Output(False))
    text = capsys.readouterr().out
    assert "54.2       53.5         0.98     1.01   2.2" in text
    assert "4,096 blocks of transfers and 999 records compared, 0 wrong" in text
    assert max(map(len, text.splitlines())) <= 80
