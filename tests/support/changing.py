"""Weights that change beside threads that check what a cache finds: which a hit may have been computed with."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

NAMES = ("", "one", "two")  # that come back


class Changes:
    """The weights that a cache uses, one after another.

    Bytes of a fetch are of `names[read : asked + 1]`, where `read` is `returned` before its hits were read, and `asked`
    is `begun` after the call.

    Args:
        counts: gets how many changes there were, as "changes".

    Attributes:
        names: of all; the last change may not have returned.
        returned: the number of the latest change that has. An interrupted one never does: the next one has to.
        computing: held by whoever computes blocks and stores them, so that the weights do not change meanwhile.
    """

    def __init__(self, cache: Any, seed: int, counts: Counter[str]) -> None:
        self.cache, self.random, self.counts = cache, random.Random(seed), counts
        self.names, self.returned, self.computing = [""], 0, threading.Lock()

    @property
    def begun(self) -> int:
        """The number of the latest change."""
        return len(self.names) - 1

    def use(self, name: str) -> None:
        with self.computing:
            if name != self.names[-1]:  # else nothing changes
                self.names.append(name)
                self.counts["changes"] += 1
            self.cache.use_weights(name)
            self.returned = self.begun

    def use_any(self) -> None:
        """Change, perhaps to and fro: some names come back, and some never do."""
        for _ in range(self.random.choice((1, 1, 2, 6))):
            self.use(self.random.choice((*NAMES, f"step {self.begun}")))
