"""PlanReport: what a transfer would be, without submitting it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopyMethod


class Alternative(NamedTuple):
    """Another way of carrying a transfer; `seconds` are expected on the GPU's clock, infinity if unknown."""

    method: CopyMethod
    seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class PlanReport:
    """What `OffloadEngine.store` or `load` would do, from `OffloadEngine.plan`; nothing is submitted or reserved.

    Attributes:
        direction: which way.
        blocks: how many.
        nbytes: payload bytes.
        operations: strided operations; adjacent blocks of a slot are merged.
        rows: of these operations; as many copies would a flat batch take.
        way, reason: what would carry it, and why; `way` is None where there is nothing to copy.
        seconds: expected on the GPU's clock, without what it would wait for; infinity if unknown.
        alternatives: the other ways that could be chosen, the best first.
        profile: where the expected times come from. On a simulated device: from another, a real one.
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

    def _repr_html_(self) -> str:
        from kvoffload.observability.notebook import plan_card

        return plan_card(self)
