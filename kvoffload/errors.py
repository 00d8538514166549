"""Everything that kvoffload raises on purpose, apart from plain ValueError, TypeError and TimeoutError.

    LayoutError, CapacityError, MissingKeyError, ClosedError    a call to change in the program
    CapabilityError                                             a driver, bindings or a GPU to change on the machine
    DriverError, TransferError                                  a failure that CUDA reported, with CUDA's message
    TierError                                                   a disk or store from which something was not removed

An exception raised by `store`, `load` or a constructor means that nothing was submitted, stored or allocated, unless
its message says otherwise.
"""


class KVOffloadError(Exception):
    """The base class of the exceptions of kvoffload."""


class LayoutError(KVOffloadError, ValueError):
    """An argument that describes no KV cache: planes, ids or arrays. The message names the argument and the value."""


class CapacityError(KVOffloadError):
    """Too few slots, events or jobs are free, or too little pinned or GPU memory. Nothing was allocated."""


class CapabilityError(KVOffloadError):
    """The driver, the bindings or the GPU lack a feature; the message names it, and what works without it."""


class MissingKeyError(KVOffloadError, LookupError):
    """A key to load is not in the block cache, or its block has not been stored yet."""


class ClosedError(KVOffloadError):
    """The device, engine or buffer is closed, or belongs to the parent of a forked process."""


class TransferError(KVOffloadError):
    """A transfer failed: its target may hold any bytes, and must not be used. Other transfers are not affected."""


class TierError(KVOffloadError):
    """A tier below the slots may still hold what was to be removed from it."""


class KVOffloadWarning(UserWarning):
    """Something works less well than it could; the message says what to do. Issued once in a process for each cause."""


class DriverError(KVOffloadError):
    """A CUDA driver call failed.

    Attributes:
        call: the driver function, for example ``"cuMemcpyAsync"``.
        name: CUDA's name of the error, for example ``"CUDA_ERROR_INVALID_VALUE"``.
        code: CUDA's number of the error.
    """

    def __init__(self, call: str, name: str, code: int, detail: str = "") -> None:
        super().__init__(f"{call} returned {name} ({code})" + (f": {detail}" if detail else ""))
        self.call = call
        self.name = name
        self.code = code
        self._detail = detail

    def __reduce__(self) -> tuple[type["DriverError"], tuple[str, str, int, str]]:
        return type(self), (self.call, self.name, self.code, self._detail)

    @property
    def out_of_memory(self) -> bool:
        """Whether the device or the host had too little memory; the context is not affected."""
        return self.code == _OUT_OF_MEMORY

    @property
    def sticky(self) -> bool:
        """Whether the CUDA context is lost: every later call in it returns the same error."""
        return self.code in _STICKY_CODES


_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
# CUDA driver API reference, enum CUresult: errors after which "the process must be terminated and relaunched".
_STICKY_CODES = frozenset({214, 700, 702, 709, 714, 715, 716, 717, 718, 719, 721})
