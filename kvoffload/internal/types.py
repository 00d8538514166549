"""Names of types that several folders use in signatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike as ArrayLike

Int64Array: TypeAlias = npt.NDArray[np.int64]
UInt8Array: TypeAlias = npt.NDArray[np.uint8]
UInt64Array: TypeAlias = npt.NDArray[np.uint64]


@runtime_checkable
class SupportsCudaStream(Protocol):
    """A stream of cuda.core, CuPy or another library: version of the protocol, then the CUstream handle."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class SupportsCudaArray(Protocol):
    """An array in GPU memory of CuPy, Numba, PyTorch, or kvoffload."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class SupportsDLPack(Protocol):
    """An array that DLPack exports, such as JAX's, whose `__cuda_array_interface__` is always read-only."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class SupportsIntegers(Protocol):
    """An array of another library that numpy can read, of integers as far as its type says."""

    def __array__(self) -> npt.NDArray[np.integer[Any]]: ...


class SupportsItemsize(Protocol):
    """A type of elements of a library whose types numpy does not know, such as `torch.bfloat16`."""

    @property
    def itemsize(self) -> int: ...


StreamLike: TypeAlias = int | SupportsCudaStream  # a CUstream handle as an int, 0 for the legacy default stream
Ids: TypeAlias = Sequence[int | np.integer[Any]] | npt.NDArray[np.integer[Any]] | SupportsIntegers  # 1-D
GpuArray: TypeAlias = SupportsCudaArray | SupportsDLPack
DTypeLike: TypeAlias = npt.DTypeLike | SupportsItemsize
