"""The copiers: each submits the copies of a plan by a driver call of its own.

strided   one operation per block for all planes that fold: cuMemcpy3DBatchAsync, else cuMemcpy2DAsync in a loop
pack      a kernel packs rows into device memory, contiguous copies carry whole blocks
batch     flat copies in chunks: cuMemcpyBatchAsync
loop      flat copies one by one: cuMemcpyAsync; works with every driver

selection.py chooses among them, copier_set.py has the copiers of an engine.
"""

from kvoffload.copiers.base import Copier, Submit
from kvoffload.copiers.batch import BatchCopier
from kvoffload.copiers.copier_set import (
    CopierSet,
    Share,
    check_carries_parts,
    check_copier,
    shape_of,
    shares_together,
    why_not,
)
from kvoffload.copiers.loop import LoopCopier
from kvoffload.copiers.pack import STAGING_BYTES, Half, PackCopier, Place, StagingRing, checked_staging
from kvoffload.copiers.pack_kernels import FragmentShape, PackKernels, kernel_spec
from kvoffload.copiers.strided import StridedCopier

__all__ = [
    "STAGING_BYTES", "BatchCopier", "Copier", "CopierSet", "FragmentShape", "Half", "LoopCopier", "PackCopier",
    "PackKernels", "Place", "Share", "StagingRing", "StridedCopier", "Submit", "check_carries_parts",
    "check_copier", "checked_staging", "kernel_spec", "shape_of", "shares_together", "why_not",
]  # fmt: skip
