"""Types of public signatures."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]
UInt8Array: TypeAlias = npt.NDArray[np.uint8]
ArrayLike: TypeAlias = npt.ArrayLike


class CudaStream(Protocol):
    """A stream of CuPy, cuda.core, Numba or another library."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


StreamLike: TypeAlias = int | CudaStream
