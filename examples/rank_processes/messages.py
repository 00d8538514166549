"""What travels over the pipe between the scheduler and a rank. The closed pipe ends a rank, so no message does.

The scheduler sends the same to every rank, in one order. A rank handles one message after the other.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from paged_decode.model import Step

import kvoffload

Floats = npt.NDArray[np.float32]


# from the scheduler


class Open(NamedTuple):
    """Make a KV cache of zeros and an engine over it, in the place of those before. Answered by `Opened`."""

    num_blocks: int
    num_slots: int


class Transfer(NamedTuple):
    """Store blocks into slots, or load slots into blocks, after the steps so far. Answered by `Ended`, some time later.

    Attributes:
        number: different for every transfer.
        blocks, slots: as many of each.
    """

    number: int
    direction: Literal["store", "load"]
    blocks: list[int]
    slots: list[int]


class Follow(NamedTuple):
    """Have all steps from now on follow a transfer. No answer."""

    number: int


class Compute(NamedTuple):
    """Compute a step. Two products of each layer are added up meanwhile, by `Product` and `Sum`; then `Logits`."""

    step: Step


class Sum(NamedTuple):
    """The sum of the products of all ranks."""

    values: Floats


class Spoil(NamedTuple):
    """Change a bit in every byte of a slot, for a test of the comparison. No answer."""

    slot: int


# from a rank


class Opened(NamedTuple):
    """The layout of the rank's cache. Its addresses mean something in the rank's process only."""

    layout: kvoffload.KVLayout


class Ended(NamedTuple):
    """A transfer has ended in this rank; `error` says why it failed, if it did."""

    number: int
    error: str | None


class Product(NamedTuple):
    """This rank's product, to be added to those of the others."""

    values: Floats


class Logits(NamedTuple):
    """(batch, vocabulary)."""

    values: Floats


class Raised(NamedTuple):
    """An exception has ended the rank: its last message."""

    text: str


Request = Open | Transfer | Follow | Compute | Sum | Spoil
Answer = Opened | Ended | Product | Logits | Raised
