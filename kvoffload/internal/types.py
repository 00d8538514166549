"""Types that several floors name in their signatures."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

__all__ = ["ArrayLike", "Int64Array", "StreamLike", "SupportsCudaStream", "UInt8Array", "UInt64Array"]

Int64Array: TypeAlias = npt.NDArray[np.int64]
UInt8Array: TypeAlias = npt.NDArray[np.uint8]
UInt64Array: TypeAlias = npt.NDArray[np.uint64]


class SupportsCudaStream(Protocol):
    """A stream of another library, for example of CuPy, cuda.core or PyTorch: `(version, handle)`."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


StreamLike: TypeAlias = int | SupportsCudaStream
