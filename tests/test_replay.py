"""`replay`: counts against an independent model, bytes checked, broken traces refused."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvoffload
from kvoffload.cli import main
from kvoffload.cli.trace import read_trace
from kvoffload.cli.verified import VerifiedCache
from kvoffload.driver import address_of
from kvoffload.models import MODELS
from kvoffload.testing import check_clean_close

TINY = MODELS["llama-3.1-8b"].scaled(1e-6)
HYBRID = MODELS["gpt-oss-20b"].scaled(1e-6)
KNOWN_LRU_HITS = {512: 12_168, 2048: 15_857, 8192: 52_381, 32768: 96_618}  # of 288,500 blocks of the whole trace


class Served(NamedTuple):
    """What one request did, or all of them together."""

    hits: int
    stored: int
    evicted: int


class Oracle:
    """The same semantics in one ordered dict, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.present: OrderedDict[Any, None] = OrderedDict()

    def serve(self, keys: Sequence[Any]) -> Served:
        keys = keys[: self.capacity]
        hits = 0
        while hits < len(keys) and keys[hits] in self.present:
            hits += 1
        absent = [key for key in dict.fromkeys(keys[hits:]) if key not in self.present]
        request = set(keys)
        excess = max(0, len(self.present) + len(absent) - self.capacity)
        victims = list(islice((key for key in self.present if key not in request), excess))
        for key in victims:
            del self.present[key]
        self.present.update(dict.fromkeys(absent))
        for key in reversed(keys):
            self.present.move_to_end(key)
        return Served(hits, len(absent), len(victims))

    def serve_all(self, requests: Sequence[Sequence[Any]]) -> Served:
        return Served(*(sum(column) for column in zip(*map(self.serve, requests), strict=True)))


def generated_trace(seed: int, requests: int = 120) -> list[list[int]]:
    """Conversations that come back, with gaps, empty requests, and some longer than a small cache."""
    random = np.random.default_rng(seed)
    histories = [[conversation * 1000] for conversation in range(6)]
    trace = []
    for _ in range(requests):
        history = histories[random.integers(len(histories))]
        history.extend(history[0] + len(history) + index for index in range(random.integers(0, 5)))
        ids = [0, *history[: random.integers(0, len(history) + 1)]]
        if random.random() < 0.2:  # a hole: something new in the middle of what is known
            ids[random.integers(len(ids))] = int(random.integers(10**6, 10**7))
        trace.append(list(dict.fromkeys(ids)) if random.random() > 0.05 else [])
    return trace


def write_trace(path: Path, requests: Sequence[Sequence[int]]) -> Path:
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": list(ids)}) + "\n" for ids in requests))
    return path


def replay(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["replay", *map(str, arguments), "--backend", "simulated", "--json"])
    printed = capsys.readouterr().out
    return code, json.loads(printed) if printed else {}


@pytest.mark.parametrize(("capacity", "blocks_per_key", "geometry"), [(7, 1, TINY), (30, 2, TINY), (16, 3, HYBRID)])
def test_every_request_does_what_the_oracle_does(
    device: kvoffload.Device, seed: int, capacity: int, blocks_per_key: int, geometry: Any
) -> None:
    trace = generated_trace(seed)
    oracle = Oracle(capacity)
    longest = max(map(len, trace))
    with VerifiedCache(
        device, geometry, capacity=capacity, longest=longest, blocks_per_key=blocks_per_key, seed=seed
    ) as served:
        for ids in trace:
            before = served.counts.blocks_stored, served.blocks_evicted
            hits = served.serve([identity.to_bytes(16, "big") for identity in ids])
            found = Served(hits, served.counts.blocks_stored - before[0], served.blocks_evicted - before[1])
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
    with VerifiedCache(device, TINY, capacity=4, longest=6) as served:
        for ids in trace:
            assert served.serve([bytes([identity]) for identity in ids]) == oracle.serve(ids).hits
        assert served.counts.corrupt_blocks == 0
        served.cache.check()


def test_json_fields_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    trace = generated_trace(seed)
    expected = Oracle(20).serve_all(trace)
    path = write_trace(tmp_path / "trace.jsonl", trace)
    code, fields = replay(
        capsys, path, "--model", "qwen2.5-7b", "--slots", 20, "--scale", 0.001, "--blocks-per-hash", 2
    )
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


def test_an_empty_trace_and_empty_requests_are_legal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", "qwen2.5-0.5b", "--scale", 0.01, "--slots", 4)
    for count in (0, 2):
        code, fields = replay(capsys, write_trace(tmp_path / "trace.jsonl", [[]] * count), *options)
        assert (code, fields["requests"], fields["hit_rate"]) == (0, count, 0.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not a JSON object"),
        ("[1, 2]", "must be a JSON object"),
        ('{"timestamp": 1}', 'has no "hash_ids"'),
        ('{"hash_ids": 5}', "must be a list of integers"),
        ('{"hash_ids": null}', "must be a list of integers"),
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


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        assert main(["replay", str(path), "--model", "llama-3.1-8b", "--backend", "simulated", "--json"]) == 2
        assert f"cannot read the trace {path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--model", "llama-9", "unknown model 'llama-9'; known: llama-3.1-8b"),
        ("--slots", "0", "must be at least 1"),
        ("--slots", "many", "must be an integer"),
        ("--requests", "0", "must be at least 1"),
        ("--scale", "0", "must be above 0"),
        ("--scale", "2", "at most 1"),
        ("--scale", "nan", "must be above 0"),
        ("--scale", "small", "must be a number"),
        ("--blocks-per-hash", "0", "must be at least 1"),
        ("--policy", "fifo", "invalid choice"),
        ("--device", "-1", "must be at least 0"),
        ("--device", "7", "index must name one of the 1 devices"),
        ("--seed", "-1", "must be at least 0"),
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


def test_more_memory_than_there_is_is_an_error_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1]])
    options = ["--model", "llama-3.1-70b", "--slots", str(10**9), "--backend", "simulated", "--json"]
    assert main(["replay", str(path), *options]) == 2
    assert "cannot pin" in capsys.readouterr().err


def test_keys_are_the_ids_as_fixed_width_bytes(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[0, 1, -1, (1 << 64) - 1]])
    (request,) = read_trace(path)
    assert {len(key) for key in request} == {16}
    assert [int.from_bytes(key, "big", signed=True) for key in request] == [0, 1, -1, (1 << 64) - 1]


# verification is real -------------------------------------------------------------------------------------------------


def flip(array: Any, index: Any) -> None:
    array[index] ^= 1


def test_a_byte_that_went_wrong_in_the_pool_is_counted_and_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = VerifiedCache.serve

    def serve_then_flip(self: VerifiedCache, keys: Sequence[bytes]) -> int:
        hits = serve(self, keys)
        flip(self.engine.slots, (0, self.layout.groups[0].payload_bytes - 1))
        return hits

    monkeypatch.setattr(VerifiedCache, "serve", serve_then_flip)
    path = write_trace(tmp_path / "trace.jsonl", [[1, 2, 3], [1, 2, 3]])
    code, fields = replay(capsys, path, "--model", "qwen2.5-0.5b", "--scale", 0.01, "--slots", 4)
    assert (code, fields["verified_blocks"], fields["corrupt_blocks"]) == (1, 3, 1)


def test_a_load_that_copies_nothing_is_caught(device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with VerifiedCache(device, HYBRID, capacity=8, longest=4) as served:
        served.serve([b"1", b"2"])
        load = served.cache.load
        monkeypatch.setattr(served.cache, "load", lambda *_, after: load([], [[], []], after=after))
        served.serve([b"1", b"2"])
        assert served.counts.corrupt_blocks == 2


def test_the_readback_plane_by_plane_catches_what_the_engines_agree_on(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.cli.verified.SAMPLE_EVERY", 1)
    monkeypatch.setattr("kvoffload.patterns.KeyPatterns.wrong", lambda *_: [])  # as if the comparison were blind
    with VerifiedCache(device, TINY, capacity=8, longest=4, blocks_per_key=2) as served:
        served.serve([b"1", b"2", b"3"])
        served.serve([b"1", b"2", b"3"])
        assert (served.counts.sampled_blocks, served.counts.corrupt_blocks) == (3, 0)
        flip(served.engine.slots, (1, 17))
        served.serve([b"1", b"2", b"3"])
        assert (served.counts.sampled_blocks, served.counts.corrupt_blocks) == (6, 1)


def test_poison_reaches_every_block_that_a_load_is_about_to_write(device: kvoffload.Device) -> None:
    with VerifiedCache(device, HYBRID, capacity=8, longest=3) as served:
        places = np.array([2, 0])
        served._poison(places)
        for group in served.layout.groups:
            for plane in group.planes:
                for place in places.tolist():
                    found = np.empty(plane.block_bytes, dtype=np.uint8)
                    with device.current():
                        address = plane.address + place * plane.block_stride
                        device.driver.copy_to_host(address_of(found), address, found.nbytes)
                    assert (found == 0xA5).all()


@pytest.mark.parametrize("level", [((12, 4), (12, 9)), ((13, 0), (13, 5))], ids=["no-batch-calls", "raw-addresses"])
def test_replay_is_right_at_other_capability_levels(level: Any, seed: int) -> None:
    device = kvoffload.open_device(backend="simulated", seed=seed, driver_version=level[0], bindings_version=level[1])
    trace = generated_trace(seed, requests=40)
    with VerifiedCache(device, HYBRID, capacity=20, longest=max(map(len, trace)), seed=seed) as served:
        for ids in trace:
            served.serve([identity.to_bytes(8, "big") for identity in ids])
        assert served.counts.corrupt_blocks == 0
        assert served.counts.verified_blocks > 0
    check_clean_close(device)


# a real trace ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def real_trace() -> Path:
    path = os.environ.get("KVOFFLOAD_TRACE")
    if path is None:
        pytest.skip("KVOFFLOAD_TRACE does not name the conversation trace of the Mooncake FAST'25 release")
    return Path(path)


@pytest.mark.parametrize("slots", KNOWN_LRU_HITS)
def test_the_oracle_finds_the_known_hits_of_the_whole_trace(real_trace: Path, slots: int) -> None:
    requests = read_trace(real_trace)
    assert sum(map(len, requests)) == 288_500
    assert Oracle(slots).serve_all(requests).hits == KNOWN_LRU_HITS[slots]


def test_the_start_of_the_real_trace(real_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = read_trace(real_trace, 300)
    expected = Oracle(1024).serve_all(requests)
    code, fields = replay(
        capsys, real_trace, "--model", "llama-3.1-8b", "--slots", 1024, "--scale", 0.01, "--requests", 300
    )
    assert (code, fields["corrupt_blocks"], fields["verified_blocks"]) == (0, 0, expected.hits)
    assert Served(fields["blocks_hit"], fields["blocks_stored"], fields["blocks_evicted"]) == expected


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("gpu_device")
def test_2000_requests_of_the_real_trace_on_a_gpu(real_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "llama-3.1-8b", "--slots", "16384", "--requests", "2000", "--backend", "cuda", "--json"]
    assert main(["replay", str(real_trace), *options]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["simulated"] is False
    assert (fields["blocks_hit"], fields["verified_blocks"], fields["corrupt_blocks"]) == (13_635, 13_635, 0)
    assert fields["load_gb_per_s"] > 0
