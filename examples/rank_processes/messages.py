"""The messages over the pipe between the scheduler and a rank. To end a rank, the scheduler closes the pipe.

The scheduler sends the same messages to every rank, in one order. A rank handles one message after the other.
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
    """Make a KV cache of zeros and an engine over it, and drop the old ones. Answered by `Opened`."""

    num_blocks: int
    num_slots: int


class Transfer(NamedTuple):
    """Store blocks into slots, or load slots into blocks, after the steps so far. Answered by `Ended`, some time later.

    Attributes:
        number: different for every transfer.
        blocks, slots: two lists of the same length.
    """

    number: int
    direction: Literal["store", "load"]
    blocks: list[int]
    slots: list[int]


class Follow(NamedTuple):
    """Make all steps from now on follow a transfer. No answer."""

    number: int


class Compute(NamedTuple):
    """Compute a step. Twice a layer the rank sends `Product` and gets `Sum`; at the end it sends `Logits`."""

    step: Step


class Sum(NamedTuple):
    """The sum of the products of all ranks."""

    values: Floats


class Spoil(NamedTuple):
    """Change a bit in every byte of a slot, to test the comparison. No answer."""

    slot: int


# from a rank


class Opened(NamedTuple):
    """The layout of the rank's cache. Its addresses are valid only in the rank's process."""

    layout: kvoffload.KVLayout


class Ended(NamedTuple):
    """A transfer has ended in this rank; `error` says why if it failed."""

    number: int
    error: str | None


class Product(NamedTuple):
    """This rank's product. The scheduler adds up the products of all ranks."""

    values: Floats


class Logits(NamedTuple):
    """(batch, vocabulary)."""

    values: Floats


class Raised(NamedTuple):
    """The rank's last message: an exception has ended it."""

    text: str


Request = Open | Transfer | Follow | Compute | Sum | Spoil
Answer = Opened | Ended | Product | Logits | Raised
