"""SharedPool: an engine's membership in a pool of host memory that the engines of a host share.

    the owner: `kvoffload pool serve PATH ...`          a member: the process of an engine

    memory, index, tiers     <── which keys? ──         pool = SharedPool.attach(PATH, layout, identity="model@1")
                             ── these entries ──>       memory = pool.host_memory
                                                        engine = OffloadEngine(layout, host_memory=memory)
                                                        cache = BlockCache(engine, pool=pool)

Each member maps the memory and copies for itself; the owner has the index and never touches a GPU. A key that one
member has stored is a hit for all that have the same layout and identity.

Nobody waits for a process that does not run. If the owner does not answer in time, or has ended, every key is a miss
and nothing is stored, at once and without an exception; transfers under way end as they would have. The next owner
takes the memory over from the members, and the index with it.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.cache.statistics import StatisticsRecorder
from kvoffload.device.ownership import FORKS
from kvoffload.device.pinned import HostMemory
from kvoffload.device.shared_slots import peer_of
from kvoffload.errors import CapabilityError, CapacityError, ClosedError, LayoutError
from kvoffload.internal import hostinfo
from kvoffload.internal.checks import seconds, shown
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import refuse_nested
from kvoffload.pool import watching
from kvoffload.pool.memory import Meaning, PoolMemory, RowLayout, close_files
from kvoffload.pool.messages import (
    ALL_OR_NOTHING,
    HEADER,
    VERSION,
    Assembler,
    MessageError,
    Operation,
    datagrams,
    pack_keys,
    receive,
)
from kvoffload.pool.watching import SETTLE_SECONDS, forget, wake, watch

if TYPE_CHECKING:
    from kvoffload.cache.engines import CacheEngine
    from kvoffload.cache.records import Records
    from kvoffload.cache.state import CacheState

ANSWER_SECONDS = 0.1
ASK_SECONDS = 1e-4 if hostinfo.usable_cpus() >= 8 else 0.0  # that a call asks for its answer before it sleeps
ALLOCATING_SECONDS = 10.0  # that an owner is waited for which says each second that it allocates memory
_MOST_UNSENT = 65_536  # messages


class SharedPool:
    """Made by `attach`. Usable from any thread; a context manager.

    Close it after the engine over its memory: until then it tells owners that this process may touch the memory.

    Attributes:
        path: of the owner's socket.
        tenant: whose quota and priority the keys of this member have.
        capacity: keys that the region holds, of all members together.
        num_groups: of the layout.
    """

    def __init__(
        self, path: str | Path, asked: dict[str, Any], *, tenant: str, num_groups: int, answer_seconds: float
    ) -> None:
        for name, value in (("identity", asked.get("identity", "")), ("tenant", tenant), ("engine", asked["engine"])):
            if not isinstance(value, str):
                raise TypeError(f"{name} must be a string, got {shown(value)}")
        if not hasattr(os, "eventfd"):
            raise CapabilityError("a shared pool needs Linux 2.6.27 and a Python with os.eventfd")
        self.path, self.tenant, self.num_groups = os.fspath(path), tenant, num_groups
        self._asked = {"version": VERSION, "tenant": tenant, **asked}
        self._answer_seconds = seconds("answer_seconds", answer_seconds)
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._socket: socket.socket | None = None
        self._incoming = select.poll()  # of the socket
        self._assembler = Assembler()
        self._unsent: deque[bytes] = deque()
        self._slow: dict[int, bytes | None] = {}  # answers to `ask_slowly`, later than those to messages that follow
        self._late: int | None = None  # the number of an answer that has not come in time
        self._next_try = 0.0
        self._joined = self._refused = False
        self._memory: PoolMemory | None = None
        self._number = 0
        self._forks = len(FORKS)
        self.generation = 0  # how many owners have been lost
        self.has_tiers = False
        self._settle: Callable[[], bool] = lambda: False
        self._calls = self._lock  # the lock of the cache's calls
        self._wakeup = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)]  # empty once it is closed
        weakref.finalize(self, forget, self._wakeup).atexit = False
        self._thread: threading.Thread | None = None
        self._woken = False  # the thread is going to look at what is in flight
        self._closed = False

    @classmethod
    def attach(
        cls,
        path: str | Path,
        layout: RowLayout,
        *,
        identity: str,
        tenant: str = "",
        engine: tuple[str, int] | None = None,
        timeout: float = 10.0,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> SharedPool:
        """Join the pool that an owner serves at `path`.

        Args:
            path: of the owner's socket.
            layout: of the KV cache. Members with the same fingerprint and identity share keys; others have a region of
                their own.
            identity: a text for everything but the layout that the bytes depend on, such as model and revision.
            tenant: one of the owner's tenants. All calls of a cache over this pool are this tenant's.
            engine: name and part, if several processes are one engine: those that copy give them here, and the one that
                has the index gives the name to `beside`. No other engine may have the name. A row then has as many
                parts as the layout has groups, `host_memory` is one part of each, and no other process has it.
            timeout: seconds that an owner is waited for, if there is none yet or it does not answer. While it
                allocates the memory of a region, for its first member, it says so each second: that may take minutes.
            answer_seconds: how long a call waits for the owner's answer before its keys are misses.

        Raises:
            TimeoutError: no owner serves `path`, or it has not answered in `timeout` seconds.
            CapacityError: the owner has no memory left for a region, or it has 63 members already.
            CapabilityError: this system has no memfd, or the owner speaks another version.
            LayoutError: the layout has no fingerprint, or is over several devices.
            PermissionError: the owner is of another user.
            ValueError, TypeError: a bad argument, or no such tenant.
        """
        if not hasattr(layout, "slot_bytes") or not hasattr(layout, "num_groups"):
            raise LayoutError(f"layout must be a KVLayout, of one device, got {shown(layout)}")
        asked = {
            "fingerprint": layout.fingerprint.hex(),
            "identity": identity,
            "row_bytes": layout.slot_bytes * layout.num_groups,
            "engine": "" if engine is None else engine[0],
        }
        pool = cls(path, asked, tenant=tenant, num_groups=layout.num_groups, answer_seconds=answer_seconds)
        pool._part = None if engine is None else engine[1]
        return pool._joining(timeout, "")

    @classmethod
    def beside(
        cls,
        path: str | Path,
        engine: str,
        processes: int,
        *,
        tenant: str = "",
        timeout: float = 10.0,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> SharedPool:
        """Join a pool as the process that has the index of an engine, for a `CacheIndex`. Other processes copy.

        To the owner all are one member. If this one ends, what it had reserved is not used again before they have
        ended, too: they may still be writing. An entry is a row of the memory, whatever the groups of the layout.

        Args:
            engine: the name that the others have given to `attach`.
            processes: how many these are.
            path, tenant, timeout, answer_seconds: as for `attach`. It also waits for the other processes.

        Raises:
            TimeoutError: no owner serves `path`, or these processes have not joined in `timeout` seconds.
            ValueError: another process has joined as the one with this engine's index.
            Also errors of `attach`.
        """
        asked = {"engine": engine, "processes": processes}
        pool = cls(path, asked, tenant=tenant, num_groups=1, answer_seconds=answer_seconds)
        return pool._joining(timeout, f" for {processes} processes of engine {engine:.80}")

    def _joining(self, timeout: float, whom: str) -> SharedPool:
        end = time.monotonic() + seconds("timeout", timeout)
        try:
            while not self._connect(max(0.001, end - time.monotonic())):
                if time.monotonic() >= end:
                    raise TimeoutError(f"no owner answers at {shown(self.path)}{whom}; waited {timeout:g} seconds")
                time.sleep(0.02)
        except BaseException:
            self.close()
            raise
        arguments = weakref.ref(self), os.dup(self._wakeup[0])
        self._thread = threading.Thread(target=watch, args=arguments, name="kvoffload-pool", daemon=True)
        self._thread.start()
        return self

    @property
    def capacity(self) -> int:
        return self._region.meaning.capacity

    @property
    def connected(self) -> bool:
        """Whether an owner answers, as far as the last calls have seen."""
        return self._joined and self._late is None

    @property
    def host_memory(self) -> HostMemory:
        """The value for `OffloadEngine(host_memory=)`. Give it to one engine, which pins the memory."""
        rows = self._region.rows
        stride, slots = rows.shape[1], len(rows)
        if self._part is not None:
            offset = self._part * stride // self.num_groups
            return HostMemory.of_buffer(rows.reshape(-1), num_slots=slots, slot_stride=stride, offset=offset)
        factor = self.num_groups
        return HostMemory.of_buffer(rows.reshape(-1), num_slots=slots * factor, slot_stride=stride // factor)

    @property
    def _region(self) -> PoolMemory:
        if self._memory is None or self._closed:
            raise ClosedError("the shared pool is closed: attach to it again")
        return self._memory

    def close(self) -> None:
        """Leave the pool: what this member had reserved or leased is free for others. Close the engine first, since
        the GPU must not touch the memory any more. Idempotent. In a forked child it does nothing.

        Raises RuntimeError inside a call of the cache, for which the membership's thread may be waiting.
        """
        if len(FORKS) == self._forks:
            refuse_nested(self._calls, "close")
        self._closed = True
        if len(FORKS) == self._forks:
            with self._lock:
                self._drop()
                if self._memory is not None:
                    self._memory.close()
            self.wake()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join()
            with self._lock:
                close_files(self._wakeup)

    def __enter__(self) -> SharedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self.connected else "without an owner"
        capacity = 0 if self._memory is None else self._memory.meaning.capacity
        return f"SharedPool({self.path!r:.80}, {capacity} keys, {state})"

    # for the cache ------------------------------------------------------------------------------------------------

    def open(
        self, engine: CacheEngine | None, recorder: Callable[[int], StatisticsRecorder]
    ) -> tuple[CacheState, Records]:
        """State and records of a cache over this pool. Raises CapacityError, LayoutError: the engine is not over it."""
        from kvoffload.pool.records import PooledState, PoolRecords, settler

        capacity = self.capacity
        layout: Any = None if engine is None else engine.layout
        slots = capacity * self.num_groups
        if engine is not None and len(engine.devices) > 1:
            raise LayoutError(f"engine must be over one device, since it has a shared pool, got {shown(engine)}")
        if engine is not None and engine.num_slots != slots:
            raise CapacityError(
                f"the engine has {engine.num_slots} slots, the pool {slots}: give it host_memory=pool.host_memory"
            )
        if layout is not None and layout.fingerprint.hex() != self._asked["fingerprint"]:
            raise LayoutError(f"the engine's layout is another than the pool was attached with: {shown(layout)}")
        first = self._calls is self._lock and not self._asked["engine"]  # nothing can have been granted before
        state = PooledState(self, recorder(capacity), engine, 0 if first else self.generation)
        records = PoolRecords(state, self.check_usable if engine is None else engine.check_process)
        self._calls = state.lock
        self._settle = settler(None if engine is None else weakref.ref(engine), weakref.ref(records))
        return state, records

    def check_usable(self) -> None:
        """Raise ClosedError in a forked child, and after `close`. Takes no lock, which a child may never get."""
        if len(FORKS) != self._forks or self._closed:
            raise ClosedError("the shared pool is closed, or this is a forked child: attach to it here")

    def next_number(self) -> int:
        """A number for a message."""
        return next(self._numbers)

    def wake(self) -> None:
        """Transfers are in flight: look at them until they have ended, so that others see the keys."""
        with self._lock:
            if not self._woken:
                self._woken = True
                wake(self._wakeup)

    def ask(self, number: int, operation: Operation, payload: bytes, *, generation: int | None = None) -> bytes | None:
        """The owner's answer to a message; None: no owner, or not in time, and then not before it has caught up; or it
        is of another `generation`.

        Raises CapacityError if it refuses RESERVE with ALL_OR_NOTHING.
        """
        self.check_usable()
        with self._lock:
            if not self._ready() or generation not in (None, self.generation):
                return None
            if not self._send(number, operation, payload):
                return None
            answer = self._answer(number, self._answer_seconds)
        if answer is None:
            return None
        kind, content = answer
        if kind == Operation.REFUSED:
            if operation == Operation.RESERVE and payload[0] & ALL_OR_NOTHING:
                raise CapacityError(content.decode(errors="replace"))
            LOGGER.warning("the owner of %s has refused a message: %s", self.path, shown(content))
            return None
        return content

    def ask_slowly(self, operation: Operation, payload: bytes, wait: float) -> bytes | None:
        """The answer to BRING or REMOVE, for which the owner may wait for tiers, at most so many seconds; None: as of
        `ask`. Other calls go on meanwhile.
        """
        self.check_usable()
        number, connection = self.next_number(), None
        with self._lock:
            if self._ready():
                self._slow[number] = None
                connection = self._socket if self._send(number, operation, payload) else None
        end, poll = time.monotonic() + wait + self._answer_seconds, select.poll()
        try:
            if connection is not None:
                poll.register(connection, select.POLLIN)
            while connection is not None and self._slow[number] is None and time.monotonic() < end:
                poll.poll(1000 * SETTLE_SECONDS)  # another thread may read the answer
                with self._lock:
                    if connection is not self._socket:
                        break
                    if self._late is None:
                        self._message(0.0)
            return self._slow[number] if connection is not None else None
        finally:
            self._slow.pop(number, None)

    def tell(self, operation: Operation, payload: bytes, *, keep: bool = False) -> None:
        """Send a message without an answer. If the owner does not listen it is dropped, or with `keep` sent later."""
        if self._closed or len(FORKS) != self._forks:
            return
        with self._lock:
            number = next(self._numbers)
            if self._ready() and self._send(number, operation, payload):
                return
            if keep and self._joined and len(self._unsent) < _MOST_UNSENT:
                self._unsent.extend(datagrams(number, operation, payload))
                self.wake()

    # the connection -----------------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        """Whether the owner listens: it has answered whatever was asked. Does not wait."""
        self.check_usable()
        if self._socket is not None and self._late is None and not self._joined:
            self._drop()  # an interrupt has lost the answer to JOIN: ask again
        if self._socket is None and not self._connect(self._answer_seconds):
            return False
        if self._late is not None and not self._caught_up():
            return False
        while self._unsent and self._joined:
            if not self._send_datagram(self._unsent[0]):
                return False
            self._unsent.popleft()
        return self._joined

    def _caught_up(self) -> bool:
        """Whether the owner has answered what was late. The answer may be lost, as by an interrupt: so ask it again."""
        assert self._late is not None
        answer = self._answer(self._late, 0.0)
        if answer is not None and not self._joined:
            self._take_join(*answer)
        elif answer is None and self._socket is not None and time.monotonic() >= self._next_try:
            if self._joined:
                self._next_try = time.monotonic() + watching.RETRY_SECONDS
                self._send(next(self._numbers), Operation.STATUS, pack_keys([]))
            else:
                self._drop()  # and ask to join again
        return self._late is None and self._socket is not None

    def _connect(self, wait: float) -> bool:
        """Find an owner, at most once in `RETRY_SECONDS`, and join it. False: there is none, or it has not answered."""
        if self._socket is not None or self._refused or (self._joined_before and time.monotonic() < self._next_try):
            return self._joined
        self._next_try = time.monotonic() + watching.RETRY_SECONDS
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(self._answer_seconds)
            connection.connect(self.path)
            if (user := peer_of(connection)[1]) not in (os.getuid(), 0):
                raise PermissionError(f"{shown(self.path)} is served by user {user}, not by this one")
        except OSError as error:
            connection.close()
            if isinstance(error, PermissionError) and not self._joined_before:
                raise
            return False
        except BaseException:
            connection.close()
            raise
        connection.setblocking(False)
        held, number = self._memory, next(self._numbers)
        self._incoming = select.poll()
        self._incoming.register(connection, select.POLLIN)
        self._socket, self._assembler, self._late = connection, Assembler(), number
        asked = (
            self._asked if held is None else {**self._asked, "number": self._number, "capacity": held.meaning.capacity}
        )
        message = next(datagrams(number, Operation.JOIN, json.dumps(asked).encode()))
        try:
            socket.send_fds(connection, [message], [] if held is None else [held.descriptor])
        except OSError:
            self._lose()
            return False
        answer = self._answer(number, wait, descriptors=held is None)
        if answer is not None:
            self._take_join(*answer)
        elif not self._joined_before:
            self._drop()
        return self._joined

    @property
    def _joined_before(self) -> bool:
        return self._memory is not None

    def _take_join(self, kind: int, content: bytes) -> None:
        """The owner's answer to JOIN. The first one brings the memory; a later owner must have the same."""
        if kind != Operation.JOIN:
            text = content.decode(errors="replace")
            self._drop()
            if self._joined_before and text.startswith(CapabilityError.__name__):
                self._refused = True
                LOGGER.warning(
                    "the new owner of %s does not take this engine's memory (%s): its cache has no hits until you "
                    "attach again and make a new engine", self.path, text,
                )  # fmt: skip
            if self._joined_before:
                return
            name, _, reason = text.partition(": ")
            raise _ERRORS.get(name, CapabilityError)(reason)
        said: dict[str, Any] = json.loads(content)
        if self._memory is None:
            self._asked = said["joined"]
            asked = (bytes.fromhex(str(self._asked["fingerprint"])), bytes.fromhex(said["identity"]))
            meaning = Meaning(int(said["capacity"]), int(str(self._asked["row_bytes"])), *asked)
            if self._descriptor is None:
                raise CapabilityError("the owner did not hand over its memory")
            descriptor, self._descriptor = self._descriptor, None
            if os.fstat(descriptor).st_size != meaning.nbytes:
                os.close(descriptor)
                raise CapabilityError("the owner's memory has another size than it says")
            self._memory = PoolMemory(descriptor, meaning, headers=False)
            self._number = int(said["number"])
            self._memory.lock(self._number)
        self.has_tiers = bool(said["tiers"])
        self._joined = True
        self.wake()

    _part: int | None = None  # of each row, which `host_memory` is
    _descriptor: int | None = None  # that came with the answer to JOIN

    def _answer(self, number: int, wait: float, *, descriptors: bool = False) -> tuple[int, bytes] | None:
        """The answer with this number, if it comes in time; None otherwise, and then it is late."""
        self._late, end = number, time.monotonic() + wait
        while (message := self._message(wait, descriptors=descriptors)) is not None:
            if message[1] == Operation.WAIT and descriptors:
                end = max(end, time.monotonic() + ALLOCATING_SECONDS)
            elif message[0] >= number and message[1] != Operation.WAIT:
                self._late = None
                return message[1:]
            wait = max(0.0, end - time.monotonic())
        return None

    def _message(self, wait: float, *, descriptors: bool = False) -> tuple[int, int, bytes] | None:
        """The next message that is no slow answer; None: there is none in time, or the owner has ended."""
        connection, end = self._socket, None
        while connection is not None:
            try:
                if wait > 0 and not self._arrives(wait):
                    return None
                if descriptors and self._descriptor is None:
                    datagram, passed, _, _ = socket.recv_fds(connection, 65_536, 1, socket.MSG_CMSG_CLOEXEC)
                    self._descriptor = passed[0] if passed else None
                else:
                    datagram = receive(connection)
                message = self._assembler.take(datagram) if datagram else None
            except BlockingIOError:
                return None
            except (OSError, MessageError):
                datagram = b""
            if not datagram:
                self._lose()
                return None
            if message is not None:
                if message[0] in self._slow:
                    self._slow[message[0]] = message[2] if message[1] != Operation.REFUSED else b""
                elif message[1] not in (Operation.BRING, Operation.REMOVE):
                    return message
            end = time.monotonic() + wait if end is None else end
            wait = max(0.0, end - time.monotonic())
        return None

    def _arrives(self, wait: float) -> bool:
        """Whether a datagram comes in time. Waking a thread that sleeps may take longer than the owner does."""
        asks_until = time.monotonic() + min(wait, ASK_SECONDS)
        while time.monotonic() < asks_until:
            if self._incoming.poll(0):
                return True
        return bool(self._incoming.poll(1000 * wait))

    def _send(self, number: int, operation: Operation, payload: bytes) -> bool:
        if len(payload) + HEADER.size <= 48 << 10:
            return self._send_datagram(HEADER.pack(number, operation, False) + payload)
        return all(map(self._send_datagram, datagrams(number, operation, payload)))

    def _send_datagram(self, datagram: bytes) -> bool:
        assert self._socket is not None
        for waits in (True, False):
            try:
                self._socket.send(datagram)
                return True
            except BlockingIOError:
                room = select.poll()
                room.register(self._socket, select.POLLOUT)
                if not waits or not room.poll(1000 * self._answer_seconds):
                    break
            except OSError:
                self._lose()
                return False
        self._late = self._late or 0  # any answer shows that it reads again
        return False

    def _lose(self) -> None:
        """The owner has ended."""
        if self._joined:
            LOGGER.warning("the owner of %s has ended: its keys are misses until another one serves it", self.path)
            self.generation += 1
        self._drop()

    def _drop(self) -> None:
        connection, self._socket = self._socket, None
        self._joined, self._late = False, None
        self._unsent.clear()
        if connection is not None:
            connection.close()

    def _tend(self, ended: socket.socket | None) -> bool:
        """For the thread: find a new owner if there is none, settle what has ended. Whether transfers are in flight.

        Args:
            ended: a connection whose other end is closed.
        """
        if self._closed:
            return False
        with self._lock:
            if ended is not None and ended is self._socket:
                self._lose()
            if not self._joined or self._late is not None or self._unsent:
                self._ready()
        return self._settle()


_ERRORS: dict[str, type[Exception]] = {e.__name__: e for e in (CapacityError, CapabilityError, LayoutError, ValueError)}
