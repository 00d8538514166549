"""Everything that kvoffload raises on purpose, apart from plain ValueError, TypeError, TimeoutError and RuntimeError.

    LayoutError, CapacityError, MissingKeyError, ClosedError    change the call
    SessionFileError                                            take another file
    CapabilityError                                             change the driver, the bindings or the GPU
    DriverError, TransferError                                  CUDA failed; the message has CUDA's own
    TierError                                                   a record may still be in a disk or store

If `store`, `load` or a constructor raises, nothing was submitted, stored or allocated, unless its docstring
or the message says so.
"""


class KVOffloadError(Exception):
    """The base class of kvoffload's own exceptions. Calls also raise plain TimeoutError, ValueError, TypeError and
    RuntimeError, and OSError where files and sockets are concerned.
    """


class LayoutError(KVOffloadError, ValueError):
    """Planes, layouts, ids, keys or arrays that cannot be right. The message names the argument and the value.

    Also a ValueError.
    """


class CapacityError(KVOffloadError):
    """No room: too few slots or events, more jobs than `max_in_flight`, full queues, too little memory or disk. Or you
    gave `all_or_nothing`, and a key would be declined, for want of room or for another reason, such as a quota. The
    call has submitted nothing, unless its docstring says otherwise; earlier jobs go on.
    """


class CapabilityError(KVOffloadError):
    """What the call needs is missing here: a feature of the driver, the bindings, the GPU or the system, a Python
    package, write access, or an option of vLLM. The message names it, and a way without it if there is one.
    """


class MissingKeyError(KVOffloadError, LookupError):
    """A key to load or `acquire` is not in the cache. Or it is pending, and you did not give `pending=True`, or the
    cache knows no transfer that fills it. Nothing was loaded or leased. Also a LookupError.
    """


class ClosedError(KVOffloadError):
    """What you called, or its engine or device, has been closed, released or ended; or this is a forked child of the
    process that opened it.
    """


class TransferError(KVOffloadError):
    """A transfer failed, or cannot begin. If it failed, its target may hold any bytes (a driver call that fails may
    have copied a part): do not use it.

    Other transfers are not affected, unless the CUDA context is lost. Then all in flight fail, with the driver's error
    in the message, and each later submission raises a TransferError that says "the CUDA context is lost".
    """


class TierError(KVOffloadError):
    """`remove` or `clear` of a cache has taken the keys out of the slots, but a tier failed or did not answer, and may
    still hold their records. Call it again once the tier works.
    """


class SessionFileError(KVOffloadError, ValueError):
    """A file is no session file, its header is damaged, it is of a newer version, or it was saved with another
    identity, salt or weights. The message names the file, and both sides. Also a ValueError.
    """


class KVOffloadWarning(UserWarning):
    """Something works less well than it could. The message says what to do."""


class DriverError(KVOffloadError):
    """A CUDA driver call failed.

    Attributes:
        call: the driver function, for example "cuMemcpyAsync".
        name: CUDA's name for the error, for example "CUDA_ERROR_INVALID_VALUE".
        code: CUDA's number for the error.
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
        """Whether the device or the host had too little memory. The context can still be used."""
        return self.code == _OUT_OF_MEMORY

    @property
    def sticky(self) -> bool:
        """Whether the CUDA context is lost: every later call in it fails."""
        return self.code in _STICKY_CODES


_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
# CUDA driver API reference, enum CUresult: errors after which "the process must be terminated and relaunched".
_STICKY_CODES = frozenset({214, 700, 702, 709, 714, 715, 716, 717, 718, 719, 721})
