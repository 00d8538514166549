"""chat_server.measure: the same answers from every cache, and what each finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chatting import needs

needs("jax")

CONVERSATIONS, TURNS = 6, 3
SHARED = 32  # tokens


def write_trace(path: Path, *, sessions: bool = False) -> None:
    """Conversations take turns, so that each comes back after all the others. All share the first id."""
    with path.open("w") as file:
        for turn in range(TURNS):
            for number in range(CONVERSATIONS):
                ids = [0, *range(100 * (number + 1), 100 * (number + 1) + 4 * (turn + 1))]
                when = 1000 * (turn * CONVERSATIONS + number)
                row = {"timestamp": when, "hash_ids": ids, "output_length": 200}
                file.write(json.dumps(row | ({"session": number} if sessions else {})) + "\n")
        file.write(json.dumps({"timestamp": when, "hash_ids": [0, *range(7000, 7100)], "output_length": 200}) + "\n")


@pytest.mark.parametrize("over", [0.5, 4])
def test_all_caches_give_the_same_answers_and_find_what_they_hold(tmp_path: Path, over: float) -> None:
    from chat_server import measure

    trace, output = tmp_path / "trace.jsonl", tmp_path / "found.json"
    write_trace(trace)
    small = ["--model", "tiny", "--context", "256", "--batch", "2", "--chunk", "32", "--tokens", "16", "--pace", "200"]
    small += ["--most-answer", "4", "--prefill", "1"]
    small += ["--requests", "18"]
    where = ["--disk", str(tmp_path), "--json", str(output), "--oversubscribed", str(over)]
    assert measure.main([str(trace), *small, *where]) == 0
    found = json.loads(output.read_text())
    assert (found["requests"], found["left_out"], found["different_answers"]) == (18, 1, 0)
    tokens = sum((1 + 4 * (turn + 1)) * 16 for turn in range(TURNS)) * CONVERSATIONS
    assert found["prompt_tokens"] == tokens
    assert found["live_bytes"] * (1 + 4 * TURNS * CONVERSATIONS) == found["different_bytes"] * (
        1 + 4 * 2 * CONVERSATIONS
    )
    served = {each["cache"]: each for each in found["served"]}
    assert list(served) == ["unbounded", "device", "host", "disk"]
    for each in served.values():
        assert each["computed"] + each["device"] + each["host"] + each["disk"] >= tokens
        assert 0 < each["first_p50"] <= each["first_p95"]
    assert served["unbounded"]["host"] == served["device"]["host"] == served["device"]["disk"] == 0
    # Two requests that are computed at the same time may both compute the id that all share.
    least = served["unbounded"]["computed"]
    again = {cache: each["computed"] - least for cache, each in served.items()}
    assert max(abs(again[cache]) for cache in ("host", "disk")) <= SHARED
    if over < 1:  # room for twice what is live at once, which is all
        assert abs(again["device"]) <= SHARED
    else:
        assert again["device"] > 4 * SHARED
        assert served["host"]["host"] > 0
        assert served["disk"]["disk"] > 0


def test_sessions_prefetched_in_time_load_from_host_memory(tmp_path: Path) -> None:
    from chat_server import measure

    trace, output = tmp_path / "trace.jsonl", tmp_path / "found.json"
    write_trace(trace, sessions=True)
    small = ["--model", "tiny", "--context", "256", "--batch", "2", "--chunk", "32", "--tokens", "16"]
    small += ["--most-answer", "4", "--prefill", "1", "--requests", "18", "--pool", "0.4", "--hints", "prefetch"]
    small += ["--conversations", "7", "--lead", "0.3", "--caches", "disk"]
    where = ["--disk", str(tmp_path), "--json", str(output), "--oversubscribed", "8"]
    for pace in ("5", "1"):  # on a busy machine nothing may be in time
        assert measure.main([str(trace), *small, *where, "--pace", pace]) == 0
        found = json.loads(output.read_text())
        assert found["different_answers"] == 0
        assert [each["cache"] for each in found["served"]] == ["disk, prefetch"]
        returned = found["returned"]["prefetch"]
        assert returned["requests"] == CONVERSATIONS * (TURNS - 1)
        if returned["in_time"]:
            break
    assert returned["prefetched"] >= returned["in_time"] > 0
    assert returned["host"] + returned["disk"] + returned["in_time"] <= returned["requests"]
