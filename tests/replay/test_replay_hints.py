"""`replay --hints`: sessions of a trace, and what each kind of hints brings, worked out by hand; its errors."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benching import Run, running
from replay_oracles import keys_of, write_lines, write_trace

from kvoffload.cache.policies import make_policy
from kvoffload.commands import main
from kvoffload.replay import hitplot
from kvoffload.replay.hits import HINTS, HostPool, PolicyResult, Programs, hits_of_policy
from kvoffload.replay.trace import Trace, read_timed_trace

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not here")

Line = tuple[float, str, list[int]]  # seconds, session, hash ids

# In four slots LRU finds the second request alone: C displaces 1 and 2, A then 3 and 4, and B then 5 and 6.
# release: A has ended, so B displaces 1 and 2, and C finds 5 and 6.
# due: also, A has kept a promise, so C displaces 3 and 4, and A finds 1 and 2.
LINES: list[Line] = [
    (0, "A", [1, 2]),
    (1, "A", [1, 2]),
    (2, "B", [3, 4]),
    (3, "C", [5, 6]),
    (5, "A", [1, 2]),
    (100, "B", [3, 4]),
    (101, "C", [5, 6]),
]
HITS = {"none": 2, "names": 2, "release": 4, "due": 6}
ANSWERS = {  # accepted, clipped, declined
    "none": (0, 0, 0),
    "names": (0, 0, 0),
    "release": (3, 0, 0),
    "due": (4, 0, 3),  # the first promise of a session is declined
}

run = pytest.fixture(running("replay", "--metadata-only"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    lines = ({"timestamp": 1000 * seconds, "session": name, "hash_ids": ids} for seconds, name, ids in LINES)
    return write_lines(tmp_path / "trace.jsonl", lines)


def trace_of(lines: Sequence[Line]) -> Trace:
    seconds, sessions, ids = zip(*lines, strict=True)
    return Trace([keys_of(each) for each in ids], list(seconds), list(sessions))


def replayed(lines: Sequence[Line], slots: int, hints: str) -> PolicyResult:
    return hits_of_policy(trace_of(lines), slots, "lru", lambda *_: None, hints)


# the trace ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sessions"),
    [
        ([{"session": "a"}, {"session": 7}, {"session": "a"}], ["a", "7", "a"]),
        ([{"session": "a"}, {}, {"session": "a"}], None),
        ([{"session": "a"}, {"session": None}, {"session": "a"}], None),
        ([{}, {}], None),
    ],
)
def test_sessions_of_a_trace(tmp_path: Path, fields: list[dict[str, Any]], sessions: list[str] | None) -> None:
    path = write_lines(tmp_path / "trace.jsonl", ({"hash_ids": [1]} | each for each in fields))
    assert read_timed_trace(path) == Trace([keys_of([1])] * len(fields), None, sessions)


@pytest.mark.parametrize("wrong", [1.5, True, ["a"], {}])
def test_a_session_of_a_wrong_type_is_refused(tmp_path: Path, run: Run, wrong: object) -> None:
    path = write_lines(tmp_path / "trace.jsonl", [{"hash_ids": [1]}, {"hash_ids": [1], "session": wrong}])
    code, _, stderr = run(path)
    assert code == 2
    assert f'{path}, line 2: "session" must be a string or an integer, got {wrong!r}' in stderr


# hits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hints", HINTS)
def test_what_each_kind_of_hints_finds(hints: str) -> None:
    found = replayed(LINES, 4, hints)
    assert (found.blocks_hit, found.hints) == (HITS[hints], hints)
    assert (found.hints_accepted, found.hints_clipped, found.hints_declined) == ANSWERS[hints]


def test_a_promise_is_due_at_a_time_of_the_trace() -> None:
    """C displaces blocks of B, who is due at 35, and not of A, due at 34. If no time passed between the two promises, A
    would lose them: due in 32 seconds, B in 8.
    """
    lines: list[Line] = [
        (0, "A", [1, 2]),
        (1, "B", [3, 4]),
        (2, "A", [1, 2]),
        (27, "B", [3, 4]),
        (28, "C", [5, 6, 7, 8, 9, 10]),
        (32, "B", [3]),
        (33, "A", [1, 2]),
    ]
    assert [replayed(lines, 8, hints).blocks_hit for hints in ("release", "due")] == [5, 6]


def test_nothing_is_promised_for_later_than_2048_seconds() -> None:
    found = replayed([(0, "A", [1]), (2048, "A", [1]), (4097, "A", [1])], 4, "due")
    assert found.hints_accepted + found.hints_clipped + found.hints_declined == 2  # retain, and release at the end


def test_requests_name_their_sessions_at_the_times_of_the_trace() -> None:
    trace = trace_of(LINES)
    programs = Programs(trace, "names")
    pool = HostPool(4, make_policy("lru", 4), clock=programs.clock)
    assert trace.seconds is not None
    for keys, seconds in zip(trace.requests, trace.seconds, strict=True):
        programs.serve(pool, keys)
        assert programs.clock() == seconds
    assert pool.host.hint("release", session="C").outcome == "accepted"
    assert pool.host.hint("release", session="D").outcome == "declined"
    pool.host.check()


# what is printed ------------------------------------------------------------------------------------------------------


def test_json_of_all_hints_goes_from_lru_to_the_optimum(path: Path, run: Run) -> None:
    code, fields, _ = run(path, "--policy", "lru", "--slots", 4, "--hints", "all")
    *rows, best = fields["records"]
    assert code == 0
    assert {row["hints"]: row["blocks_hit"] for row in rows} == HITS
    assert [row["share_of_optimum"] for row in rows] == [0.0, 0.0, 0.5, 1.0]
    names = ("hints_accepted", "hints_clipped", "hints_declined")
    assert {row["hints"]: tuple(row[name] for name in names) for row in rows} == ANSWERS
    assert (best["policy"], best["hints"], best["blocks_hit"]) == ("belady", "none", 6)


def test_lru_without_hints_is_there_to_compare_with(path: Path, run: Run) -> None:
    def rows(*options: object) -> list[tuple[str, str]]:
        _, fields, _ = run(path, "--policy", "arc", "--slots", 4, *options)
        return [(row["policy"], row["hints"]) for row in fields["records"]]

    assert rows("--hints", "due") == [("lru", "none"), ("arc", "due"), ("belady", "none")]
    assert rows("--hints", "none") == rows() == [("arc", "none"), ("belady", "none")]


def test_the_table_names_hints_and_explains_them(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", str(path), "--metadata-only", "--policy", "lru", "--slots", "4"]
    assert main([*command, "--hints", "all", "--wide"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("replay: with 4 slots, lru + due finds 42.86% of the blocks asked for")
    rows = [line.split("  ")[0] for line in printed.splitlines()]
    assert [row for row in rows if row.startswith("lru")] == ["lru", "lru + names", "lru + release", "lru + due"]
    assert "release: these also say when they end." in printed
    assert main(command) == 0
    assert "release" not in capsys.readouterr().out


@needs_matplotlib
def test_lines_of_a_figure_are_told_apart() -> None:
    rows = [
        PolicyResult(policy, 8, 10 + number, 0.1, 0, 0, 0, 0, 0.1, hints=hints)
        for policy in ("prefix", "lru")
        for number, hints in enumerate(HINTS)
    ]
    (panel,) = hitplot.make([*rows, PolicyResult("belady", 8, 20, 0.2, 0, 0, 0, 0, 0.1)], 0.5, "a title").axes
    *lines, _ = panel.lines
    looks = {(line.get_color(), str(line._dash_pattern)) for line in lines}
    assert len(looks) == len(lines) == 9
    labels = {text.get_text() for text in panel.texts}
    assert {"LRU", "lru + due, dotted", "prefix + names, dashed", "prefix + due, dotted"} < labels


# errors ---------------------------------------------------------------------------------------------------------------


def test_hints_need_sessions_and_times(tmp_path: Path, run: Run) -> None:
    bare = write_trace(tmp_path / "bare.jsonl", [[1], [1]])
    named = write_lines(tmp_path / "named.jsonl", [{"hash_ids": [1], "session": 1}] * 2)
    timed = write_lines(tmp_path / "timed.jsonl", ({"hash_ids": [1], "timestamp": stamp} for stamp in (1, 2)))
    for traffic in ((bare,), (named,), (timed,), ("--workload", "agents", "--requests", 3)):
        code, fields, stderr = run(*traffic, "--hints", "release")
        assert (code, fields) == (2, {})
        assert '--hints release needs a trace whose lines all have a "session", and a "timestamp"' in stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "qwen2.5-0.5b"), "--hints due needs --metadata-only"),
        (("--metadata-only", "--disk-slots", "8"), "--hints due does not go with --disk-slots"),
        (("--metadata-only", "--hints", "retain"), "invalid choice: 'retain'"),
    ],
)
def test_hints_that_do_not_go_with_other_options_are_refused(
    path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert main(["replay", str(path), "--hints", "due", *options]) == 2
    assert said in capsys.readouterr().err
