"""Types of arrays, and of what callers may pass as arrays and streams."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
UInt64Array = npt.NDArray[np.uint64]
ArrayLike = npt.ArrayLike


class SupportsCudaStream(Protocol):
    """A stream of CuPy, cuda.core, Numba and others: `__cuda_stream__` gives (version, handle)."""

    @property
    def __cuda_stream__(self) -> Any: ...


StreamLike = int | SupportsCudaStream
