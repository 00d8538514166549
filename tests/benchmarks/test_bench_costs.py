"""`bench sweep` and `bench interference`; the grid-stride kernel."""

from __future__ import annotations

import importlib.util
import json
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from benching import run_json, times_in

import kvoffload
from kvoffload.calibration.compute import MATMUL
from kvoffload.calibration.compute import SMALL as SMALL_PRODUCT
from kvoffload.commands import main
from kvoffload.kernels import KernelSpec, compile_kernel
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.files import require_writable, write_whole
from kvoffload.tuning import CopyMethod
from kvoffload_bench.copy_methods import GridStride
from kvoffload_bench.harness import Lab
from kvoffload_bench.interference import EngineBackground, StreamBackground
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
        assert {"choice, overlap", "choice, latency", "gather 4", "gather 2", "batch", "copy loop"} <= set(row["wrong"])
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


def test_the_simulated_device_shows_no_times_and_draws_none(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--sizes", "4096", "--counts", "8", "--planes", "folded", "--backend", "simulated")
    assert main(["bench", "sweep", *options]) == 0
    out = capsys.readouterr().out
    assert "0 wrong; times need a GPU" in out
    assert not re.search(r"GB/s|\bus\b", out)
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
    assert "gather 4 / grid-stride 12, scattered, n = 128, 8 KiB, load" in names
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


# bench interference ---------------------------------------------------------------------------------------------------


def test_bench_interference_verifies_what_runs_beside_every_computation(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, "bench", "interference", "--backend", "simulated")
    rows = fields["interference"]
    methods = {"choice, overlap", "strided", "batch", "contiguous copy", "grid-stride 12", "grid-stride 20", "alone"}
    methods |= {f"gather {programs}" for programs in (1, 2, 4, 8)}
    kinds = {(row["computation"], row["direction"]) for row in rows}
    assert kinds == {
        *(("matrix product", "store"), ("matrix product", "load")),
        *(("skinny product", "store"), ("skinny product", "load")),
        ("decode-like loop, stores only", "store"),
    }
    for kind in kinds:
        shown = {row["method"] for row in rows if (row["computation"], row["direction"]) == kind}
        assert shown - {"split 1", "split 2"} == methods
    assert all(row["wrong"] == 0 for row in rows)
    assert times_in(fields) == []
    assert fields["ratios"] == []


def test_bench_interference_counts_wrong_bytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(self: EngineBackground, after: int | None = None) -> None:
        pass

    one = [(MATMUL.name, SMALL_PRODUCT, (Direction.STORE,))]
    monkeypatch.setattr("kvoffload_bench.interference._computations", lambda _: one)
    monkeypatch.setattr(EngineBackground, "submit", nothing)
    monkeypatch.setattr(EngineBackground, "top_up", nothing)
    fields = run_json(capsys, "bench", "interference", "--backend", "simulated", code=1)
    wrong = {row["method"] for row in fields["interference"] if row["wrong"]}
    assert {"choice, overlap", "strided", "gather 8"} <= wrong
    assert not wrong & {"contiguous copy", "grid-stride 12", "grid-stride 20", "alone"}


def test_a_background_is_topped_up_and_finished(lab: Lab) -> None:
    with TransferSetup(lab, geometry_of(4, 256, 1.0), count=2) as setup:
        setup.prepare(Direction.LOAD)
        engine = EngineBackground(setup, Direction.LOAD, CopyMethod("gather", 2, 1.0))
        source, target = (int(end[0]) for end in setup.ends(Direction.LOAD))
        bare = StreamBackground(lab, lambda stream: lab.driver.copy(target, source, 256, stream), 256)
        for background in (engine, bare):
            while len(background.seconds) < 3:
                background.top_up()
            background.finish()
            assert background.nbytes == (setup.nbytes if background is engine else 256)
        assert engine.reason
        bare.close()


def test_what_a_failed_transfer_had_queued_is_waited_for_and_given_back(lab: Lab) -> None:
    ends = lab.device.allocate(512)
    lab.timer.seconds(lambda: lab.driver.fill(ends.address, 1, 256, lab.timer.stream))

    def queue(stream: int) -> None:
        lab.driver.copy(ends.address + 256, ends.address, 256, stream)
        raise RuntimeError("half of it")

    bare = StreamBackground(lab, queue, 256)
    with pytest.raises(RuntimeError, match="half of it"):
        bare.submit()
    bare.close()
    assert (ends.to_numpy() == 1).all()
    ends.close()


@pytest.mark.parametrize("kind", ["engine", "bare"])
def test_transfers_that_outlast_the_computation_are_not_counted(lab: Lab, kind: str) -> None:
    with TransferSetup(lab, geometry_of(4, 256, 1.0), count=2) as setup, lab.device.current():
        setup.prepare(Direction.LOAD)
        held = lab.driver.stream_create(0)
        source, target = (int(end[0]) for end in setup.ends(Direction.LOAD))
        with closing(StreamBackground(lab, lambda stream: lab.driver.copy(target, source, 256, stream), 256)) as bare:
            background = bare if kind == "bare" else EngineBackground(setup, Direction.LOAD, "strided")
            for _ in range(200):
                lab.driver.fill(target, 7, 256, held)
            background.submit(after=held)
            background.finish()
            assert background.seconds == []
        lab.driver.stream_destroy(held)


def test_bench_interference_goes_on_without_the_grid_stride_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise kvoffload.CapabilityError("it cannot be compiled")

    one = [(MATMUL.name, SMALL_PRODUCT, (Direction.STORE,))]
    monkeypatch.setattr("kvoffload_bench.interference._computations", lambda _: one)
    monkeypatch.setattr("kvoffload_bench.interference.GridStride", refuse)
    fields = run_json(capsys, "bench", "interference", "--backend", "simulated")
    assert fields["not_run"] == dict.fromkeys(("grid-stride 12", "grid-stride 20"), "it cannot be compiled")
    assert {"strided", "contiguous copy", "alone"} <= {row["method"] for row in fields["interference"]}


def test_a_background_waits_for_the_stream_that_it_follows(lab: Lab) -> None:
    with TransferSetup(lab, geometry_of(4, 256, 1.0), count=1) as setup, lab.device.current():
        setup.prepare(Direction.LOAD)
        setup.poison(Direction.LOAD)
        source, target = (int(end[0]) for end in setup.ends(Direction.LOAD))
        bare = StreamBackground(lab, lambda stream: lab.driver.copy(target, source, 256, stream), 256)
        other = lab.driver.stream_create(0)
        for _ in range(20):
            lab.driver.fill(target, 7, 256, other)
        bare.submit(after=other)
        bare.finish()
        assert setup.wrong(Direction.LOAD) == 3, "the last word is the copy's, in the one row that it moves"
        lab.driver.stream_destroy(other)
        bare.close()


@pytest.mark.gpu
def test_bench_interference_on_a_gpu(capsys: pytest.CaptureFixture[str], on_gpu: tuple[str, ...]) -> None:
    fields = run_json(capsys, "bench", "interference", "--repeats", "3", *on_gpu)
    assert fields["wrong_rows"] == 0
    alone = [row for row in fields["interference"] if row["method"] == "alone"]
    assert [row["slowdown"] for row in alone] == [1.0] * 5
    assert all(row["slowdown"] > 0 for row in fields["interference"])
    assert len(fields["ratios"]) == 5
