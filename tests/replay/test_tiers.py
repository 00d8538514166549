"""`replay --disk-slots`: hits by tier, what is written, and that what is admitted is worth its writes."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from benching import Run, running
from replay_oracles import find_real_trace, generated_trace, keys_of, tree_trace, write_trace

from kvoffload.commands import main
from kvoffload.internal.models import MODELS
from kvoffload.replay.hits import (
    WRITES,
    Disk,
    HostPool,
    Policies,
    Served,
    Survey,
    TierResult,
    hits_with_disk,
    make_writes,
)
from kvoffload.replay.trace import Request, read_timed_trace
from kvoffload.replay.workloads import WORKLOADS, make_workload
from kvoffload.terminal.console import Output

SLOTS, DISK_SLOTS = 256, 2048
# Of each workload so many that "through" has written and evicted several times what the disk holds, and each kind of
# traffic has shown: evaluation comes round after a few hundred, prompts asked once are seldom asked again.
REQUESTS = {"evaluation": 800, "change": 1000, "one-off": 1200}
LRU, PREFIX = Policies("lru", "lru"), Policies("prefix", "prefix")

run = pytest.fixture(running("replay", "--metadata-only"))


# what is counted ------------------------------------------------------------------------------------------------------


def test_hits_of_each_tier_by_hand() -> None:
    index = HostPool(4, "lru", [Disk(8, "lru")], make_writes("through", 8, least_hits=0.0))
    assert index.serve(keys_of([1, 2, 3])) == Served((0, 0), (3,))
    assert index.serve(keys_of([1, 2, 4])) == Served((2, 0), (1,))
    assert index.serve(keys_of([5, 6, 7, 8])) == Served((0, 0), (4,))  # the host has lost the others, not the disk
    assert index.serve(keys_of([1, 2, 3, 9])) == Served((0, 3), (1,))  # which displaces one of the disk's
    assert index.serve(keys_of([1, 2, 3, 9])) == Served((4, 0), (0,))


def test_a_gap_ends_the_hits() -> None:
    disk = Disk(8, "lru")
    index = HostPool(3, "lru", [disk], make_writes("through", 8, least_hits=0.0))
    index.serve(keys_of([1, 2, 3]))
    disk.index.remove(keys_of([2]))
    disk.keys.difference_update(keys_of([2]))
    index.serve(keys_of([7, 8, 9]))
    assert index.serve(keys_of([1, 2, 3])) == Served((0, 1), (1,))


@pytest.mark.parametrize("policies", [LRU, PREFIX, Policies("s3fifo", "arc")])
@pytest.mark.parametrize("write", WRITES)
def test_tiers_agree_with_what_their_events_say(seed: int, write: str, policies: Policies) -> None:
    disk = Disk(120, policies.disk)
    writes = make_writes(write, 120, least_hits=0.2, share=0.5, seed=seed)
    index = HostPool(40, policies.host, [disk], writes)
    for trace in range(3):
        for ids in generated_trace(seed + trace):
            index.serve(keys_of(ids))  # asserts that only what the host has, and the disk has not, is written
            assert index.keys == set(index.host.keys)
            assert disk.keys == set(disk.index.keys)
    index.host.check()
    disk.index.check()
    assert (len(disk.index) == 0) == (write == "none")


def test_without_a_disk_the_hits_are_the_hosts(seed: int) -> None:
    requests = tree_trace(np.random.default_rng(seed), 200, depth=6, branches=3)  # no gaps: all host hits are leading
    found = {
        name: hits_with_disk(requests, 30, 60, LRU, make_writes(name, 60, least_hits=0.2), lambda *_: None)
        for name in ("none", "through", "second")
    }
    assert (found["none"].disk_hits, found["none"].blocks_written, found["none"].hits_per_written) == (0, 0, None)
    assert len({each.host_hits for each in found.values()}) == 1
    assert found["through"].disk_hits > 0


def test_a_random_share_writes_whole_requests() -> None:
    writes = make_writes("random", 0, least_hits=0.0, share=0.5)
    counts = []
    for number in range(200):
        keys = keys_of(range(100 * number, 100 * number + 10))
        writes.stored(keys)
        counts.append(len(writes.ended(keys)))
    assert set(counts) == {0, 10}
    assert 60 < counts.count(10) < 140


# what is admitted is worth its writes ---------------------------------------------------------------------------------


@cache
def results(
    name: str, policies: Policies, least_hits: float = 0.22, writes: tuple[str, ...] = WRITES
) -> dict[str, TierResult]:
    requests = make_workload(name, REQUESTS.get(name, 600))
    survey = Survey([SLOTS], [DISK_SLOTS], policies, writes, least_hits, 0)
    return {result.write: result for result in survey.run(requests, Output(as_json=True))}


def hits_at(results: list[TierResult], written: int) -> float:
    """Hits at so many writes, on the line between the two results of which one writes less."""
    points = sorted((each.blocks_written, each.hits) for each in results)
    for (low, least), (high, most) in pairwise(points):
        if low <= written <= high and high > low:
            return least + (most - least) * (written - low) / (high - low)
    return float(max(hits for writes, hits in points if writes <= written))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "policies"), [*((name, PREFIX) for name in WORKLOADS), ("documents", LRU), ("one-off", LRU)]
)
def test_admitted_finds_more_than_second_sighting_and_random(name: str, policies: Policies) -> None:
    found = results(name, policies)
    admitted, through, random = found["admitted"], found["through"], found["random"]
    assert through.blocks_evicted > DISK_SLOTS
    assert admitted.hits >= found["second"].hits
    if admitted.blocks_written < through.blocks_written:  # else random writes all that "through" does
        # In "evaluation" every block comes back as often: there it does not matter which ones are written.
        least = 0.985 if name == "evaluation" else 1.0
        assert admitted.hits >= least * hits_at([found["none"], random, through], admitted.blocks_written)
    assert admitted.hits >= 0.97 * through.hits
    assert admitted.blocks_written <= through.blocks_written


@pytest.mark.long
def test_with_as_many_writes_as_second_sighting_it_finds_as_much() -> None:
    found = results("one-off", LRU)
    second, sparing = found["second"], [found["admitted"]]
    sparing += [results("one-off", LRU, least_hits, ("admitted",))["admitted"] for least_hits in (0.5, 4)]
    assert sparing[-1].blocks_written <= 1.02 * second.blocks_written
    assert hits_at(sparing, second.blocks_written) >= 0.99 * second.hits


@pytest.mark.long
@pytest.mark.parametrize("policies", [LRU, PREFIX])
def test_prompts_asked_once_bring_three_times_the_hits_for_a_write(policies: Policies) -> None:
    found = results("one-off", policies)
    admitted, through = found["admitted"].hits_per_written, found["through"].hits_per_written
    assert admitted is not None
    assert through is not None
    assert admitted >= 3 * through


@pytest.mark.parametrize("policies", [LRU, PREFIX])
def test_the_whole_real_trace(policies: Policies) -> None:
    requests = read_timed_trace(find_real_trace()).requests

    def survey(least_hits: float, *writes: str) -> list[TierResult]:
        return Survey([2048], [32768], policies, writes, least_hits, 0).run(requests, Output(as_json=True))

    admitted, through, second, random = survey(0.22, "admitted", "through", "second", "random")
    assert admitted.hits >= 0.97 * through.hits
    assert admitted.blocks_written <= 0.8 * through.blocks_written
    assert admitted.hits >= random.hits
    half, sparing, most_sparing = (survey(least_hits, "admitted")[0] for least_hits in (0.35, 0.5, 1))
    assert half.hits >= 0.75 * through.hits
    assert half.blocks_written <= 0.5 * through.blocks_written
    assert hits_at([most_sparing, sparing], second.blocks_written) >= second.hits


# what is printed ------------------------------------------------------------------------------------------------------


def test_json_has_a_record_for_each_size_and_write(tmp_path: Path, run: Run, seed: int) -> None:
    trace = generated_trace(seed)
    path = write_trace(tmp_path / "trace.jsonl", trace)
    code, fields, _ = run(path, "--slots", "20,40", "--disk-slots", "60,90,60")
    assert code == 0
    assert {name: fields[name] for name in fields if name != "records"} == {
        "metadata_only": True,
        "trace": str(path),
        "workload": None,
        "seed": 0,
        "requests": len(trace),
        "blocks_requested": sum(map(len, trace)),
        "policy": "prefix",
        "disk_policy": "prefix",
        "least_hits": 0.22,
        "saving": None,
    }
    rows = [(row["slots"], row["disk_slots"], row["write"]) for row in fields["records"]]
    assert rows == [(slots, disk, write) for slots in (20, 40) for disk in (60, 90) for write in WRITES]
    for row in fields["records"]:
        assert row["blocks_hit"] == row["host_hits"] + row["disk_hits"]
        assert row["hit_rate"] == row["blocks_hit"] / fields["blocks_requested"]
        assert row["blocks_read"] == row["disk_hits"]
        assert row["blocks_written"] - row["blocks_evicted"] <= row["disk_slots"]
        assert (row["share"] is None) == (row["write"] != "random")


def test_options_reach_the_replay(tmp_path: Path, run: Run, seed: int) -> None:
    path = write_trace(tmp_path / "trace.jsonl", generated_trace(seed))
    options = ("--slots", 30, "--disk-slots", 90, "--policy", "lru", "--disk-policy", "s3fifo", "--least-hits", "0")
    _, fields, _ = run(path, *options, "--write", "admitted")
    requests: list[Request] = read_timed_trace(path).requests
    expected = Survey([30], [90], Policies("lru", "s3fifo"), ["admitted"], 0.0, 0).run(requests, Output(as_json=True))
    assert (fields["disk_policy"], fields["least_hits"]) == ("s3fifo", 0)
    assert [row["blocks_written"] for row in fields["records"]] == [expected[0].blocks_written]
    assert [row["blocks_hit"] for row in fields["records"]] == [expected[0].hits]


def test_times_saved_and_lost(tmp_path: Path, run: Run) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1, 2], [3, 4], [1, 2]])
    rates = ("--model", "llama-3.1-8b", "--prefill-tokens-per-second", 1000, "--load-gb-per-s", 50)
    _, fields, _ = run(path, "--slots", 2, "--disk-slots", 8, "--write", "through", *rates, "--disk-gb-per-s", 5)
    (row,) = fields["records"]
    nbytes = 2 * 32 * MODELS["llama-3.1-8b"].bytes_per_block
    assert (row["host_hits"], row["disk_hits"], row["blocks_written"]) == (0, 2, 4)
    assert row["load_bytes"] == nbytes
    assert row["prefill_seconds_saved"] == 2 * 512 / 1000
    assert row["load_seconds"] == nbytes / 50e9
    assert row["disk_seconds"] == nbytes / 5e9
    assert row["seconds_saved"] == pytest.approx(1.024 - nbytes / 50e9 - nbytes / 5e9)
    assert fields["saving"]["disk_gb_per_s"] == 5
    _, fields, _ = run(path, "--slots", 2, "--disk-slots", 8, "--write", "through", *rates)
    assert fields["records"][0]["disk_seconds"] is None


def test_the_verdict_comes_first_and_text_has_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ("--model", "llama-3.1-8b", "--prefill-tokens-per-second", "1000", "--load-gb-per-s", "50")
    options = ("--workload", "documents", "--requests", "120", "--metadata-only", "--slots", "256")
    assert main(["replay", *options, "--disk-slots", "1048576", *rates, "--disk-gb-per-s", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("replay: 256 slots and 1,048,576 on a disk find ")
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.split(" ")[0] in WRITES][:5] == list(WRITES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--write", "all"), "--write is of no use without --disk-slots"),
        (("--least-hits", "1"), "--least-hits is of no use without --disk-slots"),
        (("--disk-policy", "lru"), "--disk-policy is of no use without --disk-slots"),
        (("--disk-gb-per-s", "1"), "--disk-gb-per-s is of no use without --disk-slots"),
        (("--disk-slots", "9", "--policy", "all"), "--policy all does not go with --disk-slots"),
        (("--disk-slots", "9", "--disk-gb-per-s", "1"), "--disk-gb-per-s is of no use without --prefill-tokens"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run: Run, options: tuple[str, ...], message: str) -> None:
    code, _, error = run("--workload", "agents", *options)
    assert code == 2
    assert message in error


def test_a_disk_needs_a_folder_or_a_replay_without_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--workload", "agents", "--disk-slots", "9", "--model", "llama-3.1-8b"]) == 2
    assert "--disk-slots needs --disk-path" in capsys.readouterr().err


@pytest.mark.parametrize("write", ["second", "random", "all"])
def test_ways_of_writing_that_are_only_counted_need_a_replay_without_bytes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, write: str
) -> None:
    disk = ("--disk-slots", "9", "--disk-path", str(tmp_path), "--model", "llama-3.1-8b", "--backend", "simulated")
    assert main(["replay", "--workload", "agents", "--requests", "9", *disk, "--write", write]) == 2
    assert f"--write {write} needs --metadata-only: with bytes, admitted, through or none" in capsys.readouterr().err
