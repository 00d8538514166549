"""The interface of a framework that serves a model and offloads its paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import kvoffload
from paged_decode.model import ModelSize, Step

# XLA measures several algorithms for a product and takes the fastest. With another one the bits differ.
ONE_ALGORITHM = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"

Logits = npt.NDArray[np.float32]
Followed = kvoffload.CacheJob | kvoffload.Job


class Computes(Protocol):
    """Computes steps; `stream` and `step` as in `Backend`."""

    stream: int | None

    def step(self, step: Step) -> Logits: ...


class KeepsBlocks(Protocol):
    """Keeps the complete blocks of conversations on the host; `Offloader` describes the methods."""

    def store(self, conversation: int, tokens: list[int], blocks: list[int]) -> None: ...

    def follow_store(self, conversation: int) -> None: ...

    def load(self, conversation: int, tokens: list[int], blocks: list[int]) -> None: ...

    def follow_load(self, conversation: int) -> None: ...

    def end_load(self, conversation: int) -> None: ...

    def count_blocks(self) -> tuple[int, int]: ...


class Backend(Protocol):
    """A framework, with the model's weights and a paged KV cache on its devices.

    Attributes:
        devices: the devices that hold the cache; if there are several, each has some of the heads.
        stream: handle of the stream that it computes on; None if it does not expose one.
    """

    devices: Sequence[kvoffload.Device]
    size: ModelSize
    stream: int | None

    def new_cache(self, num_blocks: int) -> kvoffload.KVLayout | kvoffload.ShardedLayout:
        """Replace the cache by one of zeros."""

    def step(self, step: Step) -> Logits:
        """Write K and V of a step's tokens into the cache. Returns the logits of the last tokens, on the host."""

    def after(self) -> Any:
        """The `after` of a transfer that follows all steps so far."""

    def follow(self, job: Followed) -> None:
        """Make all steps from now on follow a job."""

    def follow_by_layer(self, job: kvoffload.CacheJob) -> None:
        """Make layer k of the next step follow part k of a job."""
