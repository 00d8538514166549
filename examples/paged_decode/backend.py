"""What a framework has to do to serve a model with a paged KV cache that is offloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import kvoffload
from paged_decode.model import ModelSize, Step

Logits = npt.NDArray[np.float32]
Followed = kvoffload.CacheJob | kvoffload.Job


class Computes(Protocol):
    """What computes steps; `stream` and `step` as in `Backend`."""

    stream: int | None

    def step(self, step: Step) -> Logits: ...


class KeepsBlocks(Protocol):
    """What keeps the complete blocks of conversations on the host; the methods are described in `Offloader`."""

    def store(self, conversation: int, tokens: list[int], blocks: list[int]) -> None: ...

    def follow_store(self, conversation: int) -> None: ...

    def load(self, conversation: int, tokens: list[int], blocks: list[int]) -> None: ...

    def follow_load(self, conversation: int) -> None: ...

    def end_load(self, conversation: int) -> None: ...

    def count_blocks(self) -> tuple[int, int]: ...


class Backend(Protocol):
    """A framework, with the model's weights and a paged KV cache on its devices.

    Attributes:
        devices: those of the cache; more than one if each has some of the heads.
        stream: handle of the stream that it computes on; None if it shows none.
    """

    devices: Sequence[kvoffload.Device]
    size: ModelSize
    stream: int | None

    def new_cache(self, num_blocks: int) -> kvoffload.KVLayout | kvoffload.ShardedLayout:
        """Make a cache of zeros in the place of the one before."""

    def step(self, step: Step) -> Logits:
        """Write K and V of a step's tokens into the cache; the logits of the last ones, when the host has them."""

    def after(self) -> Any:
        """What a transfer gets as `after`, so that it follows all steps so far."""

    def follow(self, job: Followed) -> None:
        """Have all steps from now on follow a job."""

    def follow_by_layer(self, job: kvoffload.CacheJob) -> None:
        """Have layer k of the next step follow part k of a job."""
