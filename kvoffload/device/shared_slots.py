"""SharedSlots: slots of one engine in memory that other processes of the machine map. (Engines that share keys have a
`kvoffload.pool` in common, whose memory is allocated in the same way.) No named file can be left behind.

    the process of an engine                              another process, such as that of a CacheIndex

    slots = SharedSlots(num_slots, slot_bytes)
    engine = OffloadEngine(layout, host_memory=slots.host_memory, ...)
    slots.offer("pool of rank 0")             ──────>     pool = SharedSlots.receive("pool of rank 0").array

The memory is a `memfd`. A thread hands it to processes of the same user, over a socket in the abstract name space. The
kernel frees it when the last process that maps it has ended, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from hashlib import blake2b
from typing import Any

import numpy as np

from kvoffload.device.pinned import RANGE_BYTES, SPARE_BYTES, HostMemory, touch
from kvoffload.errors import CapabilityError, CapacityError
from kvoffload.internal import hostinfo
from kvoffload.internal.checks import at_least, shown, to_wait
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import new_thread, refuse_waiting
from kvoffload.internal.teardown import Closing, close_last, opened, received
from kvoffload.internal.types import UInt8Array
from kvoffload.layout.layout import SLOT_ALIGNMENT

_LONGEST_NOTE = 32_768  # bytes
ANSWER_SECONDS = 10.0  # that the other process is waited for
_BETWEEN_ATTEMPTS = 0.02  # seconds
FAILURE_SECONDS = 1.0  # between attempts to hand the memory over, if that fails
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # of all memory that `allocate_memory` makes
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class SharedSlots(Closing):
    """Slots of one engine in memory that other processes map, too. A context manager.

    The constructor allocates all of the memory at once. In another process, use `receive`. Nothing here orders reads
    and writes of different processes. Leaving the `with` block calls `close`, which ends the offer only: in each
    process the memory stays mapped as long as `array`, or an engine over it, lives.

    Args:
        num_slots: at least 1.
        slot_bytes: `slot_bytes` of the engine's layout, a multiple of 4096.

    Attributes:
        array: uint8, (num_slots, slot_bytes), C-contiguous, writable in every process. Zeros at first.
        note: in a process that got the slots by `receive`, the text that the other one gave to `offer`; else "".

    Raises:
        CapacityError: the machine has too little memory, or the process's limits, on files or its address space, allow
            too little.
        CapabilityError: the system has no memfd.
        ValueError: bad arguments.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        at_least("num_slots", num_slots, 1)
        if at_least("slot_bytes", slot_bytes, 1) % SLOT_ALIGNMENT:
            raise ValueError(f"slot_bytes must be a multiple of {SLOT_ALIGNMENT}, got {slot_bytes}")
        self._files: list[int] = []  # empty once it is closed
        try:
            allocate_memory(self._files, "kvoffload-slots", num_slots * slot_bytes)
            self._map(num_slots, slot_bytes, "")
        except BaseException:
            close_last(self._files, len(self._files))
            raise

    def _map(self, num_slots: int, slot_bytes: int, note: str) -> None:
        try:
            mapped = mmap.mmap(self._files[0], num_slots * slot_bytes)
        except OSError as error:
            text = f"{num_slots} slots of {slot_bytes} bytes cannot be mapped ({error}); give fewer, or raise ulimit -v"
            raise CapacityError(text) from error
        self.array: UInt8Array = np.frombuffer(mapped, dtype=np.uint8).reshape(num_slots, slot_bytes)
        self.note = note
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def host_memory(self) -> HostMemory:
        """The value for `OffloadEngine(host_memory=)`. Give it to one engine of this process, which pins the memory and
        keeps it mapped. Ask for it once: each time it reads every page, which can take seconds.
        """
        touch(self.array.reshape(-1), write=False)
        return HostMemory.of_buffer(self.array.reshape(-1), num_slots=len(self.array), slot_stride=self.array.shape[1])

    # handing over -------------------------------------------------------------------------------------------------

    def offer(self, name: str, *, note: str = "") -> None:
        """Hand the memory to each process of this user that calls `receive(name)`, until `close` or the end of this
        process. It goes on if this object becomes garbage. What others have received stays mapped there. A thread does
        that; this call returns at once. A forked child offers nothing.

        Args:
            name: no other offer on this machine (in this network namespace) may have it.
            note: a text for the other processes. With the sizes, as JSON, at most 32,768 bytes.

        Raises:
            ValueError: the name is offered already; the note is too long; or this object is closed, or has an offer.
            TypeError: the name or the note is no string.
        """
        if self._listener is not None or not self._files:
            raise ValueError("an offer has been made already, or the slots are closed")
        if not isinstance(note, str):
            raise TypeError(f"note must be a string, got {shown(note)}")
        num_slots, slot_bytes = self.array.shape
        message = json.dumps({"num_slots": num_slots, "slot_bytes": slot_bytes, "note": note}).encode()
        if len(message) > _LONGEST_NOTE:
            raise ValueError(f"note must have at most {_LONGEST_NOTE} bytes as JSON, got {len(message)}")
        address = _address(name)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(address)
            listener.listen(64)
        except OSError as error:
            listener.close()
            raise ValueError(
                f"name={name!r:.80} is offered already on this machine, or sockets cannot be made ({error}); give each "
                "offer its own"
            ) from error
        CLOSED_IN_CHILDREN.add(listener)
        self._listener = listener
        self._thread = new_thread("kvoffload-offer", _serve, listener, self._files[0], message)
        self._thread.start()

    @classmethod
    def receive(cls, name: str, *, timeout: float = 0.0) -> SharedSlots:
        """Return the slots that a process of this user, on this machine, offers under `name`.

        Args:
            name: the name of the offer.
            timeout: how many seconds to wait for the offer if there is none yet. 0: look once.

        Returns:
            The same memory, with `array` and `note`. It stays mapped here, also after the offer or the offering process
            has ended, as long as `array` or an engine over it lives.

        Raises:
            TimeoutError: no process in this network namespace offered it in `timeout` seconds, or the offering one did
                not answer for 10 seconds.
            ConnectionError: the offering process ended before it answered.
            PermissionError: another user offers it.
            ValueError: the memory does not have the size that the offer says; `timeout` is no number.
            CapacityError: this process cannot map the memory, as by a limit on its address space.
            OSError: it has no file descriptor left.
            TypeError: `name` is no string.
        """
        address, end = _address(name), time.monotonic() + to_wait("timeout", timeout)
        slots = cls.__new__(cls)
        slots._files = files = list[int]()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(ANSWER_SECONDS)
                busy = time.monotonic() + ANSWER_SECONDS
                while True:
                    try:
                        connection.connect(address)
                        break
                    except ConnectionRefusedError:
                        if time.monotonic() >= end:
                            text = f"no process of this machine offers {name!r:.80}; waited {timeout:g} seconds"
                            raise TimeoutError(text) from None
                    except BlockingIOError:  # as many as it keeps waiting are waiting
                        if time.monotonic() >= busy:
                            raise TimeoutError(f"the process that offers {name!r:.80} answers nobody") from None
                    time.sleep(_BETWEEN_ATTEMPTS)
                if (user := peer_of(connection)[1]) != os.getuid():
                    raise PermissionError(f"{name!r:.80} is offered by user {user}, not by this one")
                message = received(files, connection, 2 * _LONGEST_NOTE)
            if not files:
                raise PermissionError(f"the process that offers {name!r:.80} did not hand over memory: another user's?")
            said: dict[str, Any] = json.loads(message)
            num_slots, slot_bytes = int(said["num_slots"]), int(said["slot_bytes"])
            if num_slots * slot_bytes != os.fstat(files[0]).st_size:
                raise ValueError(f"{name!r:.80} has other than {num_slots} slots of {slot_bytes} bytes")
            slots._map(num_slots, slot_bytes, str(said["note"]))
        except BaseException:
            close_last(files, len(files))
            raise
        return slots

    # the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the offer: no more processes can `receive` the memory. In every process, this one too, it stays mapped as
        long as `array`, or an engine over it, lives there. Idempotent. RuntimeError inside another call of the library.
        """
        if self._listener is not None and self._thread is not None:
            refuse_waiting("close")
            try:
                self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
            except OSError:
                pass
            self._thread.join()
            self._listener.close()
            self._listener = self._thread = None
        close_last(self._files, len(self._files))

    def __repr__(self) -> str:
        state = "closed" if not self._files else "offered" if self._listener is not None else "mapped"
        return f"SharedSlots({len(self.array)} slots of {self.array.shape[1]} bytes, {state})"


def allocate_memory(files: list[int], name: str, nbytes: int) -> int:
    """Make a memfd of `nbytes` that nobody can resize. Returns its descriptor, which is now the only one in `files`.

    All pages are allocated, since a missing one would later end the process; in steps, since others allocate, too.

    Raises:
        CapacityError: the machine has too little memory, or the process's limits allow too little.
        CapabilityError: the system has no memfd.
    """
    if not hasattr(os, "memfd_create"):
        raise CapabilityError("memory is shared through a memfd, which this system does not have; use Linux")
    try:
        descriptor = opened(files, os.memfd_create, name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        for start in range(0, nbytes, RANGE_BYTES):
            available = hostinfo.available_bytes()
            if available is not None and nbytes - start + SPARE_BYTES > available:
                raise CapacityError(
                    f"{nbytes} bytes of shared memory cannot be allocated: {start} are, and {available} are available; "
                    "give fewer slots, or free memory"
                )
            os.posix_fallocate(descriptor, start, min(RANGE_BYTES, nbytes - start))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException as error:
        close_last(files, len(files))
        if isinstance(error, OSError | OverflowError):
            text = f"{nbytes} bytes of shared memory cannot be allocated ({error}); give fewer slots"
            raise CapacityError(text) from error
        raise
    return descriptor


def _serve(listener: socket.socket, descriptor: int, message: bytes) -> None:
    """Hand the memory to each process that connects, in the offering thread, until the listener is shut down."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno == errno.EINVAL:  # it is shut down
                return
            LOGGER.warning("shared slots are not handed over now: %s", shown(error))  # no descriptor is left, say
            time.sleep(FAILURE_SECONDS)
            continue
        with connection:
            try:
                connection.settimeout(ANSWER_SECONDS)
                if peer_of(connection)[1] == os.getuid():
                    socket.send_fds(connection, [message], [descriptor])
            except OSError as error:
                LOGGER.warning("shared slots could not be handed over: %s", shown(error))


CLOSED_IN_CHILDREN = weakref.WeakSet[socket.socket]()
# a forked child has no thread to answer, and must not keep the name, nor an end of a connection that seems to live on
os.register_at_fork(after_in_child=lambda: list(map(socket.SocketType.close, list(CLOSED_IN_CHILDREN))))


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Return the process, user and group at the other end of a Unix socket, when it connected."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(credentials)
    return process, user, group


def _address(name: str) -> str:
    """Return an address in the abstract name space, which has no files."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {shown(name)}")
    return "\0kvoffload-slots-" + blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
