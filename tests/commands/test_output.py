"""What every command prints: a verdict first, 80 columns, nothing twice; with figures of a GPU and without one."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import Any

import pytest
from benching import run_json
from printed import DOCUMENT, GPU, SIMULATED, check, check_help, check_options, examples, parsers

import kvoffload
from kvoffload.calibration import Tuning
from kvoffload.commands import build_parser, demo, doctor, findings, main, tune
from kvoffload.planning.transfer_plan import Direction
from kvoffload.replay import command as replay
from kvoffload.terminal.console import Output
from kvoffload.tuning import COPIERS, Deviation, HostCosts, ProfileKey, Situation, default_profile

REPLAY = ("replay", "--workload", "agents", "--requests", "20")
WITH_BYTES = (*REPLAY, "--model", "qwen2.5-0.5b", "--scale", "0.001", "--slots", "40")
WORTH = ("--model", "llama-3.1-70b-tp4", "--prefill-tokens-per-second", "20000", "--load-gb-per-s", "50")
METADATA = (*REPLAY, "--metadata-only", "--policy", "all", "--slots", "16,1000000", *WORTH)
COMMANDS = [
    ("doctor", *SIMULATED),
    ("demo", *SIMULATED),
    ("tune", *SIMULATED),
    ("tune", "--show", *SIMULATED),
    (*WITH_BYTES, *SIMULATED),
    METADATA,
]
HELPS = [
    ("--help",),
    *((name, "--help") for name in ("doctor", "demo", "replay", "tune", "pool")),
    ("pool", "serve", "--help"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: " ".join(each[:2]))
def test_every_command_prints_a_verdict_and_80_columns(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert main(command) == 0
    captured = capsys.readouterr()
    check(captured.out, command[0])
    without_bytes = "--metadata-only" in command or command[0] == "doctor"
    assert captured.err == (
        "" if without_bytes else "kvoffload: the simulated device verifies bytes; times need a GPU\n"
    )


def test_words_of_tables_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--show", *SIMULATED]) == 0
    text = capsys.readouterr().out
    for placement in ("folded", "scattered"):
        assert text.index(f"\nplanes {placement}: ") < text.index(f"\nstore, planes {placement}\n")
    assert "\nprefer overlap: " in text
    methods = {name for name in COPIERS if re.search(rf" {name} [\d ]*\d\.", text)}
    assert methods
    assert [name for name in methods if f"\n{name}: " not in text] == []


def test_tune_show_of_a_default_profile_says_how_to_measure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = kvoffload.open_device(backend="simulated")
    monkeypatch.setattr("kvoffload.terminal.console.open_device", lambda *_, **__: device)
    monkeypatch.setattr(device, "simulated", False)
    assert main(["tune", "--show"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "these figures are from another machine: `kvoffload tune` measures this one"


# with figures of a GPU ------------------------------------------------------------------------------------------------


def test_demo_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, "demo", "--turns", "2", *SIMULATED)
    fields |= {"simulated": False, "device": GPU["device"], "store_gb_per_s": 41.2, "load_gb_per_s": 44.5}
    demo._print(fields, 16, Output(as_json=False))
    text = check(capsys.readouterr().out, "demo: ")
    tokens = 16 * fields["blocks_hit"]
    assert f"{tokens:,} of {16 * fields['blocks_requested']:,} prompt tokens not recomputed (hit rate " in text
    assert "41.2 GB/s on the GPU clock" in text
    assert "kvoffload tune" in text.partition("try next:")[2]


def test_demo_says_first_that_bytes_were_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, "demo", "--turns", "2", *SIMULATED) | {"corrupt_blocks": 3}
    demo._print(fields, 16, Output(as_json=False))
    first = " ".join(capsys.readouterr().out.partition("\n\n")[0].split())
    assert "3 loaded blocks WRONG" in first
    assert "every loaded byte verified" not in first


def test_replay_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, *WITH_BYTES, *SIMULATED)
    rates = {f"{name}_gb_per_{clock}": 46.1 for name in ("store", "load") for clock in ("s", "wall_s")}
    replay._print(fields | {"simulated": False, "device": GPU["device"]} | rates, None, Output(as_json=False))
    text = check(capsys.readouterr().out, "replay: ")
    assert f"{fields['hit_rate']:.2%}" in text
    assert "46.1 GB/s" in text


def test_tune_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    profile = replace(
        default_profile(ProfileKey("NVIDIA H200", "13.0", 5, 16, "13.3")),
        errors={"strided": Deviation(0.02, 0.1, 120)},
        host={"batch": HostCosts(2e-5, 1e-7)},
        codec={Situation.IDLE: {Direction.STORE: 1.297, Direction.LOAD: 1.306}, Situation.LARGE_PRODUCTS: {}},
    )
    tuning = Tuning(profile, 4321, 24.5, {"concurrent compute": "kernels need Triton, which is not installed"})
    fields = {**GPU, "written": "/home/user/.cache/kvoffload/profile.json", "link_gb_per_s": {"store": 55.1}}
    tune._print_tuning(tuning, fields, Output(as_json=False), kept=True)
    text = check(capsys.readouterr().out, "tune: wrote ")
    assert text.endswith("`kvoffload tune --show` prints the\n  choices\n")
    assert "not measured: concurrent compute: " in text.rpartition("\n\n")[2]
    assert "4,321 transfers in 24.5 s" in " ".join(text.split())
    assert re.search(r"batch +20 +0\.10", text)
    assert re.search(r"\nidle +1\.30 +1\.31\nlarge products +- +-\n", text)


# doctor ---------------------------------------------------------------------------------------------------------------


def gpu_fields(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the doctor finds on a machine with a GPU and all packages."""
    fields = run_json(capsys, "doctor", *SIMULATED)
    fields |= {**GPU, "gpus": ["NVIDIA H200"], "problem": None, "missing": {}, "profile_is_measured": True}
    fields |= {"gpu_memory_free_bytes": 140 << 30, "gpu_memory_bytes": 141 << 30, "pci_address": "0000:8a:00.0"}
    fields |= {"link_generation": 5, "link_width": 16, "max_link_speed": "32.0 GT/s PCIe", "max_link_width": 16}
    fields |= {"numa_node": 1, "numa_cpus": 16, "cache_folder_problem": None}
    fields["memory"] |= {"available_bytes": 100 << 30}
    for packages in (fields["packages"], fields["extras"]):
        packages |= dict.fromkeys(packages, "1.0")
    return fields


def found_by(fields: dict[str, Any]) -> dict[str, findings.Finding]:
    return {each.name: each for group in findings.groups(fields).values() for each in group}


def test_doctor_of_a_gpu_is_grouped_and_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    fields = gpu_fields(capsys)
    doctor._print(fields, Output(as_json=False))
    text = check(capsys.readouterr().out, "doctor: ready: NVIDIA H200, 32.0 GT/s PCIe x16 (0 fail, 0 warn)")
    headings = [line for line in text.splitlines()[1:] if line and not line.startswith(" ")]
    assert headings == ["GPU and link", "copy methods", "packages", "limits"]
    assert "  ok    driver feature, stream memory operations: " in text
    assert "->" not in text
    assert {each.status for each in found_by(fields).values()} == {"ok"}
    assert "`kvoffload tune` measures it" in found_by(fields)["codec bf16-12"].text
    fields["codec"] = {"idle": [1.29, 1.31], "both directions": [0.853, 1.2], "small products": []}
    said = found_by(fields)["codec bf16-12"].text
    assert said.startswith("idle x1.29, both directions x0.85 of pack without it; leave it out if ")


@pytest.mark.parametrize(
    ("change", "name", "status", "remedy"),
    [
        ({"link_width": 8}, "link", "warn", "8 of 16 lanes"),
        ({"numa_cpus": 0}, "NUMA node", "warn", "NUMA node"),
        ({"profile_is_measured": False}, "profile", "warn", "kvoffload tune"),
        ({"copiers": {"pack": "no Triton"}}, "pack", "warn", "more slowly"),
        ({"cache_folder_problem": "Read-only file system"}, "cache folder", "warn", "KVOFFLOAD_CACHE"),
        ({"problem": "no driver", "gpus": [], "simulated": None}, "GPUs", "fail", "nvidia-smi"),
        ({"packages": {"cuda-bindings": None}}, "cuda-bindings", "fail", "pip install"),
        ({"packages": {"triton": None}}, "triton", "warn", "pip install triton"),
    ],
)
def test_doctor_says_what_to_do(
    capsys: pytest.CaptureFixture[str], change: dict[str, Any], name: str, status: str, remedy: str
) -> None:
    fields = gpu_fields(capsys) | change
    found = found_by(fields)
    assert (found[name].status, remedy in found[name].remedy) == (status, True)
    assert {each.status for other, each in found.items() if other != name} == {"ok"}
    doctor._print(fields, Output(as_json=False))
    text = check(capsys.readouterr().out, "doctor: ")
    assert f"  {status:<4}  {name}: " in text
    assert text.count("-> ") == 1


# help -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", HELPS, ids=" ".join)
def test_every_help_has_lines_of_80_columns_and_an_example(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert main(command) == 0
    check_help(capsys.readouterr().out, "kvoffload demo" if command == ("--help",) else "example: kvoffload ")


@pytest.mark.parametrize(
    "parser", [each for each in parsers(build_parser()) if each.epilog], ids=lambda parser: parser.prog
)
def test_every_option_is_in_the_help_of_its_command(parser: argparse.ArgumentParser) -> None:
    check_options(parser)


def test_examples_of_helps_are_good_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for command in HELPS:
        assert main(command) == 0
        for example in examples(capsys.readouterr().out):
            if example[0] != "bench":  # its parser is in another distribution
                build_parser().parse_args(example)


def test_without_a_command_the_overview_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    overview = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == overview
    for name in ("doctor", "demo", "replay", "pool", "tune", "bench"):
        assert re.search(rf"^ {{6,}}kvoffload {name}", overview, re.MULTILINE), "an example of each"
    assert "exit codes: 0 done" in overview


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvoffload {kvoffload.__version__}\n"


# documentation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", HELPS, ids=" ".join)
def test_every_option_and_exit_code_is_documented(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    assert main(command) == 0
    for option in re.findall(r"--[a-z-]+", capsys.readouterr().out):
        assert option in DOCUMENT
    assert main(["--help"]) == 0
    codes = re.findall(r"\b(\d+) ", capsys.readouterr().out.partition("exit codes:")[2].partition("more:")[0])
    assert codes == re.findall(r"^\| (\d+) \|", DOCUMENT, re.MULTILINE) == ["0", "1", "2", "3", "130", "141"]


@pytest.mark.parametrize("name", ["doctor", "demo", "replay", "metadata", "show"])
def test_every_field_of_json_is_documented(capsys: pytest.CaptureFixture[str], name: str) -> None:
    commands = {"replay": (*WITH_BYTES, *SIMULATED), "metadata": METADATA, "show": ("tune", "--show", *SIMULATED)}
    fields = run_json(capsys, *commands.get(name, (name, *SIMULATED)))
    assert [field for field in fields if f"`{field}`" not in DOCUMENT] == []
