"""PlanReport: what a transfer would be, without submitting it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvoffload.copiers import CopierSet, shape_of
from kvoffload.copiers.selection import rank
from kvoffload.internal.representation import HtmlRepresentation
from kvoffload.planning.transfer_plan import BlockPlan, Direction
from kvoffload.tuning import CopierChoice, CopyMethod, Profile


class Selecting(Protocol):
    """What a report needs of an engine."""

    prefer: str
    profile: Profile
    sm_limit: int


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


def make_report(
    engine: Selecting, plan: BlockPlan, copier: CopierChoice, copiers: CopierSet, *, simulated: bool
) -> PlanReport:
    """What an engine would do with a plan, and what else could carry it. Asks nothing of the driver."""
    profile = engine.profile
    if len(plan) == 0:
        nothing = (plan.direction, 0, 0, 0, 0, None, "nothing to copy", 0.0, ())
        return PlanReport(*nothing, profile=profile.source, simulated=simulated)
    method, reason = copiers.select(plan, copier, profile, engine.prefer)
    shape = shape_of(plan)
    ranked = rank(shape, copiers.offered, profile, engine.prefer, engine.sm_limit)
    return PlanReport(
        direction=shape.direction,
        blocks=shape.blocks,
        nbytes=shape.nbytes,
        operations=shape.operations,
        rows=shape.rows,
        method=method,
        reason=reason,
        seconds=next((each.seconds for each in ranked if each.method == method), profile.seconds(method, shape)),
        alternatives=tuple(
            Alternative(each.method, each.seconds) for each in ranked if each.method.label != method.label
        ),
        profile=profile.source,
        simulated=simulated,
    )
