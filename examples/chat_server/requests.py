"""A prompt and its answer."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvoffload.cache.reservations import CacheRequest
from kvoffload.cache.tiering import FetchJob

FinishReason = Literal["stop", "length", "cancelled", "error"]
Deliver = Callable[[int | None], object]


class BusyError(Exception):
    """Too many requests wait."""


class TooLongError(ValueError):
    """The prompt, and what it may generate, do not fit."""


class Wanted(NamedTuple):
    """What a client may choose.

    Attributes:
        stop: tokens that end the answer, and are no part of it.
        session: the conversation that the request belongs to; None: not said.
        due: seconds until its next request is expected; None: unknown.
        last: there will be no other.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop: frozenset[int] = frozenset()
    session: str | None = None
    due: float | None = None
    last: bool = False


@dataclass(eq=False)
class Request:
    """A prompt and its answer. Iterate it for the tokens as they come, unless it was submitted with `deliver`.

    Attributes:
        generated: the answer so far.
        finish_reason: None while it goes on.
        submitted, first_token, finished: by `time.monotonic`; 0.0: not yet.
        hits: tokens of the prompt that were found, by "device", "host" and "disk".
        prompt_computed: tokens of the prompt that were computed. After a preemption, hits and these count again.
        preemptions: how often its blocks were taken away.
    """

    prompt: list[int]
    wanted: Wanted
    deliver: Deliver | None = None
    generated: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    submitted: float = field(default_factory=time.monotonic)
    first_token: float = 0.0
    finished: float = 0.0
    hits: Counter[str] = field(default_factory=Counter)
    prompt_computed: int = 0
    preemptions: int = 0

    # For the engine.
    cancelled: bool = False
    keys: list[bytes] = field(default_factory=list)  # of its full blocks
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # leading tokens whose K and V are in the blocks
    shared: int = 0  # leading blocks that others may find
    of_session: CacheRequest | None = None  # the cache's handle, if it names a session
    job: FetchJob | None = None  # a load into the blocks that is not known to have succeeded
    fetching: list[str] = field(default_factory=list)  # where the keys of `job` were, until its hits are known
    may_fetch: bool = True

    def __post_init__(self) -> None:
        self._tokens = queue.SimpleQueue[int | None]()
        self.deliver = self.deliver or self._tokens.put

    def __iter__(self) -> Iterator[int]:
        while (token := self._tokens.get()) is not None:
            yield token

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def in_prompt(self) -> bool:
        return self.computed < len(self.prompt)

    @property
    def ready(self) -> bool:
        """Whether a step may compute it."""
        return not (self.fetching or self.cancelled)
