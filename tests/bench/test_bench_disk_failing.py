"""`bench disk --failing`: faults reach the disk, breakers open and close again, and every loaded byte is compared."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from benching import run_json
from tiering import until

from kvoffload.bench.disk_faults import Fault, FaultyFiles
from kvoffload.commands import main
from kvoffload.tiers import DiskTier, Outcome
from kvoffload.tiers.threaded import Rows

DOCUMENT = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
SMALL = (
    "bench", "disk", "--failing", "--backend", "simulated", "--requests", "10", "--repeats", "1", "--slots", "96",
    "--model", "qwen2.5-0.5b",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.cache.tiering.below._FIRST_PAUSE", 0.05)


def test_each_fault_opens_the_breaker_and_the_disk_is_read_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fields = run_json(capsys, *SMALL, "--path", str(tmp_path))
    assert [name for name in fields if f"`{name}`" not in DOCUMENT] == []
    assert (fields["workload"], fields["trace"]) == ("agents", None)
    found = fields["failing"]
    assert [each["fault"] for each in found["faults"]] == ["fails", "hangs", "wrong bytes"]
    assert (found["simulated"], found["slots"], found["requests_a_round"], found["repeats"]) == (True, 96, 10, 1)
    for each in found["faults"]:
        assert each["read_before_fault"] > 0, "the disk was used"
        assert each["read_during_fault"] == 0, "and could not be, later"
        assert each["disturbed_calls"] > 0
        assert each["breaker_opened"] > 0
        assert each["return_seconds"] is not None
        assert each["verified_blocks"] > 0
        assert each["wrong_blocks"] == 0
        assert each["hits_without"] > 0
        assert each["requests_ratio"] > 0
    assert list(tmp_path.iterdir()) == []


def with_trace(folder: Path) -> list[str]:
    """The command for a trace of 40 requests of three blocks."""
    trace = folder / "trace.jsonl"
    lines = [{"hash_ids": [number % 5, 10 + number % 7, 100 + number]} for number in range(40)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [*SMALL, "--trace", str(trace), "--requests", "5", "--slots", "8", "--path", str(folder)]


def test_a_trace_is_replayed_and_printed_in_80_columns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*with_trace(tmp_path), "--wide"]) == 0
    captured = capsys.readouterr()
    text = captured.out.splitlines()
    assert text[0].startswith("bench disk --failing: ")
    assert "these are no times of a GPU" in " ".join(captured.out.split())
    assert max(map(len, text)) <= 80
    assert [line.split()[0] for line in text if line.startswith(("fails", "hangs", "wrong bytes"))] == [
        "fails", "hangs", "wrong",
    ] * 3  # fmt: skip
    assert "0 wrong" in text[-1]


def test_wrong_bytes_end_it_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = DiskTier.read_records

    def read(tier: DiskTier, keys: Sequence[bytes], rows: Sequence[Rows]) -> list[Outcome]:
        outcomes = real(tier, keys, rows)
        for row in rows:
            row[0][0] ^= 1
        return outcomes

    monkeypatch.setattr(DiskTier, "read_records", read)
    assert main(with_trace(tmp_path)) == 1
    assert "loaded blocks WRONG" in capsys.readouterr().out


def test_options_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "short.jsonl"
    trace.write_text('{"hash_ids": [1]}\n')
    path = ("--path", str(tmp_path))
    for options, said in (
        (("bench", "disk", *path, "--slots", "8"), "--slots is of no use without --failing"),
        ((*SMALL, *path, "--gpu"), "--gpu does not go with --failing"),
        ((*SMALL, *path, "--workload", "agents", "--trace", str(trace)), "choose one"),
        ((*SMALL, *path, "--trace", str(trace)), "has 1 requests with blocks, and 40 are needed"),
        ((*SMALL, *path, "--trace", str(tmp_path / "none")), "cannot read the trace"),
    ):
        assert main(list(options)) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == [trace]


def test_faulty_files(tmp_path: Path) -> None:
    files = FaultyFiles()
    file = files.open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT)
    content, found = bytearray(b"12345678"), bytearray(8)

    def read() -> bytes:
        files.preadv(file, [memoryview(found)], 0)
        return bytes(found)

    assert files.pwritev(file, [memoryview(content)], 0) == 8
    assert (read(), files.disturbed) == (b"12345678", 0)
    files.begin(Fault.WRONG)
    assert (read(), files.disturbed) == (b"02345678", 1)
    files.begin(Fault.FAILS)
    for call in (read, lambda: files.pwritev(file, [memoryview(content)], 0), lambda: files.fdatasync(file)):
        with pytest.raises(OSError, match="Input/output error"):
            call()
    files.begin(Fault.HANGS)
    ended: list[bytes] = []
    thread = threading.Thread(target=lambda: ended.append(read()))
    thread.start()
    until(lambda: files.disturbed == 5)
    assert ended == []
    files.end()
    thread.join()
    assert ended == [b"12345678"]
    files.fdatasync(file)
    files.close(file)
