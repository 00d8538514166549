"""What the benchmarks print: a verdict first, 80 columns, nothing twice; with figures of a GPU and without one."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
from functools import cache

import pytest
from benching import run_json
from measured import measured
from printed import DOCUMENT, GPU, SIMULATED, check, check_help, check_options, examples, parsers

from kvoffload.commands import build_parser, main
from kvoffload.terminal.console import Output
from kvoffload_bench.report import print_fields

BENCHES = {
    "transfer": ("--model", "gpt-oss-120b-tp2", "--blocks-per-slot", "1"),
    "sweep": ("--sizes", "4096", "--counts", "8"),
    "field": ("--layouts", "block-major"),
    "sharded": (),
    "growth": (),
    "parts": ("--parts", "1,4"),
    "submit": (),
}
FRAMEWORKS = {"benchmark": "interop", "blocks": 32, "planes": 64, "block_bytes": 32768, "nbytes": 64 << 20}
SMALL_DISK = (
    "--sizes", "262144,1048576", "--threads", "1,2", "--nbytes", "1048576", "--repeats", "1", "--records", "1000",
)  # fmt: skip
FLEET = (
    "bench", "fleet", "--workload", "agents", "--requests", "20", "--hosts", "1,4", "--slots", "60",
    "--store-slots", "500", "--model", "llama-3.1-8b",
)  # fmt: skip
COMMANDS = [
    FLEET,
    ("bench", "cache", "--blocks", "2048", "--repeats", "2"),
    ("bench", "disk", *SMALL_DISK),
    *(("bench", name, *options, *SIMULATED) for name, options in BENCHES.items()),
]
HELPS = [
    ("bench", "--help"),
    *(
        ("bench", name, "--help")
        for name in (*BENCHES, "interop", "vllm", "cache", "pool", "disk", "remote", "fleet", "plot")
    ),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: " ".join(each[:2]))
def test_every_benchmark_prints_a_verdict_and_80_columns(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert main(command) == 0
    captured = capsys.readouterr()
    name = " ".join(command[:2])
    text = check(captured.out, name)
    if command[1] in ("cache", "disk", "fleet"):
        assert captured.err == ""
        return
    assert captured.err == "kvoffload: the simulated device verifies bytes; times need a GPU\n"
    transfers = re.fullmatch(rf"{name}: ([0-9,]+) transfers verified, 0 wrong; times need a GPU\n", text)
    assert transfers
    assert transfers.group(1) != "0"


@cache
def recorded(name: str) -> str:
    """What a benchmark gives on the simulated device, as JSON text."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        assert main(["bench", name, *BENCHES[name], *SIMULATED, "--json"]) == 0
    return printed.getvalue()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", [*BENCHES, "interop"])
def test_every_benchmark_prints_figures_of_a_gpu_in_80_columns(
    capsys: pytest.CaptureFixture[str], name: str, wide: bool
) -> None:
    recording = {**FRAMEWORKS, "wrong_rows": 0} if name == "interop" else json.loads(recorded(name))
    fields, show = measured(recording)
    output = Output(as_json=False, wide=wide)
    print_fields(fields, show, output)
    text = capsys.readouterr().out
    begin = f"bench {name}: "
    if wide:
        assert text.startswith(begin)
    else:
        check(text, begin)
    assert "nan" not in text
    assert ("seconds until" if name == "growth" else "GB/s") in text
    assert re.search(r"^[0-9,]+ transfers verified, 0 wrong$", text, re.MULTILINE)
    assert text.count(str(GPU["device"])) >= 1


def test_words_of_tables_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    fields, show = measured(json.loads(recorded("submit")))
    show(fields, Output(as_json=False))
    text = capsys.readouterr().out
    assert "\nhot: " in text
    assert "; cold: " in text


def test_one_block_is_not_called_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    fields, show = measured(json.loads(recorded("transfer")))
    for record in fields["transfers"]:
        record["blocks"] = 1
    show(fields, Output(as_json=False))
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r", 1 block\b", text)
    assert not re.search(r"\b1 blocks\b", text)


@pytest.mark.parametrize("name", ["transfer", "sweep"])
def test_the_choice_takes_one_line_a_transfer(capsys: pytest.CaptureFixture[str], name: str) -> None:
    fields, show = measured(json.loads(recorded(name)))
    reasons = {"store": "batch: 28.8 GB/s expected; next is strided", "load": "pack: 49.6 GB/s"}
    for record in fields["transfers"]:
        record["gb_per_s"] = dict.fromkeys(record["wrong"], 48.25) | {"contiguous copy": 55.0}
        record["chosen"] = {"choice, overlap": reasons[record["direction"]], "choice, latency": "strided: 50 GB/s"}
    show(fields, Output(as_json=False))
    tables = [part for part in capsys.readouterr().out.split("\n\n") if "the engine's choice; ratio: " in part]
    assert len(tables) == len({record["placement"] for record in fields["transfers"]})
    for table in tables:
        _, rows = re.split(r"^-+(?:  -+)+\n", table, flags=re.MULTILINE)
        for row in rows.splitlines():
            assert re.search(r"\d +48\.2 \(0\.88\)  batch +48\.2 \(0\.88\)  pack$", row), row
    assert sum(table.count("(0.88)") for table in tables) == len(fields["transfers"])


def test_wrong_bytes_of_a_benchmark_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    fields, show = measured(json.loads(recorded("sweep")))
    fields["transfers"][0]["wrong"]["batch"] = 7
    fields["wrong_rows"] = 7
    print_fields(fields, show, Output(as_json=False))
    text = capsys.readouterr().out
    assert "1 wrong (7 rows of bytes)" in text
    (line,) = re.findall(r"^.* 7$", text, re.MULTILINE)
    assert line.startswith("model 8 planes, placement folded, direction store")


# help -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", HELPS, ids=" ".join)
def test_every_help_has_lines_of_80_columns_and_an_example(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert main(command) == 0
    text = capsys.readouterr().out
    check_help(text)
    for example in examples(text):
        build_parser("bench").parse_args(example)
    for option in re.findall(r"--[a-z-]+", text):
        assert option in DOCUMENT


@pytest.mark.parametrize(
    "parser", [each for each in parsers(build_parser("bench")) if " bench" in each.prog], ids=lambda parser: parser.prog
)
def test_every_option_is_in_the_help_of_its_command(parser: argparse.ArgumentParser) -> None:
    check_options(parser)


def test_without_a_benchmark_the_list_of_them_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert "usage: kvoffload bench" in capsys.readouterr().out


@pytest.mark.parametrize("name", [*BENCHES, "disk", "fleet"])
def test_every_field_of_json_is_documented(capsys: pytest.CaptureFixture[str], name: str) -> None:
    commands = {"disk": ("bench", "disk", *SMALL_DISK), "fleet": FLEET}
    fields = json.loads(recorded(name)) if name in BENCHES else run_json(capsys, *commands[name])
    assert [field for field in fields if f"`{field}`" not in DOCUMENT] == []
