"""Ways of carrying a plan out, and the choice between them.

strided   one operation per block for all planes that fold: cuMemcpy3DBatchAsync, else cuMemcpy2DAsync in a loop
batch     flat copies in chunks: cuMemcpyBatchAsync
loop      flat copies one by one: cuMemcpyAsync; works with every driver
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from kvoffload.copiers.batch import BatchCopier
from kvoffload.copiers.loop import LoopCopier
from kvoffload.copiers.strided import StridedCopier
from kvoffload.driver import Capabilities, Driver, SourceOrder
from kvoffload.errors import CapabilityError
from kvoffload.plan import TransferPlan

__all__ = [
    "BatchCopier",
    "Choice",
    "Copier",
    "LoopCopier",
    "StridedCopier",
    "check_copier",
    "choose",
    "make_copiers",
    "why_not",
]

# A strided operation costs 1.5 us on the copy engine before its rows, a flat copy of a chunked batch 0.45 to 0.6 us.
STRIDED_MIN_ROWS = 4


class Copier(Protocol):
    """A way of carrying plans out. Belongs to one engine and is called under its lock.

    Attributes:
        name: how users force it.
        piece_operations: how many operations of a prepared plan to submit at a time at most, so that a driver queue
            holds them.
    """

    name: str
    piece_operations: int

    def prepare(self, plan: TransferPlan) -> TransferPlan:
        """The plan in the shape that this copier carries."""

    def queue_cost(self, operations: int) -> int:
        """Places that so many operations of a prepared plan take in a driver queue."""

    def stage(self, plan: TransferPlan, order: SourceOrder) -> Callable[[int], None]:
        """Write down a prepared plan of at most `piece_operations`, and return what queues it on a stream.

        Apart, so that nothing but driver calls lies between a transfer's start event and its first copy. What is staged
        is valid until something else is. What is queued may not be touched until it has ended.

        Raises (what is returned):
            DriverError: the driver refused; what was queued before that still runs.
        """


class Choice(NamedTuple):
    """A copier and why."""

    copier: Copier
    reason: str


def make_copiers(driver: Driver, capabilities: Capabilities) -> dict[str, Copier]:
    """The copiers that can run on this driver, by name."""
    missing = why_not(capabilities)
    every: list[Copier] = [
        StridedCopier(driver, batched=capabilities.strided_batch),
        BatchCopier(driver),
        LoopCopier(driver),
    ]
    return {copier.name: copier for copier in every if missing[copier.name] is None}


def why_not(capabilities: Capabilities) -> dict[str, str | None]:
    """For every copier: None if it can run here, else the reason."""
    return {
        "strided": None,
        "batch": None if capabilities.flat_batch else capabilities.missing["cuMemcpyBatchAsync"],
        "loop": None,
    }


def choose(plan: TransferPlan, copiers: dict[str, Copier], forced: str | None, capabilities: Capabilities) -> Choice:
    """The copier for a plan: the forced one (see `check_copier`), strided where it folds, else batch, else loop."""
    if forced is not None:
        return Choice(copiers[forced], "asked for by name")
    rows = plan.row_count / len(plan)
    if "batch" not in copiers:
        name = "strided" if rows > 1 else "loop"
        return Choice(copiers[name], f"{rows:.1f} rows an operation, and {why_not(capabilities)['batch']}")
    if rows < STRIDED_MIN_ROWS:
        return Choice(copiers["batch"], f"only {rows:.1f} rows an operation: flat copies are cheaper")
    return Choice(copiers["strided"], f"folds: {rows:.0f} rows an operation")


def check_copier(name: Any, capabilities: Capabilities) -> None:
    """Raise ValueError if `name` names no copier, CapabilityError if that one cannot run here; None is right."""
    missing = why_not(capabilities)
    if name is None:
        return
    if not isinstance(name, str) or name not in missing:
        raise ValueError(f"copier must be one of {', '.join(missing)} or None, got {name!r}")
    if missing[name] is not None:
        raise CapabilityError(f"copier={name!r} cannot run here: {missing[name]}; the loop copier works")
