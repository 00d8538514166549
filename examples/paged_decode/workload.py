"""Synthetic conversations, and the blocks of the device that they share."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from paged_decode.model import BLOCK_TOKENS, NULL_BLOCK


class Extent(NamedTuple):
    """The size of a workload; for prompts, the fewest and the most tokens."""

    conversations: int
    turns: int
    batch: int
    generated: int
    chunk: int
    first_prompt: tuple[int, int]
    later_prompt: tuple[int, int]


LARGE = Extent(16, 3, 4, 24, 256, first_prompt=(2048, 4096), later_prompt=(32, 256))
SMALL = Extent(8, 3, 2, 6, 32, first_prompt=(40, 80), later_prompt=(5, 40))


class Workload:
    """Seeded conversations of several turns each.

    Attributes:
        prompts: tokens of each turn of each conversation.
        rounds: for each round, the conversations to serve together. Every turn has its own order.
        generated: tokens of each answer.
        chunk: tokens of a prompt to compute at a time.
        longest: blocks of the longest conversation.
    """

    def __init__(self, extent: Extent, vocabulary: int, seed: int = 0) -> None:
        chance = np.random.default_rng(seed)
        limits = [extent.first_prompt] + [extent.later_prompt] * (extent.turns - 1)
        self.prompts = [
            [chance.integers(vocabulary, size=chance.integers(low, high + 1)).tolist() for low, high in limits]
            for _ in range(extent.conversations)
        ]
        orders = [chance.permutation(extent.conversations) for _ in range(extent.turns)]
        self.rounds: list[list[int]] = np.reshape(orders, (-1, extent.batch)).tolist()
        self.generated, self.chunk = extent.generated, extent.chunk
        self.longest = max(self._sizes())

    def rounds_from(self, turn: int) -> list[list[int]]:
        """The rounds of this turn, counted from 0, and of all later turns."""
        return self.rounds[turn * len(self.prompts) // len(self.rounds[0]) :]

    def first_turns(self, tokens: Sequence[list[int]]) -> list[list[int]]:
        """The tokens of each conversation's first prompt and answer."""
        pairs = zip(tokens, self.prompts, strict=True)
        return [each[: len(prompts[0]) + self.generated] for each, prompts in pairs]

    def blocks_in_all(self) -> int:
        """Blocks of all conversations at their end, and NULL_BLOCK."""
        return 1 + sum(self._sizes())

    def blocks_at_once(self) -> int:
        """The fewest blocks that suffice to serve every round while the prefixes of the next are loaded."""
        sizes, pairs = self._sizes(), itertools.pairwise([*self.rounds, []])
        return 1 + max(sum(sizes[each] for each in {*batch, *following}) for batch, following in pairs)

    def _sizes(self) -> list[int]:
        """Blocks of each conversation at its end."""
        tokens = [sum(len(prompt) + self.generated for prompt in prompts) for prompts in self.prompts]
        return [-(-count // BLOCK_TOKENS) for count in tokens]


class BlockPool:
    """The device's blocks, by conversation. The conversation served longest ago loses its blocks first.

    Attributes:
        of: the blocks of each conversation, in the order of its tokens; the one served longest ago comes first.
        evicted: how many blocks conversations have lost.
    """

    def __init__(self, num_blocks: int) -> None:
        self.of: OrderedDict[int, list[int]] = OrderedDict()
        self.evicted = 0
        self._free = [block for block in range(num_blocks) if block != NULL_BLOCK]

    def extend(self, conversation: int, num_blocks: int, spared: Collection[int]) -> list[int]:
        """Give a conversation blocks until it has `num_blocks`. Returns the conversations that lost theirs.

        Conversations in `spared` lose none.
        """
        own = self.of.setdefault(conversation, [])
        self.of.move_to_end(conversation)
        losers = []
        while len(own) + len(self._free) < num_blocks:
            losers.append(next(each for each in self.of if each not in spared))
            lost = self.of.pop(losers[-1])
            self._free += lost
            self.evicted += len(lost)
        own += [self._free.pop() for _ in range(num_blocks - len(own))]
        return losers
