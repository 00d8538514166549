"""kvoffload_bench.sessions: a small folder of recordings, and the trace worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvoffload.replay.trace import read_timed_trace
from kvoffload_bench import sessions


def ids(first: int, blocks: int) -> list[int]:
    return list(range(first, first + 8 * blocks))


def asked(seconds: float, blocks: list[int]) -> dict[str, Any]:
    return {"t": seconds, "in": 64 * len(blocks), "out": 7, "hash_ids": blocks}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lengths = {"tool_tokens": 512, "system_tokens": 511}  # a block of the trace and nearly another
    sub = {"t": 5.0, "duration_ms": 3000, "subagent_type": "Explore", "requests": [asked(1.0, ids(1, 2))]} | lengths
    first = {"requests": [asked(0.0, ids(1, 2)), sub, asked(9.0, [*ids(1, 3), 99])]} | lengths
    second = {"requests": [asked(0.0, ids(1, 2)), {"t": 1.0, "type": "note"}]} | lengths
    long = {"requests": [asked(0.0, ids(1, 1)), asked(9 * 3600.0, ids(1, 1))]} | lengths
    for number, session in enumerate([first, second, long]):
        (tmp_path / f"trace_{number}.json").write_text(json.dumps(session))
    return tmp_path


def test_sessions_share_their_prefix_alone_and_users_play_them_one_after_another(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sessions.main([str(folder), "--users", "1", "--sessions", "9", "--seed", "1"])
    written = capsys.readouterr().out
    rows = [json.loads(line) for line in written.splitlines()]
    assert [len(row["hash_ids"]) for row in rows] in ([2, 2, 3, 2], [2, 2, 2, 3]), "the long session is left out"
    longest = next(row for row in rows if len(row["hash_ids"]) == 3)
    of_first = [row for row in rows if row["session"] == longest["session"]]
    (other,) = [row for row in rows if row["session"] != longest["session"]]
    begin, sub, end = of_first
    assert end["timestamp"] - begin["timestamp"] == 9_000
    assert sub["timestamp"] - begin["timestamp"] == 6_000
    assert end["hash_ids"][:2] == begin["hash_ids"]
    assert not set(sub["hash_ids"]) & set(end["hash_ids"]), "a sub-agent has a prefix of its own"
    assert (other["hash_ids"][0], len(set(other["hash_ids"]) & set(end["hash_ids"]))) == (end["hash_ids"][0], 1)
    (trace := tmp_path / "trace.jsonl").write_text(written)
    assert read_timed_trace(trace).sessions == [str(row["session"]) for row in rows]


def test_a_folder_without_recordings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no \.json files: give the folder traces"):
        sessions.main([str(tmp_path)])
