"""`bench sweep`; the grid-stride kernel."""

from __future__ import annotations

import importlib.util
import json
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from benching import run_json, times_in

from kvoffload.commands import main
from kvoffload.kernels import KernelSpec, compile_kernel
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import require_writable, write_whole
from kvoffload_bench.copy_methods import GridStride
from kvoffload_bench.harness import Lab
from kvoffload_bench.setup import Placement, TransferSetup, geometry_of

# bench sweep ----------------------------------------------------------------------------------------------------------


def test_bench_sweep_verifies_every_size_count_and_placement(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--sizes", "4096,18432", "--counts", "8,20", "--backend", "simulated")
    fields = run_json(capsys, "bench", "sweep", *options)
    rows = fields["transfers"]
    assert {(row["placement"], row["direction"], row["row_bytes"], row["copies"]) for row in rows} == {
        (placement, direction, nbytes, copies)
        for placement in ("folded", "scattered")
        for direction in ("store", "load")
        for nbytes in (64, 288)  # a 64th, for the simulated device
        for copies in (8, 24)  # whole blocks of 8 planes
    }
    for row in rows:
        assert {"choice, overlap", "choice, latency", "pack", "batch", "copy loop"} <= set(row["wrong"])
        assert set(row["wrong"].values()) == {0}
    assert fields["wrong_rows"] == 0
    assert times_in(fields) == []


def test_results_are_saved_beside_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--sizes", "4096", "--counts", "8", "--planes", "folded", "--backend", "simulated")
    saved = tmp_path / "sweep.json"
    assert main(["bench", "sweep", *options, "--save", str(saved)]) == 0
    assert "0 wrong; times need a GPU" in capsys.readouterr().out
    fields = json.loads(saved.read_text())
    assert (fields["benchmark"], len(fields["transfers"])) == ("sweep", 2)
    assert main(["bench", "sweep", *options, "--save", str(tmp_path)]) == 2
    assert f"--save {tmp_path} cannot be written: Is a directory" in capsys.readouterr().err


def test_what_was_saved_before_is_kept_until_there_is_something_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "sweep.json"
    saved.write_text("older")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvoffload_bench.report.describe_device", interrupted)
    assert main(["bench", "sweep", "--backend", "simulated", "--save", str(saved)]) == 130
    assert saved.read_text() == "older"
    write_whole("--save", saved, b"newer")
    assert saved.read_text() == "newer"
    assert list(tmp_path.iterdir()) == [saved]


def test_a_file_is_written_through_a_link_and_keeps_its_device(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    for path, option in ((link, "--save"), (Path("/dev/null"), "--output")):
        require_writable(option, path)
        write_whole(option, path, b"text")
    assert (target.read_bytes(), link.is_symlink()) == (b"text", True)
    assert Path("/dev/null").is_char_device()


def test_bench_sweep_refuses_sizes_that_no_block_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sweep", "--sizes", "4096,100", "--backend", "simulated"]) == 2
    assert "--sizes: 100 is no multiple of 32" in capsys.readouterr().err


def test_the_simulated_device_draws_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--sizes", "4096", "--counts", "8", "--planes", "folded", "--backend", "simulated")
    assert main(["bench", "sweep", *options, "--plot", "figures"]) == 2
    refused = "the simulated device has none" if importlib.util.find_spec("matplotlib") else "needs? matplotlib"
    assert re.search(refused, capsys.readouterr().err)


@pytest.mark.gpu
def test_bench_sweep_on_a_gpu(capsys: pytest.CaptureFixture[str], on_gpu: tuple[str, ...]) -> None:
    options = ("--sizes", "8192,18432", "--counts", "128,4096", "--repeats", "3", *on_gpu)
    fields = run_json(capsys, "bench", "sweep", *options)
    assert fields["wrong_rows"] == 0
    assert len(fields["transfers"]) == 2 * 2 * 2 * 2
    for row in fields["transfers"]:
        assert all(rate > 0 for rate in row["gb_per_s"].values())
    names = {each["ratio"] for each in fields["ratios"]}
    assert "pack / grid-stride 12, scattered, n = 128, 8 KiB, load" in names
    assert "batch / flat batch, scattered, n = 4096, 8 KiB, load" in names


# the grid-stride kernel -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_bytes", [64, 8 * 9, 4096 + 128])  # a power of two, and two that are none
@pytest.mark.parametrize("programs", [1, 12])
def test_the_grid_stride_kernel_copies_every_row(lab: Lab, row_bytes: int, programs: int) -> None:
    geometry = geometry_of(3, 32, 1.0)
    with (
        TransferSetup(lab, geometry, placement=Placement.SCATTERED, count=5) as setup,
        closing(GridStride(lab, row_bytes, 7)) as grid,
        lab.device.allocate(8 * row_bytes) as buffer,
    ):
        random = np.random.default_rng(lab.seed)
        content = random.integers(0, 256, (8, row_bytes), dtype=np.uint8)
        buffer.copy_from(content)
        rows = random.permutation(8)
        sources, targets = (buffer.address + half[:3] * row_bytes for half in (rows[:4], rows[4:]))
        setup.take(1)
        setup._ends[Direction.STORE] = sources.astype(np.uint64), targets.astype(np.uint64)
        grid.timed(setup, Direction.STORE, programs)()
        content[rows[4:7]] = content[rows[:3]]
        assert (buffer.to_numpy().reshape(8, row_bytes) == content).all()


def test_the_grid_stride_kernel_moves_words_of_eight_bytes() -> None:
    parameters = (("sources", "i64"), ("targets", "i64"), ("sizes", "i64"), ("count", "i32"))
    spec = KernelSpec("kvoffload_bench.grid_stride", "grid_stride", parameters, (("WORDS", 512),), 4)
    compiled = compile_kernel(spec, (9, 0))
    accesses = re.findall(r"(?:ld|st)\.global\.(?:v\d\.)?b\d+", compiled.ptx)
    assert accesses
    assert set(accesses) <= {"ld.global.b64", "st.global.b64"}
    assert compiled.threads == 128
