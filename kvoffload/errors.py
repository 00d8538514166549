"""The exceptions, by who must act.

The caller fixes `LayoutError`, `CapacityError` and `ClosedError`; whoever installs drivers and bindings fixes
`CapabilityError`; `DriverError` and `TransferError` carry CUDA's own words about a call and about a transfer.
An exception raised by `store`, `load` or a constructor means that nothing has happened, unless its text says otherwise.
"""


class KVOffloadError(Exception):
    """Everything that kvoffload raises on purpose, except plain ValueError, TypeError and TimeoutError."""


class LayoutError(KVOffloadError, ValueError):
    """Planes, ids or arrays that do not describe a KV cache: the message names the argument and the value."""


class CapacityError(KVOffloadError):
    """More was asked than there is: slots, jobs in flight, pinned or GPU memory. Nothing was taken."""


class CapabilityError(KVOffloadError):
    """The driver, the bindings or the GPU lack something; the message says what, and what works instead."""


class MissingKeyError(KVOffloadError, LookupError):
    """A block cache was asked to load a key that it does not hold, or not yet."""


class ClosedError(KVOffloadError):
    """The device, engine or buffer is closed, or belongs to the parent of a forked process."""


class TransferError(KVOffloadError):
    """One transfer failed; its slots hold nothing that may be trusted. The engine goes on."""


class KVOffloadWarning(UserWarning):
    """Something works less well than it could; the message says what to do. Once in a process for each cause."""


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
        """Whether the device or the host had too little memory, and nothing else is wrong."""
        return self.code == _OUT_OF_MEMORY

    @property
    def sticky(self) -> bool:
        """Whether the CUDA context is lost: every later call in it returns the same error."""
        return self.code in _STICKY_CODES


_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
# CUDA driver API reference, enum CUresult: the errors after which "the process must be terminated and relaunched".
_STICKY_CODES = frozenset({214, 700, 702, 709, 714, 715, 716, 717, 718, 719, 721})
