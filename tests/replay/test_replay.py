"""`replay`: counts against an independent model, bytes checked, broken traces refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Gate
from replay_oracles import (
    KNOWN_LRU_HITS,
    REAL_BLOCKS,
    Oracle,
    Served,
    find_real_trace,
    generated_trace,
    keys_of,
    write_trace,
)

import kvoffload
from kvoffload.cache.reservations import CacheJob
from kvoffload.commands import main
from kvoffload.driver import address_of
from kvoffload.internal.models import MODELS
from kvoffload.replay.overlap import overlap
from kvoffload.replay.trace import read_trace
from kvoffload.replay.verified import VerifiedCache
from kvoffload.testing import check_clean_close

TINY = MODELS["llama-3.1-8b"].scaled(1e-6)
HYBRID = MODELS["gpt-oss-20b"].scaled(1e-6)


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
        device, geometry, capacity=capacity, longest=longest, blocks_per_key=blocks_per_key, policy="lru", seed=seed
    ) as served:
        for ids in trace:
            before = served.counts.blocks_stored, served.blocks_evicted
            hits = served.serve(keys_of(ids))
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
    with VerifiedCache(device, TINY, capacity=4, longest=6, policy="lru") as served:
        for ids in trace:
            assert served.serve([bytes([identity]) for identity in ids]) == oracle.serve(ids).hits
        assert served.counts.corrupt_blocks == 0
        served.cache.check()


def test_json_fields_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    trace = generated_trace(seed)
    expected = Oracle(20).serve_all(trace)
    path = write_trace(tmp_path / "trace.jsonl", trace)
    code, fields = replay(
        capsys,
        path,
        "--model",
        "qwen2.5-7b",
        "--policy",
        "lru",
        "--slots",
        20,
        "--scale",
        0.001,
        "--blocks-per-hash",
        2,
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


# requests that overlap ------------------------------------------------------------------------------------------------


def serve_overlapping(device: kvoffload.Device, seed: int, in_flight: int, policy: str = "lru") -> VerifiedCache:
    """What is left of a cache that has served a generated trace; closed."""
    trace = [keys_of(ids) for ids in generated_trace(seed)]
    ended: list[int] = []
    with VerifiedCache(
        device, HYBRID, capacity=60, longest=max(map(len, trace)), policy=policy, in_flight=in_flight, seed=seed
    ) as served:
        served.serve_all(trace, lambda done, total: ended.append(total - done))
        served.cache.check()
        assert served.blocks_evicted > 0
        assert served.counts.blocks_stored <= 60 + served.blocks_evicted
    assert ended == list(range(len(trace) - 1, -1, -1))
    return served


@pytest.mark.parametrize("policy", ["lru", "prefix"])
@pytest.mark.parametrize("in_flight", [1, 4, 8])
def test_overlapping_requests_are_all_verified(
    device: kvoffload.Device, seed: int, in_flight: int, policy: str
) -> None:
    served = serve_overlapping(device, seed, in_flight, policy)
    counts, trace = served.counts, generated_trace(seed)
    assert (counts.requests, counts.blocks_requested) == (len(trace), sum(map(len, trace)))
    assert counts.corrupt_blocks == 0
    assert counts.verified_blocks == counts.blocks_hit > 0
    assert counts.bytes_loaded == counts.blocks_hit * served.bytes_per_key
    assert counts.bytes_stored == counts.blocks_stored * served.bytes_per_key
    assert len(counts.call_seconds) == sum(map(bool, trace))
    assert min(counts.call_seconds) > 0


def test_one_at_a_time_does_what_the_oracle_does(device: kvoffload.Device, seed: int) -> None:
    served = serve_overlapping(device, seed, in_flight=1)
    counts = served.counts
    expected = Oracle(60).serve_all(generated_trace(seed))
    assert (counts.blocks_hit, counts.blocks_stored, served.blocks_evicted) == expected
    assert counts.requests_refused == 0


def test_requests_that_overlap_want_the_same_blocks_and_store_them_once(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device.current():
        stream = int(device.driver.call("cuStreamCreateWithPriority", 1, 0))
    gate = Gate(device)
    gate.hold(stream)
    with VerifiedCache(device, TINY, capacity=16, longest=4, policy="lru", in_flight=3) as served:
        store = served.cache.store
        monkeypatch.setattr(served.cache, "store", lambda keys, blocks, **_: store(keys, blocks, after=stream))
        begun = [served.steps(keys_of(ids), lane) for lane, ids in enumerate([[1, 2], [1, 2, 3], [1, 2]])]
        first, second = next(begun[0]), next(begun[1])
        assert (first.keys, second.keys) == (keys_of([1, 2]), keys_of([3]))
        assert next(begun[2], None) is None  # all of it is on its way
        assert not first.done
        assert not second.done
        gate.open()
        assert [list(steps) for steps in begun] == [[], [], []]
        assert (served.counts.blocks_hit, served.counts.blocks_stored) == (0, 3)
        assert served.serve(keys_of([1, 2, 3])) == 3
        assert (served.counts.verified_blocks, served.counts.corrupt_blocks) == (3, 0)
    with device.current():
        device.driver.stream_destroy(stream)
    gate.close()


def test_what_was_given_up_after_it_had_been_loaded_is_stored_again_and_right(device: kvoffload.Device) -> None:
    with VerifiedCache(device, TINY, capacity=3, longest=3, policy="lru", in_flight=2) as served:
        served.serve(keys_of([1, 2]))
        begun = served.steps(keys_of([1, 2, 3]), 0)
        next(begun).wait()  # the load of 1 and 2
        other = served.steps(keys_of([7, 8, 9]), 1)
        next(other).wait()  # displaces both
        assert list(other) == []
        assert set(next(begun).keys) == set(keys_of([1, 2, 3]))
        assert list(begun) == []
        assert served.serve(keys_of([1, 2, 3])) == 3
        assert (served.counts.verified_blocks, served.counts.corrupt_blocks) == (5, 0)


def test_a_request_for_which_nothing_may_be_given_up_is_counted_and_others_go_on(device: kvoffload.Device) -> None:
    with VerifiedCache(device, TINY, capacity=3, longest=3, policy="lru", in_flight=2) as served:
        served.serve(keys_of([1, 2, 3]))
        with served.cache.acquire(keys_of([1, 2, 3])):
            served.serve_all([keys_of([4, 5]), keys_of([1, 6]), keys_of([1, 2, 3])], lambda *_: None)
        assert (served.counts.requests, served.counts.requests_refused, served.counts.blocks_stored) == (4, 2, 3)
        served.serve_all([keys_of([4, 5])], lambda *_: None)
        assert (served.counts.requests_refused, served.counts.blocks_stored) == (2, 5)
        assert served.counts.corrupt_blocks == 0


def test_overlapping_requests_have_blocks_of_their_own(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[list[int]] = []
    with VerifiedCache(device, TINY, capacity=20, longest=5, in_flight=3) as served:
        write = served._write

        def note(keys: Sequence[bytes], where: Any) -> None:
            places.append(where.tolist())
            write(keys, where)

        monkeypatch.setattr(served, "_write", note)
        served.serve_all([keys_of(range(10 * number, 10 * number + 5)) for number in range(3)], lambda *_: None)
    assert sorted(place for each in places for place in each) == list(range(15))


def test_json_of_overlapping_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    trace = generated_trace(seed)
    path = write_trace(tmp_path / "trace.jsonl", trace)
    options = ("--model", "qwen2.5-0.5b", "--scale", 0.001, "--slots", 40)
    found = {lanes: replay(capsys, path, *options, "--in-flight", lanes) for lanes in (1, 4, 8)}
    for lanes, (code, fields) in found.items():
        assert (code, fields["in_flight"], fields["policy"]) == (0, lanes, "prefix")
        assert fields["blocks_requested"] == sum(map(len, trace))
        assert (fields["verified_blocks"], fields["corrupt_blocks"]) == (fields["blocks_hit"], 0)
        assert 0 < fields["serving_seconds"] <= fields["seconds"]
        assert fields["call_us_mean"] > 0  # may be more than the 99th percentile, if the machine stood still once
        assert fields["call_us_p99"] > 0
        assert fields["blocks_declined"] >= 0
        assert (fields["saving"], fields["metadata_only"]) == (None, False)


def test_the_table_says_whose_time_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1, 2], [1, 2]])
    options = ("--model", "qwen2.5-0.5b", "--scale", "0.001", "--slots", "4", "--backend", "simulated")
    worth = ("--prefill-tokens-per-second", "1000", "--load-gb-per-s", "50")
    assert main(["replay", str(path), *options, *worth]) == 0
    printed = capsys.readouterr().out
    assert "inside cache calls, a request, host time of the simulated device" in printed
    assert "prefill not computed again" in printed
    assert "loads at 50 GB/s, as given" in printed


def test_hits_with_bytes_are_worth_blocks_of_full_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1, 2], [1, 2]])
    options = ("--model", "qwen2.5-0.5b", "--scale", 0.001, "--slots", 4)
    _, fields = replay(capsys, path, *options, "--prefill-tokens-per-second", 1000, "--load-gb-per-s", 50)
    saving = fields["saving"]
    assert saving["load_bytes"] == 2 * 512 * 24 * 2 * 2 * 64 * 2  # hits, tokens, layers, K and V, heads, values, bytes
    assert saving["load_seconds"] == pytest.approx(saving["load_bytes"] / 50e9)
    assert saving["prefill_seconds_saved"] == pytest.approx(2 * 512 / 1000)
    assert saving["load_gb_per_s_measured"] is False


def test_on_a_gpu_times_are_printed_and_loads_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as that can be tried without one: a simulated device that does not say so."""

    def unmarked(*_: object) -> kvoffload.Device:
        device = kvoffload.open_device(backend="simulated")
        device.simulated = False
        return device

    monkeypatch.setattr("kvoffload.replay.command.open_backend", unmarked)
    path = write_trace(tmp_path / "trace.jsonl", [[1, 2], [1, 2]])
    options = ("--model", "qwen2.5-0.5b", "--scale", "0.001", "--slots", "4", "--prefill-tokens-per-second", "1000")
    assert main(["replay", str(path), *options, "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["simulated"] is False
    assert {"store_gb_per_s", "load_gb_per_s", "store_gb_per_wall_s", "load_gb_per_wall_s"} <= set(fields)
    assert fields["saving"]["load_gb_per_s"] == fields["load_gb_per_s"]
    assert fields["saving"]["load_gb_per_s_measured"] is True
    assert main(["replay", str(path), *options]) == 0
    printed = capsys.readouterr().out
    assert "measured in this run" in printed
    assert "loads, wall clock, verification included" in printed
    assert "SIMULATED" not in printed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--model is needed"),
        (("--model", "qwen2.5-7b", "--slots", "4,8"), "--slots 4,8 needs --metadata-only"),
        (("--model", "qwen2.5-7b", "--policy", "all"), "--policy all needs --metadata-only"),
        (("--model", "qwen2.5-7b", "--plot", "hits.png"), "--plot needs --metadata-only"),
        (("--model", "qwen2.5-7b", "--in-flight", "0"), "must be at least 1"),
        (("--model", "qwen2.5-7b", "--in-flight", "257"), "--in-flight must be at most 256, got 257"),
        (("--model", "qwen2.5-7b", "--prefill-tokens-per-second", "9"), "needs --load-gb-per-s here"),
        (("--model", "qwen2.5-7b", "--workload", "agents"), "not allowed with argument TRACE"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert main(["replay", "missing.jsonl", *options, "--backend", "simulated", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err


def test_without_a_gpu_auto_needs_the_bandwidth_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody knows before the device is open."""

    def no_gpu(*_: object, **options: Any) -> kvoffload.Device:
        if options["backend"] == "cuda":
            raise kvoffload.CapabilityError("there is none")
        return kvoffload.open_device(backend="simulated")

    path = write_trace(tmp_path / "trace.jsonl", [[1]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvoffload.terminal.console.open_device", no_gpu)
        options = ("--model", "qwen2.5-7b", "--prefill-tokens-per-second", "9", "--json")
        assert main(["replay", str(path), *options]) == 2
    assert "needs --load-gb-per-s here" in capsys.readouterr().err


def test_overlap_starts_in_order_and_goes_on_with_what_is_done() -> None:
    log: list[str] = []

    class Slow:
        """A job that is done when it has been asked so often."""

        def __init__(self, asked: int) -> None:
            self.left = asked

        @property
        def done(self) -> bool:
            self.left -= 1
            return self.left < 0

    def start(waits: list[int], lane: int) -> Iterator[Any]:
        name = f"{lane}:{','.join(map(str, waits))}"
        log.append(f"begin {name}")
        for asked in waits:
            yield Slow(asked)
        log.append(f"end {name}")

    begin: Callable[[list[int], int], Iterator[CacheJob]] = start
    counted: list[int] = []
    overlap(begin, [[9, 9], [0], [], [0, 0], [1]], 2, lambda: counted.append(1))
    assert len(counted) == 5
    assert log[:2] == ["begin 0:9,9", "begin 1:0"]
    assert [entry for entry in log if entry.startswith("begin")][2:] == ["begin 1:", "begin 1:0,0", "begin 1:1"]
    assert log[-1] == "end 0:9,9"
    overlap(begin, [], 2, lambda: counted.append(1))
    assert len(counted) == 5


# verification is real -------------------------------------------------------------------------------------------------


def flip(array: Any, index: Any) -> None:
    array[index] ^= 1


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of the pool goes wrong when the first request that stored something has ended."""
    steps = VerifiedCache.steps
    done: list[bool] = []

    def steps_then_flip(self: VerifiedCache, keys: Sequence[bytes], lane: int = 0) -> Iterator[CacheJob]:
        yield from steps(self, keys, lane)
        if self.counts.blocks_stored and not done:
            flip(self.engine.slots, (0, self.layout.groups[0].payload_bytes - 1))
            done.append(True)

    monkeypatch.setattr(VerifiedCache, "steps", steps_then_flip)


@pytest.mark.usefixtures("spoiled")
def test_a_byte_that_went_wrong_in_the_pool_is_counted_and_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1, 2, 3], [1, 2, 3]])
    code, fields = replay(capsys, path, "--model", "qwen2.5-0.5b", "--scale", 0.01, "--slots", 4)
    assert (code, fields["verified_blocks"], fields["corrupt_blocks"]) == (1, 3, 1)


@pytest.mark.usefixtures("spoiled")
def test_a_byte_that_went_wrong_is_caught_while_requests_overlap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1, 2, 3]] * 12)
    options = ("--model", "qwen2.5-0.5b", "--scale", 0.01, "--slots", 4, "--in-flight", 4)
    code, fields = replay(capsys, path, *options)
    loads = fields["blocks_hit"] // 3
    assert (code, fields["blocks_stored"], fields["verified_blocks"]) == (1, 3, 3 * loads)
    assert 8 <= loads <= 11
    assert loads - 3 <= fields["corrupt_blocks"] <= loads  # up to three began before the byte went wrong


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
    monkeypatch.setattr("kvoffload.replay.verified.SAMPLE_EVERY", 1)
    monkeypatch.setattr(
        "kvoffload.internal.patterns.KeyPatterns.wrong", lambda *_: []
    )  # as if the comparison were blind
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
            served.serve(keys_of(ids))
        assert served.counts.corrupt_blocks == 0
        assert served.counts.verified_blocks > 0
    check_clean_close(device)


# a real trace ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def real_trace() -> Path:
    return find_real_trace()


@pytest.mark.parametrize("slots", KNOWN_LRU_HITS)
def test_the_oracle_finds_the_known_hits_of_the_whole_trace(real_trace: Path, slots: int) -> None:
    requests = read_trace(real_trace)
    assert sum(map(len, requests)) == REAL_BLOCKS
    assert Oracle(slots).serve_all(requests).hits == KNOWN_LRU_HITS[slots]


def test_the_start_of_the_real_trace(real_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = read_trace(real_trace, 300)
    expected = Oracle(1024).serve_all(requests)
    code, fields = replay(
        capsys,
        real_trace,
        "--model",
        "llama-3.1-8b",
        "--policy",
        "lru",
        "--slots",
        1024,
        "--scale",
        0.01,
        "--requests",
        300,
    )
    assert (code, fields["corrupt_blocks"], fields["verified_blocks"]) == (0, 0, expected.hits)
    assert Served(fields["blocks_hit"], fields["blocks_stored"], fields["blocks_evicted"]) == expected


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("gpu_device")
def test_2000_requests_of_the_real_trace_on_a_gpu(real_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "llama-3.1-8b", "--slots", "16384", "--requests", "2000", "--policy", "lru"]
    options += ["--backend", "cuda", "--json"]
    assert main(["replay", str(real_trace), *options]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["simulated"] is False
    assert (fields["blocks_hit"], fields["verified_blocks"], fields["corrupt_blocks"]) == (13_635, 13_635, 0)
    assert fields["load_gb_per_s"] > 0
