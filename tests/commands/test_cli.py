"""The command line: every command with and without JSON, what goes to which stream, exit codes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benching import run_json
from seeds import rest_long

import kvoffload
from kvoffload.commands import demo as demo_module
from kvoffload.commands import main
from kvoffload.replay.verified import VerifiedCache
from kvoffload.terminal.console import SIMULATED_NOTE, Output
from kvoffload.testing import SimulatedDriver

COMMANDS = [("doctor",), ("demo", "--turns", "2")]
GPU_FIGURES = re.compile(r"GB/s|gb_per_s|GPU clock", re.IGNORECASE)


def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with no NVIDIA driver, whatever this one has."""

    def no_driver() -> Any:
        raise kvoffload.CapabilityError("no driver library here; install one")

    monkeypatch.setattr("kvoffload.driver.cuda.load", no_driver)


# every command --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each[0])
def test_without_a_gpu_every_command_runs_simulated_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    without_cuda(monkeypatch)
    assert main(command) == (1 if command == ("doctor",) else 0), "no GPU: a finding that is a failure"
    captured = capsys.readouterr()
    note = f"kvoffload: no GPU to use (`kvoffload doctor` shows why): {SIMULATED_NOTE}\n"
    assert captured.err == ("" if command == ("doctor",) else note)
    assert re.search("simulated device|times need a GPU", captured.out)
    assert not GPU_FIGURES.search(captured.out)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each[0])
def test_json_is_one_object_that_says_simulated(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    fields = run_json(capsys, *command, "--backend", "simulated")
    assert fields["simulated"] is True
    assert not any(name.endswith("gb_per_s") for name in fields)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each[0])
def test_backend_cuda_without_a_gpu_is_exit_code_2_with_a_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    without_cuda(monkeypatch)
    assert main([*command, "--backend", "cuda"]) == 2
    captured = capsys.readouterr()
    assert "no driver library here; install one" in captured.out + captured.err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each[0])
def test_no_escape_codes_and_no_progress_when_not_a_terminal(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert main([*command, "--backend", "simulated"]) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert captured.err.count("\n") == (command != ("doctor",))  # the one note about the simulated device


def test_progress_goes_to_stderr_when_that_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with Output(as_json=True).progress("requests") as progress:
        progress(3, 4)
    assert "requests" in terminal.getvalue()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each[0])
def test_without_rich_tables_are_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr("kvoffload.terminal.console.find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main([*command, "--backend", "simulated"]) == 0
    captured = capsys.readouterr()
    assert captured.out
    assert len(captured.err.splitlines()) <= 2
    assert all(len(line) <= 80 for line in captured.err.splitlines())


def test_ctrl_c_is_exit_code_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(VerifiedCache, "serve", interrupted)
    assert main(["demo", "--backend", "simulated", "--json"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_python_dash_m_runs_the_same() -> None:
    command = [sys.executable, "-m", "kvoffload", "demo", "--turns", "2", "--backend", "simulated", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["corrupt_blocks"] == 0


def test_importing_the_command_line_imports_nothing_optional() -> None:
    optional = ("rich", "triton", "jax", "cupy", "matplotlib", "cuda.bindings")
    program = (
        "import sys, kvoffload.commands as cli; cli.build_parser();"
        f"print([name for name in {optional} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


# benchmarks, a distribution of their own ------------------------------------------------------------------------------


def test_benchmarks_that_are_not_installed_are_said_to_be_and_how_to_install_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    for words in (["bench"], ["bench", "field", "--quick"], ["bench", "--help"]):
        assert main(words) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("kvoffload: error: the benchmarks are not installed: ")
        assert captured.err.endswith("pip install ./benchmarks\n")


@pytest.mark.parametrize("words", [["doctor", "--backend", "simulated"], ["--help"], ["demo", "--help"]], ids=" ".join)
def test_no_other_command_looks_for_entry_points(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def looked_for(**_: object) -> None:
        raise AssertionError("entry points were looked for")

    monkeypatch.setattr("importlib.metadata.entry_points", looked_for)
    assert main(words) == 0
    assert capsys.readouterr().out


# doctor ---------------------------------------------------------------------------------------------------------------


def test_doctor_without_a_gpu_says_what_is_missing_and_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_cuda(monkeypatch)
    fields = run_json(capsys, "doctor", code=1)
    assert fields["gpus"] == []
    assert "no driver library here" in fields["problem"]
    assert any("nvidia-smi" in line for line in fields["advice"])
    assert any("kvoffload demo" in line for line in fields["advice"])
    assert fields["copiers"] == dict.fromkeys(("strided", "pack", "batch", "loop"))
    assert fields["memory"]["usable_cpus"] >= 1
    assert fields["packages"]["numpy"] == np.__version__


@pytest.mark.parametrize(("backend", "code"), [("auto", 1), ("cuda", 2)])
def test_doctor_says_why_a_gpu_that_is_there_cannot_be_opened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, backend: str, code: int
) -> None:
    values: dict[str, Any] = {"cuDeviceGetCount": 1, "cuDeviceGet": 0, "cuDeviceGetName": b"NVIDIA Taken\0"}

    def refuse(*_: Any, **__: Any) -> None:
        raise kvoffload.DriverError("cuDevicePrimaryCtxRetain", "CUDA_ERROR_DEVICE_UNAVAILABLE", 46)

    monkeypatch.setattr("kvoffload.driver.cuda.load", lambda: SimpleNamespace(call=lambda name, *_: values[name]))
    monkeypatch.setattr("kvoffload.terminal.console.open_device", refuse)
    fields = run_json(capsys, "doctor", "--backend", backend, code=code)
    assert (fields["gpus"], fields["simulated"]) == (["NVIDIA Taken"], None)
    assert any(line.startswith("device: ") for line in fields["advice"])
    assert main(["doctor", "--backend", backend]) == code
    out = capsys.readouterr().out
    assert out.startswith("doctor: no device to use (")
    assert "cannot be opened: cuDevicePrimaryCtxRetain" in out


LOADER = (  # what cuda.load and the bindings say on a machine without a driver
    'cuInit cannot be called: "cuda" is an NVIDIA driver library and can only be found via system search. Ensure the '
    "NVIDIA display driver is installed."
)


class NoLibrary:
    """A `Driver` on a machine without one."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def init(self) -> None:
        raise kvoffload.CapabilityError(LOADER)


def test_backend_cuda_without_a_gpu_says_what_this_command_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.driver.cuda.Driver", NoLibrary)
    assert main(["demo", "--backend", "cuda"]) == 2
    said = capsys.readouterr().err
    assert "`kvoffload doctor`" in said
    assert "--backend simulated" in said


def test_doctor_without_a_gpu_says_the_remedy_once_and_no_versions_of_the_simulator(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.driver.cuda.Driver", NoLibrary)
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    text = " ".join(captured.out.split())
    found, _, packages = text.partition("packages")
    assert "can only be found via system search -> install the NVIDIA driver" in found
    assert found.count("install") == found.count("nvidia-smi") == text.count("->") == 1
    assert "open_device" not in text
    assert "CUDA 13" not in text
    assert found.count("cuda-bindings") == 0
    assert packages.count("cuda-bindings") == 1
    assert "raw addresses" not in text
    assert "profile" not in found
    fields = run_json(capsys, "doctor", code=1)
    unknown = ("driver", "bindings", "compute_capability", "multiprocessors", "copy_engines")
    assert [fields[name] for name in unknown] == [None] * len(unknown)


@pytest.mark.parametrize(("installed", "remedies"), [(None, 2), ("12.4.0", 1)])
def test_doctor_without_usable_bindings_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, installed: str | None, remedies: int
) -> None:
    said = "cannot be imported (No module named 'cuda')" if installed is None else "12.4 is too old"

    def load() -> Any:
        raise kvoffload.CapabilityError(f"cuda-bindings {said}; install it: pip install 'cuda-bindings>=12.9'")

    def version(package: str) -> str:
        if package == "cuda-bindings" and installed is None:
            raise metadata.PackageNotFoundError(package)
        return installed or "1.0"

    monkeypatch.setattr("kvoffload.driver.cuda.load", load)
    monkeypatch.setattr("importlib.metadata.version", version)
    assert main(["doctor"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert f"GPUs: none: cuda-bindings {said} -> " in text
    assert text.count("pip install 'cuda-bindings>=12.9'") == 1
    assert text.count("->") == remedies
    assert "NVIDIA driver" not in text


def test_doctor_ends_with_1_if_a_finding_is_a_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["doctor", "--backend", "simulated"]
    assert main(asked) == 0
    assert main([*asked, "--path", str(tmp_path / "missing")]) == 1
    assert "(1 fail, " in capsys.readouterr().out


def test_doctor_shows_why_a_copier_cannot_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = kvoffload.open_device(backend=SimulatedDriver(driver_version=(12, 4), bindings_version=(13, 3)))
    monkeypatch.setattr("kvoffload.terminal.console.open_device", lambda *_, **__: old)
    fields = run_json(capsys, "doctor", "--backend", "simulated")
    assert fields["copiers"]["strided"] is None
    assert "need a CUDA driver >= 13.0" in fields["copiers"]["batch"]
    assert "cuMemcpyBatchAsync" in fields["missing"]


# demo -----------------------------------------------------------------------------------------------------------------


def test_demo_stores_evicts_loads_and_verifies(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, "demo", "--backend", "simulated", "--seed", "5")
    assert fields["turns"] == 64
    assert fields["distinct_blocks"] > fields["slots"]
    assert fields["blocks_hit"] > 0
    assert fields["blocks_evicted"] > 0
    assert fields["blocks_stored"] >= fields["distinct_blocks"]
    assert fields["verified_blocks"] == fields["blocks_hit"]
    assert fields["corrupt_blocks"] == 0


@pytest.mark.parametrize("slots", rest_long(["1", "160", "2", "16", "1000"], 2))
def test_demo_prints_lines_that_add_up(capsys: pytest.CaptureFixture[str], slots: str) -> None:
    """An indented line is a share of the one above it: of the prompts' blocks, of the stored ones."""
    assert main(["demo", "--backend", "simulated", "--slots", slots]) == 0
    table = capsys.readouterr().out.partition("\nturns")[2].partition("\n\n")[0].splitlines()
    lines = re.findall(r"(?m)^( *\S.*?)  +([\d,]+)", "\n".join(table))
    counts = {name: int(count.replace(",", "")) for name, count in lines}
    shares: dict[str, list[int]] = {}
    for name, count in counts.items():
        if name.startswith(" "):
            shares[list(shares)[-1]].append(count)
        else:
            shares[name] = []
    for whole in ("blocks of their prompts", "stored blocks"):
        assert len(shares[whole]) > 1
        assert sum(shares[whole]) == counts[whole], (whole, counts)
    assert any("not tried" in name for name in counts) == (int(slots) < 60)
    assert counts["loaded blocks verified, every byte"] == counts["  found and loaded"]


def test_demo_that_loads_nothing_does_not_say_that_it_was_verified(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--backend", "simulated", "--turns", "1", "--conversations", "1"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "demo: 0 of 240 prompt tokens not recomputed (hit rate 0.0%); nothing was loaded"


def test_demo_is_seeded(capsys: pytest.CaptureFixture[str]) -> None:
    one, same, other = (
        run_json(capsys, "demo", "--backend", "simulated", "--turns", "3", "--seed", seed) for seed in ("1", "1", "2")
    )
    for fields in (one, same, other):
        del fields["seconds"]
    assert one == same
    assert one != other


def test_demo_turns_come_back_with_their_history() -> None:
    turns = list(demo_module.chat(conversations=3, turns=4, seed=9))
    assert len(turns) == 12
    assert len({keys[:8] for keys in turns}) == 1  # one system prompt
    latest: dict[bytes, tuple[bytes, ...]] = {}  # by the first key of a conversation's own
    for keys in turns:
        before = latest.get(keys[8], keys[:8])
        assert keys[: len(before)] == before
        assert len(keys) > len(before)
        latest[keys[8]] = keys
    assert len(latest) == 3


def test_demo_with_a_wrong_byte_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = VerifiedCache.serve

    def serve_then_spoil(self: VerifiedCache, keys: Any) -> int:
        hits = serve(self, keys)
        self.engine.slots[0, 5] ^= 0x10
        return hits

    monkeypatch.setattr(VerifiedCache, "serve", serve_then_spoil)
    assert main(["demo", "--backend", "simulated"]) == 1
    assert re.search(r"  with wrong bytes +[1-9]", capsys.readouterr().out)


@pytest.mark.gpu
def test_demo_and_doctor_on_a_gpu(capsys: pytest.CaptureFixture[str], on_gpu: tuple[str, ...]) -> None:
    fields = run_json(capsys, "demo", *on_gpu)
    assert (fields["simulated"], fields["corrupt_blocks"]) == (False, 0)
    assert fields["store_gb_per_s"] > 0
    fields = run_json(capsys, "doctor", *on_gpu)
    assert fields["gpus"]
    assert fields["problem"] is None
