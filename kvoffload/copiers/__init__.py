"""The copiers: each submits the copies of a plan by a driver call of its own.

strided   one operation per block for all planes that fold: cuMemcpy3DBatchAsync, else cuMemcpy2DAsync in a loop
gather    a kernel, for planes that do not fold and blocks too small for the copy engine
pack      a kernel packs blocks into device memory, and the copy engine carries them from there; loads the other way
split     strided for some of the blocks and gather for the rest, at the same time
batch     flat copies in chunks: cuMemcpyBatchAsync
loop      flat copies one by one: cuMemcpyAsync; works with every driver

selection.py chooses among them, copier_set.py has the copiers of an engine.
"""

from kvoffload.copiers.base import Copier, Staged, Submit, Work
from kvoffload.copiers.batch import BatchCopier
from kvoffload.copiers.copier_set import (
    NAMES,
    CopierSet,
    Share,
    check_carries_parts,
    check_copier,
    shape_of,
    shares_together,
    why_not,
)
from kvoffload.copiers.gather import FragmentShape, GatherCopier, GatherKernels, kernel_spec
from kvoffload.copiers.loop import LoopCopier
from kvoffload.copiers.pack import Half, PackCopier, Place, StagingRing
from kvoffload.copiers.strided import StridedCopier

__all__ = [
    "NAMES", "BatchCopier", "Copier", "CopierSet", "FragmentShape", "GatherCopier", "GatherKernels", "Half",
    "LoopCopier", "PackCopier", "Place", "Share", "Staged", "StagingRing", "StridedCopier", "Submit", "Work",
    "check_carries_parts", "check_copier", "kernel_spec", "shape_of", "shares_together", "why_not",
]  # fmt: skip
