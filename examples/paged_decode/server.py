"""Serves a workload in batches, in one of several modes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

from paged_decode.backend import Computes, KeepsBlocks, Logits
from paged_decode.model import BLOCK_TOKENS, Step
from paged_decode.offload import complete_tokens
from paged_decode.timeline import Timeline
from paged_decode.workload import BlockPool, Workload


class Mode(NamedTuple):
    """How to treat the blocks of conversations that wait for their next turn.

    Attributes:
        fits: the device has blocks for all conversations, so they stay; otherwise other conversations take them.
        offloads: store them before that, and load them again; otherwise compute their content again.
        prefetches: begin a load while the batch before decodes; otherwise when the turn begins.
        by_layer: layer k waits for its part of a load; otherwise the first layer waits for the whole load.
        from_disk: the host has room for a part of the blocks, and a disk tier for all.
        to_store: store the blocks also in a store for other processes.
        from_store: another process has served the first turns, and all blocks are in a store.
        in_pool: instead of a store, the blocks are in a pool of host memory that both processes map.
    """

    name: str
    fits: bool = False
    offloads: bool = False
    prefetches: bool = False
    by_layer: bool = False
    from_disk: bool = False
    to_store: bool = False
    from_store: bool = False
    in_pool: bool = False


FITS = Mode("cache that fits", fits=True)
PREFETCHED = Mode("offload, prefetched", offloads=True, prefetches=True)
ON_DEMAND = Mode("offload, on demand", offloads=True)
LAYER_WISE = Mode("offload, layer-wise", offloads=True, by_layer=True)
FROM_DISK = Mode("offload to disk, on demand", offloads=True, from_disk=True)
TO_STORE = Mode("computed, put into the store", fits=True, offloads=True, to_store=True)
FROM_STORE = Mode("continued from the store", offloads=True, from_store=True)
TO_POOL = Mode("computed, put into the pool", fits=True, offloads=True, to_store=True, in_pool=True)
FROM_POOL = Mode("continued from the pool", offloads=True, from_store=True, in_pool=True)
RECOMPUTED = Mode("recomputation")


class Run(NamedTuple):
    """The results of a workload.

    Attributes:
        logits: (batch, vocabulary) of every token generated, in the order of the workload.
        tokens: all tokens of each conversation.
        seconds: from the first turn to the last token.
        first_token_seconds: for every turn that continues a conversation, from the turn's beginning until its first
            token is on the host.
        evicted, stored, loaded: blocks.
    """

    mode: Mode
    logits: list[Logits]
    tokens: list[list[int]]
    seconds: float
    first_token_seconds: list[float]
    evicted: int
    stored: int
    loaded: int


class Server:
    """Serves a workload, once.

    Every step has one of two shapes: a chunk of one conversation's prompt, or one token for each conversation of a
    batch. A turn begins with the tokens after the last complete block, whether or not this block is still on the
    device. So every mode except recomputation computes the same in the same shapes.

    Args:
        num_blocks: blocks of the backend's cache.
        offloader: for modes that offload.
        timeline: records when steps ran.
        begun: tokens of each conversation after its first turn, if another process has served the first turns.
    """

    def __init__(
        self,
        backend: Computes,
        workload: Workload,
        mode: Mode,
        num_blocks: int,
        offloader: KeepsBlocks | None,
        timeline: Timeline | None,
        begun: Sequence[list[int]] = (),
    ) -> None:
        self._backend, self._workload, self._mode = backend, workload, mode
        self._offloader, self._timeline = offloader, timeline
        self._pool = BlockPool(num_blocks)
        self._tokens = [list(each) for each in begun] or [[] for _ in workload.prompts]
        self._first_turn = 1 if begun else 0
        self._spared: set[int] = set()  # conversations of this round and the next: they keep their blocks
        self._logits: list[Logits] = []

    def run(self) -> Run:
        self._warm_up()
        prompts = [iter(each[self._first_turn :]) for each in self._workload.prompts]
        first_token_seconds: list[float] = []
        begin = time.perf_counter()
        for batch, following in itertools.pairwise([*self._workload.rounds_from(self._first_turn), []]):
            self._spared = {*batch, *following}
            if self._timeline is not None:
                self._timeline.begin_round()
            for each in batch:
                continues = bool(self._tokens[each])
                seconds = self._begin_answer(each, next(prompts[each]))
                first_token_seconds += [seconds] if continues else []
            if self._mode.prefetches:
                for each in following:
                    self._load_prefix(each)  # concurrent with the decoding below
            for _ in range(self._workload.generated - 1):
                self._decode(batch)
            if self._offloader is not None:
                for each in batch:
                    self._offloader.store(each, self._tokens[each], self._pool.of[each])
        seconds = time.perf_counter() - begin
        stored, loaded = (0, 0) if self._offloader is None else self._offloader.count_blocks()
        return Run(
            self._mode, self._logits, self._tokens, seconds, first_token_seconds, self._pool.evicted, stored, loaded
        )

    def _begin_answer(self, conversation: int, prompt: list[int]) -> float:
        """Compute a prompt, and the first token of its answer. Returns the seconds until that token is on the host."""
        begin = time.perf_counter()
        tokens, chunk = self._tokens[conversation], self._workload.chunk
        self._load_prefix(conversation)
        first = complete_tokens(tokens) if conversation in self._pool.of else 0
        tokens += prompt
        self._own(conversation, -(-(len(tokens) + self._workload.generated) // BLOCK_TOKENS))
        if self._offloader is not None:
            self._offloader.follow_load(conversation)
        for start in range(first, len(tokens), chunk):
            logits = self._step([conversation], [start], chunk)
        self._append([conversation], logits)
        seconds = time.perf_counter() - begin
        if self._offloader is not None:
            self._offloader.end_load(conversation)
        return seconds

    def _decode(self, batch: list[int]) -> None:
        """Compute the next token of each conversation of a batch."""
        self._append(batch, self._step(batch, [len(self._tokens[each]) - 1 for each in batch], 1))

    def _append(self, batch: list[int], logits: Logits) -> None:
        self._logits.append(logits)
        for conversation, token in zip(batch, logits.argmax(axis=-1).tolist(), strict=True):
            self._tokens[conversation].append(token)

    def _step(self, batch: list[int], firsts: list[int], length: int) -> Logits:
        """Compute up to `length` tokens of each conversation, from the first given."""
        step = Step.padding(len(batch), length, self._workload.longest)
        for index, (conversation, first) in enumerate(zip(batch, firsts, strict=True)):
            step.put(index, self._tokens[conversation], first, self._pool.of[conversation])
        kind = "prefill" if length > 1 else "decode"
        with nullcontext() if self._timeline is None else self._timeline.computing(self._backend.stream, kind):
            return self._backend.step(step)

    def _load_prefix(self, conversation: int) -> None:
        """If a conversation has lost its blocks and they are stored, load them into other blocks. Returns at once."""
        tokens = self._tokens[conversation]
        if self._offloader is not None and tokens and conversation not in self._pool.of:
            self._own(conversation, complete_tokens(tokens) // BLOCK_TOKENS)
            self._offloader.load(conversation, tokens, self._pool.of[conversation])

    def _own(self, conversation: int, num_blocks: int) -> None:
        """Give a conversation so many blocks. Steps that write them follow the stores of their last owners."""
        for loser in self._pool.extend(conversation, num_blocks, self._spared):
            if self._offloader is not None:
                self._offloader.follow_store(loser)

    def _warm_up(self) -> None:
        """Compute a step of padding in both shapes, so that everything is compiled now."""
        for batch, length in ((1, self._workload.chunk), (len(self._workload.rounds[0]), 1)):
            self._backend.step(Step.padding(batch, length, self._workload.longest))
