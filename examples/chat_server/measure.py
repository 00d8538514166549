"""What offloading saves: the time to the first token, on a recorded trace, with and without it.

    python -m chat_server.measure conversation_trace.jsonl --model llama-8b --conversations 150 --pace 50

It serves the same requests at the same times with four caches: blocks on the device alone; with a pool in host memory
below; with a disk below that; and with a device that has room for all. The device has room for all blocks that are
live at once (a request has used them, and another one will), or for a half, a quarter, ... of them: `--oversubscribed`.
All must give the same answers: the exit status is 1 if one differs.

With `--hints` a pool has room for `--pool` of all blocks, and is compared with itself: by LRU ("lru"); as it is by
default ("none"); with the names of the sessions ("names"); and if each request says, rounded up, when the next one of
its session is due, or that it is the last ("due"). "prefetch" is "due", and `--lead` seconds before a session comes
back the cache is told to bring its blocks from the disk. Below each cache with a disk a line tells of the sessions that
came back after more than twice that time: how many requests were loaded from host memory alone, how many from the disk,
too, and how long the first token took in the median; and of those that had to be prefetched, how many were in host
memory in time.

A trace has JSON lines with "timestamp" (ms), "hash_ids", one for each stretch of a prompt, and "output_length".
Requests with equal leading ids share that prefix, as in the Mooncake traces. A stretch becomes `--tokens` tokens, the
same ones for the same id, and an answer is shortened as much as its prompt. Of the conversations of a trace some are
drawn, with all their requests: those with the same "session", or, where there are none, the same first id that less
than a twentieth of all requests have. Requests that do not fit into `--context` are left out, and counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from paged_decode.backend import ONE_ALGORITHM
from paged_decode.model import BLOCK_TOKENS

CACHES = ("device", "host", "disk", "unbounded")
HINTS = ("lru", "none", "names", "due", "prefetch")
_DUE = (8.0, 32.0, 128.0, 512.0, 2048.0)  # seconds of the trace
_STRETCH = 512  # tokens of the recorded prompts that a hash id stands for
_LEAST_DEVICE = 1  # context, however much is oversubscribed
_ROOM = 1.02  # of a pool or disk, beyond the blocks that it is to hold


@dataclass(frozen=True)
class Recorded:
    """A request of the trace: when it comes, in seconds, its prompt's ids, how many tokens it generates, its session,
    and the seconds until the next one of that; None: there is none.
    """

    seconds: float
    ids: tuple[int, ...]
    answer: int
    session: str
    returns: float | None = None


@dataclass(frozen=True)
class Served:
    """How the requests of a trace were served by one cache. Times are in milliseconds.

    Attributes:
        first_p50, first_p95: from the arrival of a request to its first token.
        tokens_per_second: generated, from the first arrival to the last token.
        computed: tokens of prompts that were computed. After a preemption they count again.
        device, host, disk: tokens of prompts that were found there.
    """

    cache: str
    oversubscribed: float
    first_p50: float
    first_p95: float
    tokens_per_second: float
    computed: int
    device: int
    host: int
    disk: int


@dataclass(frozen=True)
class Returned:
    """Requests of sessions that came back after more than twice `--lead`; medians of the time to the first token are in
    milliseconds, and None where there are no requests.

    Attributes:
        host: loaded from host memory alone, and not prefetched.
        disk: loaded from the disk, too.
        prefetched: had blocks that were not in host memory, `--lead` seconds before.
        in_time: of these, loaded from host memory alone.
    """

    requests: int
    host: int
    host_ms: float | None
    disk: int
    disk_ms: float | None
    prefetched: int
    in_time: int
    in_time_ms: float | None


def read(chosen: argparse.Namespace) -> tuple[list[Recorded], int]:
    """The requests of some conversations in the order of their times, and how many of them do not fit."""
    with chosen.trace.open() as lines:
        rows = [row for row in map(json.loads, lines) if row["hash_ids"]]
    users = Counter(number for row in rows for number in set(row["hash_ids"]))
    of: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        own = (number for number in row["hash_ids"] if users[number] <= len(rows) / 20)
        of.setdefault(row.get("session", next(own, None)), []).append(row)
    drawn = random.Random(chosen.seed).sample(list(of), min(chosen.conversations, len(of)))
    found, left_out = list[Recorded](), 0
    for row in sorted((row for each in drawn for row in of[each]), key=lambda row: row["timestamp"]):
        answer = max(1, min(chosen.most_answer, row["output_length"] * chosen.tokens // _STRETCH))
        if len(row["hash_ids"]) * chosen.tokens + answer > chosen.context:
            left_out += 1
        else:
            session = str(row.get("session", row["hash_ids"][0]))
            found.append(Recorded(row["timestamp"] / 1e3, tuple(row["hash_ids"]), answer, session))
    del found[chosen.requests :]
    following = dict[str, float]()
    for place, each in reversed(list(enumerate(found))):
        if each.session in following:
            found[place] = replace(each, returns=following[each.session] - each.seconds)
        following[each.session] = each.seconds
    return found, left_out


def live_at_once(requests: list[Recorded]) -> int:
    """The most hash ids that had been used, and would be again. The best cache that there could be needs so many."""
    first, last = dict[int, int](), dict[int, int]()
    for place, request in enumerate(requests):
        for number in request.ids:
            first.setdefault(number, place)
            last[number] = place
    change = np.zeros(len(requests), dtype=int)
    for number, place in last.items():
        if place > first[number]:
            change[first[number]] += 1
            change[place] -= 1
    return int(change.cumsum().max())


def prompt_of(recorded: Recorded, tokens: int, vocabulary: int) -> list[int]:
    stretches = [np.random.default_rng([each]).integers(vocabulary, size=tokens) for each in recorded.ids]
    return [int(token) for token in np.concatenate(stretches)]


def wanted(recorded: Recorded, hints: str, pace: float) -> Any:
    from chat_server.requests import Wanted

    if hints not in ("names", "due", "prefetch"):
        return Wanted(max_tokens=recorded.answer)
    due = next((time for time in _DUE if recorded.returns is not None and recorded.returns <= time), None)
    told = hints != "names"
    return Wanted(
        max_tokens=recorded.answer,
        session=recorded.session,
        due=due / pace if told and due is not None else None,
        last=told and recorded.returns is None,
    )


def serve(
    engine: Any, requests: list[Recorded], prompts: list[list[int]], pace: float, hints: str, lead: float
) -> tuple[list[Any], float, list[int]]:
    """Submit each at its time, and wait for all; the engine's requests, the seconds that it took, and which requests
    had no host memory for some of their blocks when their sessions were prefetched.
    """
    served, ended, fetched = [], threading.Semaphore(0), list[int]()
    begin, first = time.monotonic(), requests[0].seconds
    events = [(each.seconds - first, place, False) for place, each in enumerate(requests)]
    for place, each in enumerate(requests if hints == "prefetch" else ()):
        if each.returns is not None and each.returns > 2 * lead * pace:  # the next one's, which is still to come
            following = next(
                number for number in range(place + 1, len(requests)) if requests[number].session == each.session
            )
            events.append((requests[following].seconds - first - lead * pace, following, True))

    def deliver(token: int | None) -> None:
        if token is None:
            ended.release()

    for seconds, place, prefetch in sorted(events):
        time.sleep(max(0.0, begin + seconds / pace - time.monotonic()))
        if not prefetch:
            served.append(engine.submit(prompts[place], wanted(requests[place], hints, pace), deliver))
        elif engine.cache.hint("prefetch", session=requests[place].session, ttl=10 * lead, due=lead).blocks:
            fetched.append(place)
    for _ in served:
        while not ended.acquire(timeout=1.0):
            if engine.error is not None:
                raise RuntimeError("the engine has ended") from engine.error
    return served, max(each.finished for each in served) - begin, fetched


def returned_of(requests: list[Recorded], served: list[Any], first: Any, longer: float, fetched: list[int]) -> Returned:
    """`first`: milliseconds to the first token; `longer`: seconds of the trace; `fetched`: the requests whose sessions
    were prefetched in part.
    """
    came = dict[str, float]()
    returning = []
    for place, each in enumerate(requests):
        if came.get(each.session, 0.0) > longer:
            returning.append(place)
        came[each.session] = each.returns or 0.0
    disk = [place for place in returning if served[place].hits["disk"]]
    host = [place for place in returning if served[place].hits["host"] and place not in disk]
    in_time = [place for place in fetched if place in host]
    rest = [place for place in host if place not in fetched]
    middle = [round(float(np.median(first[each])), 1) if each else None for each in (rest, disk, in_time)]
    counts = len(fetched), len(in_time)
    return Returned(len(returning), len(rest), middle[0], len(disk), middle[1], *counts, middle[2])


def engine_options(
    chosen: argparse.Namespace, cache: str, hints: str, blocks: int, live: float, block_bytes: int
) -> dict[str, Any]:
    """What an engine may use, if there are so many different blocks, and so many of the live ones fit on the device."""
    context = chosen.context // BLOCK_TOKENS
    device = blocks + chosen.batch * context
    if cache != "unbounded":
        answers = chosen.batch * (1 + -(-chosen.most_answer // BLOCK_TOKENS))
        device = max(int(live) + answers, _LEAST_DEVICE * context)
    pool = int(blocks * block_bytes * _ROOM * (chosen.pool if cache == "disk" or chosen.hints else 1.0))
    return {
        "device_blocks": device + 1,
        "offload": cache in ("host", "disk"),
        "policy": "lru" if hints == "lru" else "prefix",
        "codec": chosen.codec,
        "pool_bytes": max(pool, 2 * block_bytes * context),
        "disk_bytes": int(2 * blocks * block_bytes * _ROOM) + (64 << 20) if cache == "disk" else 0,
    }


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    import jax

    from chat_server import models
    from chat_server.engine import Engine, EngineOptions

    requests, left_out = read(chosen)
    if not requests:
        raise SystemExit(f"{chosen.trace} has no request that fits into --context {chosen.context}")
    dtype = models.default_dtype(chosen.model)
    model = models.load(chosen.model, dtype)
    prompts = [prompt_of(each, chosen.tokens, model.size.vocabulary) for each in requests]
    blocks = len({number for each in requests for number in each.ids}) * chosen.tokens // BLOCK_TOKENS
    live = live_at_once(requests) * chosen.tokens // BLOCK_TOKENS
    size = model.size
    block_bytes = 2 * size.layers * BLOCK_TOKENS * size.kv_heads * size.head_size * (2 if dtype == "bfloat16" else 4)
    table, answers, differ, returned = list[Served](), list[list[int]](), 0, dict[str, Returned]()
    told = {"device": ["none"], "host": chosen.hints or ["none"], "disk": chosen.hints or ["none"]}
    cells = [("unbounded", "none", 1.0)] if "unbounded" in chosen.caches else []
    for over in chosen.oversubscribed:
        cells += [(cache, hints, over) for cache in told if cache in chosen.caches for hints in told[cache]]
    for cache, hints, over in cells:
        options = engine_options(chosen, cache, hints, blocks, live / over, block_bytes)
        with tempfile.TemporaryDirectory(dir=chosen.disk) as folder:
            options["disk"] = Path(folder, "blocks") if cache == "disk" else None
            given = EngineOptions(
                identity=model.identity,
                dtype=dtype,
                context_tokens=chosen.context,
                chunk_tokens=chosen.chunk,
                batch=chosen.batch,
                most_waiting=len(requests),
                prefill_tokens_per_second=chosen.prefill,
                **options,
            )
            with Engine(model.size, model.weights, given) as engine:
                engine.warm_up()
                engine.start()
                served, seconds, fetched = serve(engine, requests, prompts, chosen.pace, hints, chosen.lead)
        answers = answers or [each.generated for each in served]
        differ += sum(each.generated != answer for each, answer in zip(served, answers, strict=True))
        first = np.array([each.first_token - each.submitted for each in served]) * 1e3
        hits = {name: sum(each.hits[name] for each in served) for name in CACHES[:3]}
        generated, computed = sum(len(each.generated) for each in served), sum(each.prompt_computed for each in served)
        p50, p95 = (round(float(value), 1) for value in np.percentile(first, (50, 95)))
        name = f"{cache}, {hints}" if chosen.hints and cache in ("host", "disk") else cache
        table.append(Served(name, over, p50, p95, round(generated / seconds, 1), computed, **hits))
        show(table[-1], len(table) == 1)
        if cache == "disk" and chosen.hints:
            returned[hints] = returned_of(requests, served, first, 2 * chosen.lead * chosen.pace, fetched)
            print(f"            returning: {returned[hints]}", flush=True)
    return {
        "trace": chosen.trace.name,
        "model": chosen.model,
        "codec": chosen.codec,
        "device": jax.devices()[0].device_kind,
        "requests": len(requests),
        "left_out": left_out,
        "prompt_tokens": sum(map(len, prompts)),
        "different_bytes": blocks * block_bytes,
        "live_bytes": live * block_bytes,
        "different_answers": differ,
        "returned": {hints: asdict(each) for hints, each in returned.items()},
        "served": [asdict(each) for each in table],
    }


def show(served: Served, heading: bool) -> None:
    if heading:
        print(
            "cache       device has  first token: p50  p95 (ms)  tokens/s  prompts: computed  from device, host, disk"
        )
    tokens = served.computed + served.device + served.host + served.disk
    computed, *found = (f"{getattr(served, name) / tokens:.0%}" for name in ("computed", *CACHES[:3]))
    share = "all" if served.cache == "unbounded" else f"1/{served.oversubscribed:g}"
    times = f"{served.first_p50:17.1f} {served.first_p95:9.1f} {served.tokens_per_second:9.1f}"
    print(f"{served.cache:11} {share:>10} {times} {computed:>18}  {', '.join(found):>23}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="chat_server.measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("trace", type=Path)
    add("--model", default="smollm2", help="smollm2, or with random weights tiny, llama-1b, llama-8b")
    add("--conversations", type=int, default=100, help="of the trace (%(default)s)")
    add("--seed", type=int, default=0, help="for drawing them (%(default)s)")
    add("--requests", type=int, help="of theirs, at most (default: all)")
    add("--pace", type=float, default=1.0, help="how many times as fast as recorded (%(default)s)")
    add("--tokens", type=int, default=64, help=f"for each {_STRETCH} recorded tokens; a multiple of 16 (%(default)s)")
    add("--most-answer", type=int, default=32, help="tokens of an answer, at most (%(default)s)")
    add("--context", type=int, default=4096, help="tokens of prompt and answer together, at most (%(default)s)")
    add("--batch", type=int, default=16, help="requests that are served at the same time (%(default)s)")
    add("--chunk", type=int, default=256, help="tokens of a prompt that a step computes (%(default)s)")
    add("--oversubscribed", type=lambda text: [float(each) for each in text.split(",")], default=[1.0, 2.0, 4.0, 8.0])
    add("--caches", type=lambda text: text.split(","), default=CACHES, help=f"of {', '.join(CACHES)} (default: all)")
    add("--pool", type=float, default=0.5, help="what the pool above a disk holds of all blocks (%(default)s)")
    add(
        "--hints",
        type=lambda text: text.split(","),
        help=f"of a session's requests: {', '.join(HINTS)} (default: none)",
    )
    add("--codec", default="raw", help="of the pool and the disk, which stay as large: raw, bf16-12 (%(default)s)")
    add("--lead", type=float, default=1.0, help="seconds before its request that a session is prefetched (%(default)s)")
    add("--prefill", type=float, help="tokens per second, for what is worth reading from a disk (default: measured)")
    add("--disk", type=Path, help="the folder of the disk's file (default: the system's for temporary files)")
    add("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args(arguments)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_ALGORITHM}"
    found = measure(chosen)
    requests = f"{found['requests']} requests of {found['trace']} ({found['left_out']} longer ones left out)"
    where = f"{found['model']} on {found['device']}"
    blocks, live = (f"{found[name] / 1e9:.2f} GB" for name in ("different_bytes", "live_bytes"))
    amount = f"{found['prompt_tokens']:,} tokens of prompts, {blocks} of different blocks, {live} live at once"
    print(f"{requests}, {where}: {amount}; {found['different_answers']} answers differ")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1))
    return int(found["different_answers"] > 0)


if __name__ == "__main__":
    sys.exit(main())
