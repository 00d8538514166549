"""PlanReport: how a transfer would be carried, without submitting it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvoffload.internal.representation import HtmlRepresentation
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopierName


class Alternative(NamedTuple):
    """Another copier, and its expected seconds on the GPU's clock; infinity if unknown."""

    copier: CopierName
    seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class PlanReport(HtmlRepresentation):
    """How a store or load would be carried; from `OffloadEngine.plan`, which submits and reserves nothing.

    Attributes:
        direction: store or load.
        blocks: the number of blocks.
        nbytes: payload bytes.
        operations: the number of strided operations, after adjacent blocks of a slot are merged.
        rows: the rows of all operations together. The batch and loop copiers make one copy per row.
        copier, reason: the copier, and why it is selected. `copier` is None if there is nothing to copy.
        seconds: by the profile, expected on the GPU's clock from the first copy on; infinity if unknown. With "overlap"
            it is the time while the GPU computes: the mean for large and small matrix products. With "latency"
            it is the time on an idle GPU. So it is for a copier that you asked for and that the engine never selects
            for such a transfer, such as "loop" where "batch" works.
        alternatives: the other copiers that the engine could select, in its order of preference. That is not the order
            of `seconds`: see `prefer` of `OffloadEngine`.
        profile: the source of the expected times. They are a real GPU's, on the simulated device, too.
        simulated: whether the device is simulated.
    """

    direction: Direction
    blocks: int
    nbytes: int
    operations: int
    rows: int
    copier: CopierName | None
    reason: str
    seconds: float
    alternatives: tuple[Alternative, ...]
    profile: str
    simulated: bool

    def __repr__(self) -> str:
        return (
            f"PlanReport({self.direction} of {self.blocks} blocks, {self.nbytes} bytes, {self.operations} operations "
            f"of {self.rows} rows; {self.reason}; by: {self.profile})"
        )
