"""`replay`: counts against an independent model, bytes checked, broken traces refused."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT
from replay_oracles import (
    Oracle,
    Served,
    find_real_trace,
    generated_trace,
    keys_of,
    write_lines,
    write_trace,
)
from replaying import HYBRID, TINY, replay
from seeds import rest_long

import kvoffload
from kvoffload.commands import main
from kvoffload.replay.trace import read_timed_trace
from kvoffload.replay.verified import VerifiedCache
from kvoffload.terminal.console import CommandError


@pytest.mark.parametrize(
    ("capacity", "blocks_per_key", "geometry"), rest_long([(7, 1, TINY), (16, 3, HYBRID), (30, 2, TINY)], 2)
)
def test_every_request_does_what_the_oracle_does(
    device: kvoffload.Device, seed: int, capacity: int, blocks_per_key: int, geometry: Any
) -> None:
    trace = generated_trace(seed)
    oracle = Oracle(capacity)
    longest = max(map(len, trace))
    with VerifiedCache(
        device, geometry, capacity=capacity, longest=longest, blocks_per_key=blocks_per_key, policy="lru", seed=seed
    ) as served:
        for ids in trace:
            before = served.counts.blocks_stored, served.cache.statistics().evicted
            hits = served.serve(keys_of(ids))
            found = Served(hits, served.counts.blocks_stored - before[0], served.cache.statistics().evicted - before[1])
            assert found == oracle.serve(ids), (seed, ids)
        served.cache.check()
        assert len(served.cache) == len(oracle.present)
        counts = served.counts
        assert counts.blocks_hit > 0
        assert counts.verified_blocks == counts.blocks_hit
        assert counts.corrupt_blocks == 0
        assert counts.bytes_loaded == counts.blocks_hit * served.bytes_per_key


def test_repeated_ids_in_a_request_are_served_as_the_oracle_does(device: kvoffload.Device) -> None:
    trace = [[1, 1, 2], [1, 1, 2, 2, 3, 3], [4, 4, 4], [1, 2, 3]]
    oracle = Oracle(4)
    with VerifiedCache(device, TINY, capacity=4, longest=6, policy="lru") as served:
        for ids in trace:
            assert served.serve([bytes([identity]) for identity in ids]) == oracle.serve(ids).hits
        assert served.counts.corrupt_blocks == 0
        served.cache.check()


def test_json_fields_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    trace = generated_trace(seed)
    expected = Oracle(20).serve_all(trace)
    path = write_trace(tmp_path / "trace.jsonl", trace)
    options = ("--model", "qwen2.5-7b", "--policy", "lru", "--slots", 20, "--scale", 0.001, "--blocks-per-hash", 2)
    code, fields = replay(capsys, path, *options)
    requested = sum(map(len, trace))
    nbytes = 56 * 32 * 2  # 16.4 bytes a plane, rounded up to 32; two blocks a hash
    assert code == 0
    assert fields["simulated"] is True
    assert (fields["model"], fields["slots"], fields["scale"], fields["policy"]) == ("qwen2.5-7b", 20, 0.001, "lru")
    assert (fields["requests"], fields["blocks_requested"]) == (len(trace), requested)
    assert Served(fields["blocks_hit"], fields["blocks_stored"], fields["blocks_evicted"]) == expected
    assert fields["hit_rate"] == expected.hits / requested
    assert fields["bytes_stored"] == expected.stored * nbytes
    assert fields["bytes_loaded"] == expected.hits * nbytes
    assert (fields["verified_blocks"], fields["corrupt_blocks"]) == (expected.hits, 0)
    assert fields["seconds"] > 0
    assert not any("gb_per_s" in name for name in fields)


def test_requests_stops_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1, 2], [1, 2, 3], [4]])
    path.write_text(path.read_text() + "broken\n")
    code, fields = replay(capsys, path, "--model", "qwen2.5-0.5b", "--scale", 0.01, "--slots", 4, "--requests", 2)
    assert (code, fields["requests"], fields["blocks_hit"]) == (0, 2, 2)


def test_empty_requests_among_others_are_legal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", "qwen2.5-0.5b", "--scale", 0.01, "--slots", 4)
    path = write_trace(tmp_path / "trace.jsonl", [[], [1], []])
    code, fields = replay(capsys, path, *options)
    assert (code, fields["requests"], fields["blocks_stored"], fields["hit_rate"]) == (0, 3, 1, 0.0)
    assert main(["replay", str(path), *map(str, options), "--backend", "simulated"]) == 0
    assert capsys.readouterr().out.startswith("replay: 0 of 1 blocks found (hit rate 0.00%); nothing was loaded\n")


def test_blocks_of_a_request_that_is_longer_than_the_cache_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = [[1, 2, 3], [1, 2, 3, 4], [5]]
    path = write_trace(tmp_path / "trace.jsonl", trace)
    options = ("--model", "qwen2.5-0.5b", "--scale", 0.01, "--slots", 2, "--policy", "lru")
    code, fields = replay(capsys, path, *options)
    assert (code, fields["blocks_beyond_slots"]) == (0, 3)
    shares = ("blocks_hit", "blocks_stored", "blocks_declined", "blocks_beyond_slots")
    assert sum(fields[name] for name in shares) == fields["blocks_requested"] == 8
    assert main(["replay", str(path), *map(str, options), "--backend", "simulated"]) == 0
    assert "  beyond the first 2 of a request " in capsys.readouterr().out
    assert main(["replay", str(path), "--metadata-only", "--slots", "2,9", "--policy", "all"]) == 0
    printed = capsys.readouterr().out
    assert "not tried with 2 slots: 3 blocks beyond the first 2 of a request." in printed
    assert "with 9 slots: " not in printed


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not a JSON object"),
        ("[1, 2]", "must be a JSON object"),
        ('{"timestamp": 1}', 'has no "hash_ids"'),
        ('{"hash_ids": 5}', "must be a list of integers"),
        ('{"hash_ids": [1, "2"]}', '"hash_ids"[1] must be an integer'),
        ('{"hash_ids": [1.0]}', '"hash_ids"[0] must be an integer'),
        ('{"hash_ids": [true]}', '"hash_ids"[0] must be an integer'),
        (f'{{"hash_ids": [{1 << 127}]}}', "must fit into 128 bits"),
        ("\ud800", "not a JSON object"),
    ],
)
def test_a_broken_line_is_named_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    path = tmp_path / "trace.jsonl"
    good = b'{"hash_ids": [1]}\n\n'
    path.write_bytes(good + line.encode(errors="surrogatepass") + b"\n")
    assert main(["replay", str(path), "--model", "llama-3.1-8b", "--backend", "simulated", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{path}, line 3" in captured.err
    assert said in captured.err


NUMBERS = ("NaN", "-Infinity", "1e999", "-1e999", "1" + "0" * 400, "-1" + "0" * 400, "1" * 5000, "-1e308", "[" * 2000)


@pytest.mark.parametrize("field", ["hash_ids", "timestamp", "session"])
@pytest.mark.parametrize("options", [[], ["--hints", "all"], ["--json"]])
def test_a_number_that_no_float_holds_is_no_traceback(tmp_path: Path, field: str, options: list[str]) -> None:
    """Python's JSON reads them: NaN, infinities, integers of any length, lists of any depth."""
    path = tmp_path / "trace.jsonl"
    for number in NUMBERS:
        for value in (number, f"[{number}]"):
            given = {"hash_ids": "[1]", "timestamp": "1", "session": '"a"'} | {field: value}
            line = "{" + ", ".join(f'"{name}": {text}' for name, text in given.items()) + "}"
            path.write_text(f'{{"hash_ids": [1], "timestamp": 0, "session": "a"}}\n{line}\n')
            assert main(["replay", str(path), "--metadata-only", "--slots", "2", *options]) in (0, 2)


def test_a_compressed_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"hash_ids": [1, 2]}\n\n{"hash_ids": [1]}\n'))
    assert read_timed_trace(path).requests == [keys_of([1, 2]), keys_of([1])]
    whole = path.read_bytes()
    broken = whole[:10] + b"\x07" + whole[11:]  # there is no third kind of block
    for content, said in ((whole[:-12], "cut off"), (whole[:3], "cut off"), (broken, "damaged")):
        path.write_bytes(content)
        with pytest.raises(CommandError, match=said):
            read_timed_trace(path)


FORMATS: dict[str, str | bytes] = {  # what other programs log: its first line
    "vLLM's events": '{"ts": 1.5, "events": [{"type": "BlockStored", "block_hashes": [1], "token_ids": [5, 6]}]}',
    "vLLM's events in msgpack": b"\x93\xcb?\xf8\x00\x00\x91\xabBlockStored",
    "ShareGPT": '[{"id": "QWJhYvA_0", "conversations": [{"from": "human", "value": "Hello"}]}]',
    "ShareGPT in several lines": '[\n  {\n    "id": "QWJhYvA_0"\n  }\n]',
    "Azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44",
    "a log of an API": '{"messages": [{"role": "user", "content": "Hello"}], "model": "llama"}',
    "compressed by something else": b"\x28\xb5\x2f\xfd\x04\x00",
}


@pytest.mark.parametrize("name", FORMATS)
def test_another_format_is_told_the_line_that_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path, content = tmp_path / "trace", FORMATS[name]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["replay", str(path), "--metadata-only"]) == 2
    said = capsys.readouterr().err
    assert f"{path}, line 1: " in said
    assert '{"hash_ids": [1, 2, 3], "timestamp": 0, "session": "a"}' in said
    guide = re.search(r"docs/[\w/.-]+\.md", said)
    assert guide is not None
    assert (ROOT / guide[0]).exists()


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        assert main(["replay", str(path), "--model", "llama-3.1-8b", "--backend", "simulated", "--json"]) == 2
        assert f"cannot read the trace {path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--model", "llama-9", "unknown model 'llama-9'; known: llama-3.1-8b"),
        ("--slots", "many", "must be an integer"),
        ("--scale", "2", "at most 1"),
        ("--scale", "nan", "must be above 0"),
        ("--scale", "small", "must be a number"),
        ("--policy", "fifo", "invalid choice"),
        ("--device", "7", "index must name one of the 1 devices"),
    ],
)
def test_a_bad_option_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, said: str
) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1]])
    options = {"--model": "llama-3.1-8b", "--backend": "simulated", option: value}
    assert main(["replay", str(path), "--json", *(part for each in options.items() for part in each)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err


@pytest.mark.parametrize(("slots", "text"), [(10**8, "cannot pin"), (10**9, "more than any machine has")])
def test_more_memory_than_there_is_is_an_error_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], slots: int, text: str
) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1]])
    options = ["--model", "llama-3.1-70b", "--slots", str(slots), "--backend", "simulated", "--json"]
    assert main(["replay", str(path), *options]) == 2
    assert text in capsys.readouterr().err


def test_keys_are_the_ids_as_fixed_width_bytes(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[0, 1, -1, (1 << 64) - 1]])
    (request,) = read_timed_trace(path).requests
    assert {len(key) for key in request} == {16}
    assert [int.from_bytes(key, "big", signed=True) for key in request] == [0, 1, -1, (1 << 64) - 1]


# a real trace ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def real_trace() -> Path:
    return find_real_trace()


def test_the_start_of_the_real_trace(real_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = read_timed_trace(real_trace, 300).requests
    expected = Oracle(1024).serve_all(requests)
    options = ("--model", "llama-3.1-8b", "--policy", "lru", "--slots", 1024, "--scale", 0.01, "--requests", 300)
    code, fields = replay(capsys, real_trace, *options)
    assert (code, fields["corrupt_blocks"], fields["verified_blocks"]) == (0, 0, expected.hits)
    assert Served(fields["blocks_hit"], fields["blocks_stored"], fields["blocks_evicted"]) == expected


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_2000_requests_of_the_real_trace_on_a_gpu(
    real_trace: Path, capsys: pytest.CaptureFixture[str], on_gpu: tuple[str, ...]
) -> None:
    options = ["--model", "llama-3.1-8b", "--slots", "16384", "--requests", "2000", "--policy", "lru"]
    options += [*on_gpu, "--json"]
    assert main(["replay", str(real_trace), *options]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["simulated"] is False
    assert (fields["blocks_hit"], fields["verified_blocks"], fields["corrupt_blocks"]) == (13_635, 13_635, 0)
    assert fields["load_gb_per_s"] > 0


@pytest.mark.parametrize(
    ("stamps", "seconds"),
    [
        ([1000, 1000, 2500.5], [0.0, 0.0, 1.5005]),
        ([0, 0, 0], None),
        ([3, 2, 4], None),
        ([1, None, 2], None),
        ([1, "2", 3], None),
        ([False, True, True], None),
        ([0, 1, float("inf")], None),
        ([0, float("nan"), 2], None),
        ([0, 1, 10**400], None),
        ([-(10**400), 0, 1], None),
        ([-1e308, 0, 1e308], None),
        ([-1e308, 1, 1e308], None),
        ([-1e299, 0, 1e299], [0.0, 1e296, 2e296]),
        ([1_764_000_000_123_456_789, 1_764_000_000_123_456_790, 1_764_000_000_123_457_789], [0.0, 0.001, 1.0]),
    ],
)
def test_timestamps_of_a_trace(tmp_path: Path, stamps: list[Any], seconds: list[float] | None) -> None:
    path = write_lines(tmp_path / "trace.jsonl", ({"hash_ids": [1], "timestamp": stamp} for stamp in stamps))
    trace = read_timed_trace(path)
    assert trace.requests == read_timed_trace(path).requests == [keys_of([1])] * 3
    assert trace.seconds == (None if seconds is None else pytest.approx(seconds))
