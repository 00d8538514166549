"""Makes a trace for `kvoffload replay` of recorded agent sessions, as users play them.

    git clone https://github.com/callanjfox/kv-cache-tester; git -C kv-cache-tester checkout 94f6046
    python -m kvoffload_bench.sessions kv-cache-tester/traces --users 24 --sessions 120 --seed 5 > agents.jsonl

Each file of the folder is a recorded session of a coding agent: its requests, sub-agents nested as requests of their
own, with ids of blocks of 64 tokens. The sessions are shuffled, and users play them, one after another each, with two
minutes between them on average. Recordings of more than eight hours are left out.

A block of the trace is 8 recorded blocks, 512 tokens. The recorded ids are those of one session; sessions whose tools
and system prompts are equally long are taken to share these, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

RECORDED = 8  # blocks of 64 tokens in a block of the trace
LONGEST = 8 * 3600  # seconds of a session
FIRST = 1800  # seconds in which the users come
BETWEEN = 120  # seconds from one session of a user to the next, on average


class Asked(NamedTuple):
    """A request: when, in seconds, its tokens and those of the answer, its session's number, and its blocks."""

    seconds: float
    tokens: int
    answer: int
    session: int
    blocks: list[int]


class Blocks:
    """Numbers blocks: equal ones behind equal ones have one number."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def chain(self, ids: list[int], session: int, prefix: object, shared: int) -> list[int]:
        """`ids`: recorded ones. The first `shared` blocks are those of all sessions with this prefix."""
        chain, parent = list[int](), 0
        for place in range(len(ids) // RECORDED):
            mine = tuple(ids[place * RECORDED : (place + 1) * RECORDED])
            content = (prefix, place) if place < shared else (parent, session, mine)
            parent = self._numbers.setdefault(content, len(self._numbers) + 1)
            chain.append(parent)
        return chain


def read(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise SystemExit(f"{folder} has no .json files: give the folder traces of kv-cache-tester")
    return [json.loads(file.read_text()) for file in files]


def seconds_of(session: dict[str, Any]) -> float:
    return max((each["t"] + (each.get("duration_ms") or 0) / 1000 for each in session["requests"]), default=0.0)


def requests_of(session: dict[str, Any], number: int, begin: float, blocks: Blocks) -> Iterator[Asked]:
    for entry in session["requests"]:
        inner = entry.get("requests")  # of a sub-agent
        source = entry if inner else session
        tools, system = source.get("tool_tokens") or 0, source.get("system_tokens") or 0
        prefix = (bool(inner), entry.get("subagent_type") if inner else None, tools, system)
        for request in inner or [entry]:
            if "hash_ids" in request:
                when = begin + entry["t"] + (request["t"] if inner else 0)
                chain = blocks.chain(request["hash_ids"], number, prefix, (tools + system) // (64 * RECORDED))
                yield Asked(when, request["in"], request["out"], number, chain)


def play(recorded: list[dict[str, Any]], users: int, sessions: int, seed: int) -> list[Asked]:
    """The requests of all users, in the order of their times."""
    chance, blocks, asked = random.Random(seed), Blocks(), list[Asked]()
    short = [each for each in recorded if seconds_of(each) <= LONGEST]
    chance.shuffle(short)
    free_at = [chance.random() * FIRST for _ in range(users)]
    for number, session in enumerate(short[:sessions]):
        user = min(range(users), key=free_at.__getitem__)
        asked += requests_of(session, number, free_at[user], blocks)
        free_at[user] += seconds_of(session) + chance.expovariate(1 / BETWEEN)
    return sorted(asked, key=lambda each: each.seconds)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="kvoffload_bench.sessions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--users", type=int, default=24, help="at the same time (%(default)s)")
    parser.add_argument("--sessions", type=int, default=120, help="in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=5, help="(%(default)s)")
    chosen = parser.parse_args(arguments)
    asked = play(read(chosen.folder), chosen.users, chosen.sessions, chosen.seed)
    for seconds, tokens, answer, session, blocks in asked:
        if blocks:
            row = {
                "timestamp": int((seconds - asked[0].seconds) * 1000),
                "input_length": tokens,
                "output_length": answer,
                "session": session,
                "hash_ids": blocks,
            }
            sys.stdout.write(json.dumps(row, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
