"""Synthetic traffic of several kinds, as requests of keys.

A block's key stands for the block and everything before it, so a key always follows the same keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from kvoffload.replay.trace import KEY_BYTES, Request

DEFAULT_REQUESTS = 4000


class Blocks:
    def __init__(self) -> None:
        self._used = 0

    def new(self, count: int) -> list[int]:
        first, self._used = self._used, self._used + count
        return list(range(first, self._used))


Traffic = Callable[[np.random.Generator, Blocks], Iterator[list[int]]]


def make_workload(name: str, requests: int = DEFAULT_REQUESTS, seed: int = 0) -> list[Request]:
    """Make `requests` requests of a kind of traffic; the same for the same seed."""
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    random, blocks, sources = np.random.default_rng(seed), Blocks(), WORKLOADS[name]
    shares = [
        requests * (place + 1) // len(sources) - requests * place // len(sources) for place in range(len(sources))
    ]
    synthetic = chain.from_iterable(
        islice(source(random, blocks), share) for source, share in zip(sources, shares, strict=True)
    )
    return [tuple(number.to_bytes(KEY_BYTES, "big", signed=True) for number in request) for request in synthetic]


def chat(random: np.random.Generator, blocks: Blocks) -> Iterator[list[int]]:
    """Most conversations end after a question; the more turns one has had, the likelier is another.

    Lengths, in blocks of 512 tokens, pauses and turns are as in the conversation trace of the Mooncake FAST'25 release.
    """
    system = blocks.new(1)
    waiting: list[tuple[float, int, list[int]]] = []  # when its next turn comes, in requests; turns so far; the prompt
    for now in itertools.count():
        if waiting and waiting[0][0] <= now:
            _, turns, prompt = heappop(waiting)
            prompt = prompt + blocks.new(_about(random, 2, 1.4))
        else:
            turns, prompt = 0, system + blocks.new(_about(random, 11, 1.2))
        turns += 1
        if random.random() < turns / (turns + 3):
            heappush(waiting, (now + _about(random, 430, 1.1), turns, prompt))
        yield prompt


def system_prompts(random: np.random.Generator, blocks: Blocks) -> Iterator[list[int]]:
    """40 prompts, some far more popular than others, each time with a question that never comes again."""
    prompts = [blocks.new(_between(random, 4, 39)) for _ in range(40)]
    popularity = _zipf(len(prompts), 1.0)
    while True:
        yield prompts[random.choice(len(prompts), p=popularity)] + blocks.new(_between(random, 1, 19))


def documents(random: np.random.Generator, blocks: Blocks) -> Iterator[list[int]]:
    """Instructions, one of 2,000 documents, some more popular than others, and a question about it."""
    instructions = blocks.new(10)
    texts = [blocks.new(_between(random, 5, 60)) for _ in range(2000)]
    popularity = _zipf(len(texts), 0.9)
    while True:
        yield instructions + texts[random.choice(len(texts), p=popularity)] + blocks.new(_between(random, 1, 5))


def agents(random: np.random.Generator, blocks: Blocks) -> Iterator[list[int]]:
    """40 sessions at a time, which all begin alike; each turn sends the whole history and some more."""
    instructions = blocks.new(10)
    histories: list[list[int]] = [[] for _ in range(40)]
    turns_left = [0] * len(histories)
    while True:
        session = int(random.integers(len(histories)))
        if turns_left[session] == 0:
            histories[session] = instructions + blocks.new(_between(random, 8, 23))
            turns_left[session] = _between(random, 20, 120)
        histories[session] = histories[session] + blocks.new(_between(random, 1, 6))
        turns_left[session] -= 1
        yield histories[session]


def evaluation(random: np.random.Generator, blocks: Blocks) -> Iterator[list[int]]:
    """The same 100 prompts again and again, in the same order."""
    prompts = [blocks.new(_between(random, 20, 60)) for _ in range(100)]
    while True:
        yield from prompts


def no_reuse(random: np.random.Generator, blocks: Blocks) -> Iterator[list[int]]:
    """Nothing is ever asked for again."""
    while True:
        yield blocks.new(_between(random, 1, 59))


def one_off(random: np.random.Generator, blocks: Blocks) -> Iterator[list[int]]:
    """Of 20 requests 19 are prompts that never come again; the others ask about one of 50 documents."""
    texts = [blocks.new(_between(random, 20, 60)) for _ in range(50)]
    while True:
        if random.integers(20):
            yield blocks.new(_between(random, 10, 50))
        else:
            yield texts[random.integers(len(texts))] + blocks.new(_between(random, 1, 5))


WORKLOADS: dict[str, tuple[Traffic, ...]] = {
    "chat": (chat,),  # conversations of unequal length; most end after a question
    "system-prompts": (system_prompts,),  # a few system prompts, each with questions asked once
    "documents": (documents,),  # questions about documents of unequal popularity
    "agents": (agents,),  # long sessions whose every turn sends the whole history
    "evaluation": (evaluation,),  # the same prompts again and again, in order
    "no-reuse": (no_reuse,),  # nothing is asked for twice
    "one-off": (one_off,),  # prompts asked once, and now and then a known document
    "change": (documents, agents),  # documents, and from the middle on agents
}


def _between(random: np.random.Generator, least: int, most: int) -> int:
    return int(random.integers(least, most + 1))


def _about(random: np.random.Generator, median: float, spread: float) -> int:
    """Draw a whole number of at least 1 with this median, the logarithm's standard deviation being `spread`."""
    return max(1, round(median * float(np.exp(spread * random.standard_normal()))))


def _zipf(count: int, exponent: float) -> npt.NDArray[np.float64]:
    weights = 1 / np.arange(1, count + 1) ** exponent
    return np.asarray(weights / weights.sum())
