"""`kvoffload tune` and what it measures with, on the simulated device; and on a GPU what it must achieve there."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import kvoffload
from kvoffload.calibration import MINIATURE, Tuning, tune
from kvoffload.commands import main
from kvoffload.commands.tune import decisions
from kvoffload.engine.engine import OffloadEngine
from kvoffload.errors import KVOffloadWarning
from kvoffload.internal import cachefiles
from kvoffload.planning.transfer_plan import Direction
from kvoffload.testing import SimulatedDriver, check_clean_close
from kvoffload.tuning import (
    COPIERS,
    ProfileKey,
    Situation,
    default_profile,
    key_of,
    load_profile,
    parse,
    profile_path,
    render,
)

H200 = ProfileKey("NVIDIA H200", "13.0", 5, 16, "13.3")
TINY = MINIATURE._replace(
    copy_bytes=(64,), copies=(4,), loop_bytes=(64,), loop_copies=(4,), row_bytes=(64,), heights=(2, 4),
    operations=(2,), wide_bytes=(),
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv(cachefiles.FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


class Measured(NamedTuple):
    """One run of `kvoffload tune --output PATH --json`: what it returned, printed and measured, and its progress."""

    code: int
    printed: str
    path: Path
    tuning: Tuning
    steps: list[tuple[int, int]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """On the simulated device; interpreting the kernels takes seconds, so tests share it."""
    path, printed = tmp_path_factory.mktemp("tuned") / "profile.json", io.StringIO()
    folder = path.parent / "cache"
    found: list[Tuning] = []
    steps: list[tuple[int, int]] = []

    def noting(device: kvoffload.Device, *, progress: Callable[[int, int], None]) -> Tuning:
        def note(done: int, total: int) -> None:
            steps.append((done, total))
            progress(done, total)

        found.append(tune(device, progress=note))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setenv(cachefiles.FOLDER_VARIABLE, str(folder))
        patch.setattr("kvoffload.calibration.measure.MINIATURE", TINY)
        patch.setattr("kvoffload.commands.tune.tune", noting)
        code = main(["tune", "--backend", "simulated", "--output", str(path), "--json"])
    assert not folder.exists()
    return Measured(code, printed.getvalue(), path, found[0], steps)


# the command ----------------------------------------------------------------------------------------------------------


def test_on_the_simulated_device_no_profile_is_kept_and_no_time_printed(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch, measured: Measured
) -> None:
    monkeypatch.setattr("kvoffload.commands.tune.tune", lambda *_, **__: measured.tuning)
    assert main(["tune", "--backend", "simulated"]) == 0
    out = capsys.readouterr().out
    assert "simulated device" in out
    assert "no profile written" in out
    assert not any(unit in out for unit in ("GB/s", " s\n", " us", "%"))
    assert not folder.exists()


def test_a_simulated_profile_can_be_written_and_is_never_used_for_a_gpu(
    measured: Measured, device: kvoffload.Device
) -> None:
    path = measured.path
    assert measured.code == 0
    fields = json.loads(measured.printed)
    assert fields["written"] == str(path)
    assert fields["simulated"] is True
    assert fields.keys() == {
        "simulated", "device", "driver", "bindings", "link", "transfers", "missing", "written",
    }  # fmt: skip
    profile = parse(path.read_bytes())
    assert profile.simulated
    assert "SIMULATED" in profile.source
    for costs in profile.costs.values():
        assert costs.strided is not None
        assert set(costs.flat) == {"batch", "loop"}
    assert set(profile.errors) == {"strided", "batch"}
    assert set(profile.codec) == set(Situation)
    assert {len(found) for found in profile.codec.values()} == {len(Direction)}
    kept = profile_path(key_of(device))
    kept.parent.mkdir(parents=True)
    kept.write_bytes(path.read_bytes())
    with pytest.warns(KVOffloadWarning, match="kvoffload tune"):
        assert load_profile(key_of(device)) is default_profile(None)


def test_an_engine_takes_the_profile_that_was_written(device: kvoffload.Device, measured: Measured) -> None:
    profile = parse(render(measured.tuning.profile))
    assert profile.codec == {
        situation: {direction: pytest.approx(each, rel=1e-3) for direction, each in found.items()}
        for situation, found in measured.tuning.profile.codec.items()
    }
    planes = device.allocate_planes(4, block_bytes=64, num_blocks=8)
    layout = kvoffload.KVLayout([planes])
    for prefer in ("overlap", "latency"):
        with OffloadEngine(layout, device=device, num_slots=8, profile=profile, prefer=prefer) as engine:
            assert engine.profile is profile
            assert " us expected" in engine.load([1], [2], after=kvoffload.NO_WAIT).reason


def test_an_output_that_cannot_be_written_is_said_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.commands.tune.tune", lambda *_, **__: pytest.fail("measured"))
    assert main(["tune", "--backend", "simulated", "--output", str(tmp_path / "no" / "where")]) == 2
    assert "--output" in capsys.readouterr().err


def test_an_output_keeps_what_it_holds_until_there_is_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    path.write_text("older")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvoffload.commands.tune.tune", interrupted)
    assert main(["tune", "--backend", "simulated", "--output", str(path)]) == 130
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_a_cache_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(cachefiles.FOLDER_VARIABLE, str(tmp_path / "file" / "cache"))

    @contextmanager
    def a_gpu(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(simulated=False)

    def begun(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvoffload.commands.tune.tune", begun)
    assert main(["tune", "--backend", "simulated"]) == 130
    monkeypatch.setattr("kvoffload.commands.tune.open_backend", a_gpu)
    assert main(["tune"]) == 2
    message = capsys.readouterr().err
    assert cachefiles.FOLDER_VARIABLE in message
    assert "--output" in message
    assert main(["tune", "--output", str(tmp_path / "profile.json")]) == 130
    assert not (tmp_path / "profile.json").exists()


def test_what_cannot_run_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    old = kvoffload.open_device(backend=SimulatedDriver(seed=seed, driver_version=(12, 4), bindings_version=(13, 3)))
    monkeypatch.setattr("kvoffload.kernels.loader.triton_version", lambda: None)
    monkeypatch.setitem(sys.modules, "triton", None)
    tuning = tune(old, scale=TINY)
    assert set(tuning.missing) == {"pack", "batch", "codec", "concurrent compute"}
    assert "Triton" in tuning.missing["concurrent compute"]
    assert tuning.profile.codec == {}
    assert set(tuning.profile.situations) == {Situation.BOTH_DIRECTIONS}
    for costs in tuning.profile.costs.values():
        assert set(costs.flat) == {"loop"}
    check_clean_close(old)


def test_progress_ends_where_it_said(measured: Measured) -> None:
    steps = measured.steps
    assert [done for done, _ in steps] == list(range(1, len(steps) + 1))
    assert {total for _, total in steps} == {len(steps)}


def show(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["tune", "--show", "--backend", "simulated", "--json", *options]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert isinstance(fields, dict)
    return fields


def test_show_prints_every_decision_of_the_profile_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    fields = show(capsys)
    assert fields["profile"].startswith("default for an unknown GPU")
    found = fields["decisions"]
    sizes = [each << 10 for each in (2, 4, 8, 16, 32, 64, 128, 256)]
    assert Counter((each["direction"], each["placement"], each["block_bytes"]) for each in found) == {
        (direction, placement, nbytes): 4
        for direction in ("store", "load")
        for placement in ("folded", "scattered")
        for nbytes in sizes
    }
    assert all(each["runner_up"] != each["method"] and each["gb_per_s"] > 0 and each["reason"] for each in found)


def test_show_follows_its_options_and_the_profile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.commands.tune.profile_for", lambda _: default_profile(H200))
    assert "pack" in {each["method"] for each in decisions(default_profile(H200), frozenset(COPIERS), "latency")}
    fields = show(capsys, "--prefer", "latency")
    assert fields["profile"] == default_profile(H200).source
    assert fields["not_offered"] == ["pack"]
    assert fields["not_available"] == {}
    assert "pack" not in {method for each in fields["decisions"] for method in (each["method"], each["runner_up"])}
    capsys.readouterr()
    assert main(["tune", "--show", "--backend", "simulated"]) == 0
    out = capsys.readouterr().out
    assert f"figures expected by this profile: {default_profile(H200).source}" in " ".join(out.split())
    assert "strided " in out
    assert "pack is a kernel: the simulated device runs it" in " ".join(out.split())


def test_show_leaves_out_a_kernel_that_cannot_be_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise kvoffload.CapabilityError("no room for it")

    monkeypatch.setattr("kvoffload.terminal.machine.load_kernel", refuse)
    assert show(capsys)["not_available"] == {"pack": "no room for it"}


def test_show_has_nothing_to_write(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["tune", "--show", "--backend", "simulated", "--output", str(tmp_path / "x")]) == 2
    assert "--output" in capsys.readouterr().err


# on a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_profile_is_measured_and_kept(
    gpu_device: kvoffload.Device, on_gpu: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """`kvoffload tune` prints how long that took and how far the profile is from the measured times."""
    assert main(["tune", *on_gpu, "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    profile = load_profile(key_of(gpu_device))
    assert profile.source.startswith("measured on")
    assert set(fields["errors"]) == {"strided", "batch"}
    assert all(error["transfers"] > 0 for error in fields["errors"].values())
    assert {"strided", "batch", "loop"} <= set(fields["host_us"])
