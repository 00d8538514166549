"""Requests that overlap: all verified, stored once, with blocks of their own; options and tables of `replay`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Gate
from replay_oracles import Oracle, generated_trace, keys_of, write_trace
from replaying import TINY, replay, serve_overlapping
from seeds import rest_long

import kvoffload
from kvoffload.cache.reservations import CacheJob
from kvoffload.commands import main
from kvoffload.replay.verified import VerifiedCache, overlap


@pytest.mark.parametrize(
    ("in_flight", "policy"),
    rest_long([(1, "lru"), (8, "prefix"), (8, "lru"), (1, "prefix"), (4, "lru"), (4, "prefix")], 2),
)
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
    if (in_flight, policy) == (1, "lru"):  # one at a time does what the oracle does
        expected = Oracle(60).serve_all(trace)
        assert (counts.blocks_hit, counts.blocks_stored, served.cache.statistics().evicted) == expected
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
        assert next(begun[2], None) is None  # another request stores all of it
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


def test_what_was_evicted_after_it_had_been_loaded_is_stored_again_and_right(device: kvoffload.Device) -> None:
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


def test_a_request_for_which_nothing_can_be_evicted_is_counted_and_others_go_on(device: kvoffload.Device) -> None:
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
        store = served.cache.store

        def note(keys: Sequence[bytes], blocks: Any, **options: Any) -> Any:
            places.append(np.ravel(blocks).tolist())
            return store(keys, blocks, **options)

        monkeypatch.setattr(served.cache, "store", note)
        served.serve_all([keys_of(range(10 * number, 10 * number + 5)) for number in range(3)], lambda *_: None)
    assert sorted(place for each in places for place in each) == list(range(15))


def test_json_of_overlapping_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    trace = generated_trace(seed, requests=40)
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
    for lanes in (1, 4):
        assert main(["replay", str(path), *map(str, options), "--in-flight", str(lanes), "--backend", "simulated"]) == 0
        why = "A block may also be stored for another request meanwhile"
        assert (why in capsys.readouterr().out) == (lanes > 1), "with one request at a time the lines add up"
        assert (fields["saving"], fields["metadata_only"]) == (None, False)


def test_the_table_says_whose_time_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1, 2], [1, 2]])
    options = ("--model", "qwen2.5-0.5b", "--scale", "0.001", "--slots", "4", "--backend", "simulated")
    worth = ("--prefill-tokens-per-second", "1000", "--load-gb-per-s", "50")
    assert main(["replay", str(path), *options, *worth]) == 0
    printed = capsys.readouterr().out
    assert "inside cache calls, a request, host time" in printed
    assert "prefill not computed again" in printed
    assert "loads at 50 GB/s, as given" in " ".join(printed.split())


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
    assert "measured in this replay" in printed
    assert "loads, wall clock, verification included" in printed
    assert "SIMULATED" not in printed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--model is needed"),
        (("--model", "qwen2.5-7b", "--slots", "4,8"), "--slots 4,8 needs --metadata-only"),
        (("--model", "qwen2.5-7b", "--policy", "all"), "--policy all needs --metadata-only"),
        (("--model", "qwen2.5-7b", "--plot", "hits.png"), "--plot needs --metadata-only"),
        (("--model", "qwen2.5-7b", "--in-flight", "257"), "--in-flight must be at most 256, got 257"),
        (("--model", "qwen2.5-7b", "--prefill-tokens-per-second", "9"), "needs --load-gb-per-s here"),
        (("--model", "qwen2.5-7b", "--workload", "agents"), "not allowed with argument TRACE"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1]])
    assert main(["replay", str(path), *options, "--backend", "simulated", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err


def test_without_a_gpu_auto_needs_the_bandwidth_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether the device is simulated is known when it is open."""

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
