"""PlanReport: what a transfer would be, without submitting it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvoffload.internal.representation import HtmlRepresentation
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopyMethod


class Alternative(NamedTuple):
    """Another copy method; `seconds` are expected on the GPU's clock, infinity if unknown."""

    method: CopyMethod
    seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class PlanReport(HtmlRepresentation):
    """What `OffloadEngine.store` or `load` would do, from `OffloadEngine.plan`; nothing is submitted or reserved.

    Attributes:
        direction: store or load.
        blocks: how many.
        nbytes: payload bytes.
        operations: strided operations; adjacent blocks of a slot are merged.
        rows: in all these operations together; a flat batch takes as many copies.
        method, reason: the copy method, and why it is selected; `method` is None where there is nothing to copy.
        seconds: expected on the GPU's clock, without what it would wait for: by `prefer="overlap"` while the GPU
            computes, else on an idle one; infinity if unknown.
        alternatives: the other methods that could be selected, the best first.
        profile: where the expected times come from: a real GPU's, also on a simulated device.
        simulated: whether the device is.
    """

    direction: Direction
    blocks: int
    nbytes: int
    operations: int
    rows: int
    method: CopyMethod | None
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
