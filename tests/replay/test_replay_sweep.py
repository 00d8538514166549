"""`replay --metadata-only`: counts against oracles, the optimum, tables, figures, what hits are worth; its errors."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from benching import Run, running
from replay_oracles import (
    KNOWN_LRU_HITS,
    KNOWN_OPTIMUM,
    REAL_BLOCKS,
    Oracle,
    Served,
    belady,
    find_real_trace,
    generated_trace,
    keys_of,
    most_hits,
    tree_trace,
    write_trace,
)

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import DEFAULT_POLICY, POLICIES, make_policy
from kvoffload.commands import main
from kvoffload.internal.models import MODELS
from kvoffload.replay import hitplot
from kvoffload.replay.hits import OPTIMUM, HostPool, PolicyResult, belady_hits, hits_of_policies
from kvoffload.replay.report import Rates, print_policies
from kvoffload.replay.trace import Trace, read_timed_trace
from kvoffload.replay.workloads import make_workload
from kvoffload.terminal.console import Output

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not here")
DEFAULT_FLOOR = {512: 15_700, 2048: 29_600, 8192: 58_200, 32768: 96_000}  # hits of the default policy

run = pytest.fixture(running("replay", "--metadata-only"))


@pytest.fixture
def real_trace() -> Path:
    return find_real_trace()


# counts ---------------------------------------------------------------------------------------------------------------


def serve_as_oracle(requests: list[tuple[bytes, ...]], slots: int) -> CacheIndex:
    """Every request's hits, and the sums of what was stored and evicted, are the oracle's."""
    counted, oracle = HostPool(slots, make_policy("lru", slots)), Oracle(slots)
    index = counted.host
    sums = [0, 0, 0]
    for number, request in enumerate(requests):
        expected = oracle.serve(request)
        assert counted.serve(request) == ((expected.hits,), (), False), number
        sums = [before + now for before, now in zip(sums, expected, strict=True)]
    done = index.statistics()
    assert Served(done.hits, done.stored, done.evicted) == Served(*sums)
    assert (done.resident, done.pending, done.pinned, done.declined) == (len(oracle.present), 0, 0, 0)
    index.check()
    return index


@pytest.mark.parametrize("slots", [1, 7, 30, 64, 500])
def test_every_request_hits_what_the_oracle_hits(seed: int, slots: int) -> None:
    for trace in range(6):
        serve_as_oracle([keys_of(ids) for ids in generated_trace(seed + trace)], slots)


@pytest.mark.parametrize("slots", [512, 1000, 2048, 8192, 32768])
def test_every_request_of_the_real_trace_hits_what_the_oracle_hits(real_trace: Path, slots: int) -> None:
    requests = read_timed_trace(real_trace).requests
    assert sum(map(len, requests)) == REAL_BLOCKS
    hits = serve_as_oracle(requests, slots).statistics().hits
    assert KNOWN_LRU_HITS.get(slots, hits) == hits


def test_repeated_keys_and_requests_longer_than_the_cache(seed: int) -> None:
    random = np.random.default_rng(seed)
    requests = [tuple(random.bytes(1) for _ in range(random.integers(0, 12))) for _ in range(40)]
    few = [tuple(bytes([byte[0] % 6]) for byte in request) for request in requests]
    index = serve_as_oracle(few, 4)
    assert len(index) == 4
    assert index.statistics().hits > 0


def test_a_request_that_cannot_be_stored_is_counted_and_the_rest_goes_on() -> None:
    counted = HostPool(3, make_policy("lru", 3))
    index = counted.host
    assert counted.serve(keys_of([1, 2])) == ((0,), (), False)
    with index.acquire(keys_of([1, 2])):
        assert counted.serve(keys_of([3, 4])) == ((0,), (), True)
        assert counted.serve(keys_of([1, 5])) == ((1,), (), False)
    assert index.statistics().stored == 4, "3 was stored, 4 found no room"
    assert counted.serve(keys_of([3, 4])) == ((0,), (), False)


# the optimum ----------------------------------------------------------------------------------------------------------


def test_no_other_use_of_the_places_finds_more_than_the_optimum(seed: int) -> None:
    random = np.random.default_rng(seed)
    found = 0
    for _ in range(60):
        requests = tree_trace(random, requests=12, depth=3, branches=2)
        capacity = int(random.integers(1, 5))
        hits = sum(belady_hits(requests, capacity))
        assert hits == most_hits(requests, capacity), (requests, capacity)
        found += hits
    assert found > 100


def test_the_optimum_is_beladys_rule_with_the_deepest_first(seed: int) -> None:
    random = np.random.default_rng(seed)
    deepest = shallowest = 0
    for _ in range(20):
        requests = tree_trace(random, requests=60, depth=5, branches=2)
        capacity = int(random.integers(1, 15))
        by_request = belady_hits(requests, capacity)
        assert by_request == belady(requests, capacity)
        deepest += sum(by_request)
        shallowest += sum(belady(requests, capacity, deepest_first=False))
    assert deepest > 1.02 * shallowest


def test_the_optimum_of_nothing_and_of_no_room() -> None:
    assert belady_hits([], 3) == []
    assert belady_hits([(), (b"1",), (), (b"1",)], 1) == [0, 0, 0, 1]
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        belady_hits([], 0)


# the whole real trace -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", KNOWN_LRU_HITS)
def test_all_policies_on_the_whole_real_trace(real_trace: Path, run: Run, slots: int) -> None:
    code, fields, _ = run(real_trace, "--policy", "all", "--slots", slots)
    rows = {row["policy"]: row for row in fields["records"]}
    hits = {policy: row["blocks_hit"] for policy, row in rows.items()}
    assert (code, fields["blocks_requested"]) == (0, REAL_BLOCKS)
    assert (hits["lru"], hits["belady"]) == (KNOWN_LRU_HITS[slots], KNOWN_OPTIMUM[slots])
    assert hits[DEFAULT_POLICY] >= DEFAULT_FLOOR[slots]
    assert max(hits.values()) == hits["belady"]


# what is printed ------------------------------------------------------------------------------------------------------


def test_a_row_for_each_policy_and_capacity_and_the_optimum(tmp_path: Path, run: Run, seed: int) -> None:
    trace = generated_trace(seed)
    path = write_trace(tmp_path / "trace.jsonl", trace)
    code, fields, _ = run(path, "--policy", "all", "--slots", "8,20,8,500")
    requested = sum(map(len, trace))
    assert code == 0
    assert {name: fields[name] for name in fields if name != "records"} == {
        "metadata_only": True,
        "trace": str(path),
        "workload": None,
        "seed": 0,
        "requests": len(trace),
        "blocks_requested": requested,
        "saving": None,
    }
    rows = {(row["slots"], row["policy"]): row for row in fields["records"]}
    assert list(rows) == [(slots, policy) for slots in (8, 20, 500) for policy in (*sorted(POLICIES), "belady")]
    for (slots, policy), row in rows.items():
        hits = row["blocks_hit"]
        least, most = (rows[slots, name]["blocks_hit"] for name in ("lru", "belady"))
        assert row["hit_rate"] == hits / requested
        assert row["requests_refused"] == 0
        assert row["seconds"] >= 0
        assert row["share_of_optimum"] == (None if most <= least else (hits - least) / (most - least))
        counts = [row[name] for name in ("blocks_stored", "blocks_evicted", "blocks_declined")]
        if policy == "belady":
            assert counts == [None] * 3
        else:
            assert counts[0] - counts[1] <= slots
        if policy == "lru":
            assert (hits, *counts[:2], counts[2]) == (*Oracle(slots).serve_all(trace), 0)
    assert any(row["share_of_optimum"] for row in rows.values())


def test_without_lru_no_share_is_known(tmp_path: Path, run: Run) -> None:
    _, fields, _ = run(write_trace(tmp_path / "trace.jsonl", [[1, 2], [3], [1, 2]]), "--slots", 2)
    assert [row["policy"] for row in fields["records"]] == [DEFAULT_POLICY, "belady"]
    assert [row["share_of_optimum"] for row in fields["records"]] == [None, None]
    assert fields["records"][1]["blocks_hit"] == 2


def test_a_trace_without_reuse_has_rows_without_hits(tmp_path: Path, run: Run) -> None:
    code, fields, _ = run(write_trace(tmp_path / "trace.jsonl", [[], [1]]))
    assert code == 0
    assert [(row["blocks_hit"], row["hit_rate"], row["slots"]) for row in fields["records"]] == [(0, 0.0, 4096)] * 2


def test_the_table_has_what_json_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1, 2, 3], [4, 5, 6], [1, 2, 3]])
    options = ("--model", "llama-3.1-8b", "--prefill-tokens-per-second", "1000", "--load-gb-per-s", "50")
    assert main(["replay", str(path), "--metadata-only", "--slots", "3,6", "--policy", "all", "--wide", *options]) == 0
    printed = capsys.readouterr().out
    counts, _, worth = printed.partition("the time that hits save")
    rows, saved = (
        {(cells[0], cells[1]): cells[2:] for line in part.splitlines() if len(cells := re.split(" {2,}", line)) > 2}
        for part in (counts, worth)
    )
    assert "3 requests" in printed
    assert rows["lru", "3"][:5] == ["0", "0.00%", "9", "0", "6"]
    assert rows["lru", "3"][6] == "0.0%"
    assert rows["belady", "3"][:5] == ["3", "33.33%", "-", "-", "-"]
    assert rows["belady", "3"][6] == "100.0%"
    assert rows["lru", "6"][:5] == ["3", "33.33%", "6", "0", "0"]
    assert rows["lru", "6"][6] == "-"
    assert saved["belady", "3"] == saved["lru", "6"] == ["1.5 s", "0.0 s"]
    assert saved["lru", "3"] == ["0.0 s", "0.0 s"]
    assert "loads at 50 GB/s, as given" in " ".join(printed.split())
    assert "LRU to optimum: 0% is as many hits as lru, 100% as many as belady." in printed


def test_words_are_explained_where_they_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1]])
    assert main(["replay", str(path), "--metadata-only"]) == 0
    printed = capsys.readouterr().out
    assert "declined: " not in printed
    assert "LRU to optimum: " not in printed
    assert "1 block in 1 request\n" in printed
    rows = [PolicyResult(policy, 8, 0, 0.0, 0, 0, 3, 0, 0.1) for policy in ("lru", "belady")]
    print_policies(rows, "a title", None, Output(as_json=False))
    assert "\ndeclined: not stored, since " in capsys.readouterr().out


# what hits are worth --------------------------------------------------------------------------------------------------


def test_hits_save_prefill_and_cost_loads(tmp_path: Path, run: Run) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1, 2, 3], [1, 2, 3]])
    options = ("--model", "llama-3.1-8b", "--prefill-tokens-per-second", 3000, "--load-gb-per-s", 50)
    _, fields, _ = run(path, "--policy", "lru", *options)
    assert fields["saving"] == {
        "model": "llama-3.1-8b",
        "tokens_per_hash": 512,
        "prefill_tokens_per_second": 3000,
        "load_gb_per_s": 50,
        "load_gb_per_s_measured": False,
    }
    nbytes = 3 * 512 * 2 * 32 * 8 * 128 * 2  # hits, tokens, K and V, layers, heads, values, bytes of a value
    for row in fields["records"]:
        assert row["prefill_seconds_saved"] == pytest.approx(3 * 512 / 3000)
        assert row["load_bytes"] == nbytes
        assert row["load_seconds"] == pytest.approx(nbytes / 50e9)
    _, fields, _ = run(path, "--policy", "lru", "--tokens-per-hash", 24, *options)
    assert fields["records"][0]["load_bytes"] == nbytes * 24 // 512
    assert fields["records"][0]["prefill_seconds_saved"] == pytest.approx(3 * 24 / 3000)


def test_without_a_bandwidth_only_no_hits_take_no_time() -> None:
    rates = Rates(MODELS["qwen2.5-7b"], 512, 1e4, load_gb_per_s=None)
    assert rates.load_seconds(0) == 0
    assert rates.load_seconds(1) is None
    assert "loads not measured" in rates.describe()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prefill-tokens-per-second", "9", "--load-gb-per-s", "1"), "needs --model"),
        (("--prefill-tokens-per-second", "9", "--model", "qwen2.5-7b"), "needs --load-gb-per-s here"),
        (("--load-gb-per-s", "9"), "without --prefill-tokens-per-second"),
        (("--prefill-tokens-per-second", "0"), "must be above 0"),
        (("--prefill-tokens-per-second", "inf"), "must be above 0 and finite"),
        (("--load-gb-per-s", "fast"), "must be a number"),
        (("--in-flight", "2"), "--in-flight 2 needs bytes"),
        (("--slots", "1,,2"), "must be an integer"),
        (("--policy", "belady"), "invalid choice"),
        (("--workload", "documents"), "not allowed with argument TRACE"),
        (("--plot", "figure.pdf"), "--plot must name a .png file"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("kvoffload.terminal.figures.find_spec", lambda _: True)
    code, fields, stderr = run(write_trace(tmp_path / "trace.jsonl", [[1]]), *options)
    assert (code, fields) == (2, {})
    assert said in stderr


def test_traffic_is_needed(run: Run) -> None:
    code, _, stderr = run()
    assert code == 2
    assert "replay needs a TRACE, a file, or --workload, one of chat, system-prompts" in stderr
    code, _, stderr = run("--workload", "talk")
    assert code == 2
    assert "invalid choice: 'talk'" in stderr


# figures --------------------------------------------------------------------------------------------------------------


@needs_matplotlib
def test_the_figure_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "hits.png"
    options = ("--workload", "documents", "--requests", "100", "--metadata-only", "--policy", "all")
    assert main(["replay", *options, "--slots", "128,256,512", "--plot", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 10_000


@needs_matplotlib
def test_the_figure_has_a_line_for_each_policy_and_the_optimum(capsys: pytest.CaptureFixture[str]) -> None:
    requests = make_workload("documents", 100)
    output = Output(as_json=True)
    rows = hits_of_policies(Trace(requests), [512, 128], ["lru", "prefix"], output)
    ceiling = hitplot.seen_before(requests)
    (panel,) = hitplot.make(rows, ceiling, "a title").axes
    *lines, limit = panel.lines
    assert [list(line.get_xdata()) for line in lines] == [[128, 512]] * 3
    assert set(limit.get_ydata()) == {ceiling}
    drawn = {tuple(line.get_ydata()) for line in lines}
    assert drawn == {
        tuple(100 * row.hit_rate for row in reversed(rows) if row.policy == policy)
        for policy in ("lru", "prefix", "belady")
    }
    labels = {"LRU", "prefix, the default", "Belady, knows the future", f"seen before: {ceiling:.1f}%"}
    assert {text.get_text().strip() for text in panel.texts} == labels
    assert capsys.readouterr().out == ""


@needs_matplotlib
def test_a_figure_without_any_hits_can_be_drawn() -> None:
    rows = [PolicyResult(policy, 8, 0, 0.0, 0, 0, 0, 0, 0.1) for policy in ("lru", "belady")]
    (panel,) = hitplot.make(rows, 0.0, "nothing").axes
    assert panel.get_ylim()[1] > 0


def test_the_ceiling_is_what_an_unbounded_cache_finds() -> None:
    requests = make_workload("documents", 100)
    (unbounded,) = hits_of_policies(Trace(requests), [100_000], ["lru"], Output(as_json=True))[:1]
    assert hitplot.seen_before(requests) == 100 * unbounded.hit_rate > 0
    assert hitplot.seen_before([]) == 0


def test_every_policy_has_its_line() -> None:
    assert set(hitplot._SERIES) == {*POLICIES, OPTIMUM}


def test_without_matplotlib_the_command_says_what_to_install_before_it_reads(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.terminal.figures.find_spec", lambda _: None)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    code, _, stderr = run(broken, "--plot", tmp_path / "hits.png")
    assert code == 2
    assert "pip install 'kvoffload[plot]'" in stderr


@needs_matplotlib
def test_a_figure_that_cannot_be_written_is_an_error(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    trace = write_trace(tmp_path / "trace.jsonl", [[1]])
    for target, said in (("file/hits.png", "no figures can be written into"), ("folder.png", "cannot be written to")):
        code, _, stderr = run(trace, "--plot", tmp_path / target)
        assert code == 2
        assert said in stderr
