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
import math
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvoffload.cache.statistics import StatisticsRecorder
from kvoffload.cache.weights import UsedWeights
from kvoffload.device.ownership import FORKS
from kvoffload.device.pinned import HostMemory, touch
from kvoffload.device.shared_slots import CLOSED_IN_CHILDREN, peer_of
from kvoffload.errors import CapabilityError, CapacityError, ClosedError, LayoutError
from kvoffload.internal import hostinfo
from kvoffload.internal.checks import at_least, seconds, shown
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import in_call, in_ours, new_lock, new_thread, refuse_waiting, run_outside
from kvoffload.internal.teardown import Closing, opened
from kvoffload.pool import messages, watching
from kvoffload.pool.messages import Grant, Operation
from kvoffload.pool.pool_memory import Meaning, PoolMemory, RowLayout, close_files, receive
from kvoffload.pool.watching import SETTLE_SECONDS, forget, hang_up, wake, watch

if TYPE_CHECKING:
    from kvoffload.cache.engines import CacheEngine
    from kvoffload.cache.record_calls import RecordCalls
    from kvoffload.cache.state import CacheState
    from kvoffload.pool.pooled_state import PoolRecordCalls

ANSWER_SECONDS = 0.1
ASK_SECONDS = 1e-4 if hostinfo.usable_cpus() >= 8 else 0.0  # that a call asks for its answer before it sleeps
ALLOCATING_SECONDS = 10.0  # that an owner is waited for which says each second that it allocates memory
MOST_UNSENT = 65_536  # messages
_MOST_SECONDS = 1e6  # that anything is waited for: `poll` takes twice as many


class SharedPool(Closing):
    """An engine's membership in a pool, made by `attach` or `beside`. Usable from any thread; a context manager.

    Close it after the engine over its memory: until then it tells owners that this process may touch the memory, and
    holds what a cache over it held when that was forgotten. If you forget it, or an interrupt loses it, it leaves the
    pool when it is collected.

    Attributes:
        path: of the owner's socket, absolute.
        tenant: whose quota and priority the keys of this member have.
        capacity: keys that the region holds, of all members together.
        num_groups: of the layout; 1 if made by `beside`.
    """

    def __init__(
        self, path: str | Path, asked: dict[str, Any], *, tenant: str, num_groups: int, answer_seconds: float
    ) -> None:
        for name, value in (("identity", asked.get("identity", "")), ("tenant", tenant), ("engine", asked["engine"])):
            if not isinstance(value, str):
                raise TypeError(f"{name} must be a string, got {shown(value)}")
            if len(json.dumps(value)) - 2 > 3 * messages.MOST_TEXT:  # all three fit into one datagram
                most = f"{messages.MOST_TEXT}, or 1024 outside of ASCII"
                raise ValueError(f"{name} has {len(value)} characters, and may have {most}: give a digest of it")
        if not hasattr(os, "eventfd"):
            raise CapabilityError("a shared pool needs Linux 2.6.27 and a Python with os.eventfd")
        self.capacity = 0
        self.path, self.tenant, self.num_groups = messages.socket_path(path), tenant, num_groups
        self._asked: dict[str, Any] = {"version": messages.VERSION, "tenant": tenant, **asked}
        self._answer_seconds = min(_MOST_SECONDS, seconds("answer_seconds", answer_seconds))
        self._lock = new_lock()
        self.next_number = itertools.count(1).__next__  # of a message
        self._connections: list[socket.socket] = []  # at most one
        self._incoming = select.poll()  # of the socket
        self._assembler = messages.Assembler()
        self._unsent: deque[tuple[Operation, bytes]] = deque()
        self._slow: dict[int, bytes | None] = {}  # answers to `ask_slowly`, later than those to messages that follow
        self._late: int | None = None  # the number of an answer that has not come in time
        self._next_try = 0.0
        self._joined = False
        self._warned: deque[str] = deque(maxlen=64)  # texts
        self._passed: list[int] = []  # descriptors that came before there was a memory
        self._memory: PoolMemory | None = None
        self._left = False  # a process of this engine that has gone may have left something in use
        self._part: int | None = None  # of each row, which `host_memory` is
        self._forks = len(FORKS)
        self.generation = 0  # how many owners have been lost
        self.has_tiers = False
        self._records: Callable[[], PoolRecordCalls | None] = lambda: None
        self._calls = self._lock  # the lock of the cache's calls, taken before the other: a finalizer may make one
        self._wakeup: list[int] = []  # empty once it is closed
        weakref.finalize(self, forget, self._wakeup, self._connections).atexit = False
        opened(self._wakeup, os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
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
            engine: `(name, part)` of a process that copies, if several processes are one engine; parts count from 0.
                The process with the index gives the name to `beside` instead of calling this. A row has as many parts
                as the layout has groups; `host_memory` is one part of each. Nothing tells if two processes have the
                same name and part: they would overwrite each other. No other engine may have the name.
            timeout: seconds, 0.001 or more, that an owner is waited for, if there is none yet or it does not answer.
                While it says that it allocates memory, for a region's first member, this waits on: perhaps minutes.
            answer_seconds: how long, 0.001 or more, a call of a cache over this pool waits for the owner's answer
                before its keys are misses.

        Returns:
            The membership. `close` it after the engine over `host_memory`, which pins the memory. If the owner ends,
            the next one at `path` is found by later calls.

        Raises:
            TimeoutError: no owner serves `path`, or it has not answered in `timeout` seconds.
            CapacityError: the owner has no memory left for a region, or the region has 63 members already (the
                processes of one engine count once).
            CapabilityError: this system has no memfd; the owner speaks another version, or failed, as its `tiers` may.
            LayoutError: `layout` is no layout, has no fingerprint, or is over several devices.
            PermissionError: the owner is of another user, or this one may not use its socket.
            ValueError, TypeError: a bad argument, a path of more than 107 bytes, or no such tenant.
        """
        if not hasattr(layout, "slot_bytes") or not hasattr(layout, "num_groups"):
            raise LayoutError(f"layout must be a KVLayout, of one device, got {shown(layout)}")
        name, part = "", None
        if engine is not None:
            parts, pair = range(layout.num_groups), isinstance(engine, tuple) and len(engine) == 2
            if not pair or not engine[0] or engine[1] not in parts:
                raise ValueError(f"engine must be a name and a part, 0 to {parts[-1]}, got {shown(engine)}")
            name, part = engine[0], int(engine[1])
        asked = {
            "fingerprint": layout.fingerprint.hex(),
            "identity": identity,
            "row_bytes": layout.slot_bytes * layout.num_groups,
            "engine": name,
        }
        pool = cls(path, asked, tenant=tenant, num_groups=layout.num_groups, answer_seconds=answer_seconds)
        pool._part = part
        return pool._joining(timeout, "it may stand still")

    @classmethod
    def beside(cls, path: str | Path, engine: str, processes: int, *, timeout: float = 10.0) -> SharedPool:
        """Join a pool as the process that has the index of an engine, for a `CacheIndex`. The engine's other processes
        copy; each calls `attach` with the engine's name and a part, before this or meanwhile.

        To the owner this process and the others are one member. If this process ends, what it had reserved is not used
        again before the others have ended, too: they may still be writing. An entry is a row of the memory, whatever
        the groups of the layout. Tenant: "".

        Args:
            path: of the owner's socket.
            engine: the name that the other processes give to `attach`.
            processes: how many other processes there are, without this one.
            timeout: seconds in total, 0.001 or more, for which this waits for an owner and for the others to join.

        Raises:
            TimeoutError: no owner serves `path`, or not exactly `processes` others have joined in `timeout` seconds.
            ValueError: another process has joined as the one with this engine's index; or a bad argument.
            CapacityError, CapabilityError, PermissionError, TypeError: as `attach`.
        """
        if not engine:
            raise ValueError(f"engine must be the name that its processes give to attach, got {shown(engine)}")
        asked = {"engine": engine, "processes": at_least("processes", processes, 1)}
        pool = cls(path, asked, tenant="", num_groups=1, answer_seconds=ANSWER_SECONDS)
        return pool._joining(timeout, f"it answers once exactly {processes} processes of engine {engine:.80} are there")

    def _joining(self, timeout: float, whom: str) -> SharedPool:
        timeout = min(_MOST_SECONDS, seconds("timeout", timeout))
        end, files = time.monotonic() + timeout, list[int]()
        try:
            while True:
                if self._connect(max(0.001, end - time.monotonic())):
                    break
                if time.monotonic() >= end:
                    alive, start = self._socket is not None, "start one with `kvoffload pool serve`"
                    who, so = ("the owner does not answer", whom) if alive else ("no owner answers", start)
                    raise TimeoutError(f"{who} at {shown(self.path)}; waited {timeout:g} seconds; {so}")
                time.sleep(0.02)
            opened(files, os.dup, self._wakeup[0])
            thread = new_thread("kvoffload-pool", watch, weakref.ref(self), files)
            thread.start()
        except BaseException:
            self.close()
            close_files(files)  # unless the thread has it
            raise
        self._thread = thread
        return self

    @property
    def connected(self) -> bool:
        """Whether an owner answers, as far as the last calls have seen."""
        return self._joined and self._late is None

    @property
    def host_memory(self) -> HostMemory:
        """The value for `OffloadEngine(host_memory=)`. Give it to one engine, which pins the memory. CapacityError if a
        cache over the pool lives, or has anything under way: read this before you make one. ClosedError after `close`
        and in a forked child.
        """
        self.check_usable()
        self._check_free()
        assert self._memory is not None
        rows, parts = self._memory.rows, self.num_groups
        flat, slots, stride = rows.reshape(-1), len(rows), rows.shape[1]
        touch(flat, write=False)
        if self._part is None:
            return HostMemory.of_buffer(flat, num_slots=slots * parts, slot_stride=stride // parts)
        return HostMemory.of_buffer(flat, num_slots=slots, slot_stride=stride, offset=self._part * stride // parts)

    def close(self) -> None:
        """Leave the pool: what this member had reserved or leased is free for others. Close the engine first, since
        the GPU must not touch the memory any more: nothing here waits for transfers. Idempotent. In a forked child it
        does nothing. RuntimeError inside another call of the library, for which its thread may be waiting.
        """
        if len(FORKS) != self._forks:
            return
        refuse_waiting("close")
        self._closed = True
        with self._calls, self._lock:
            self._drop()
            if self._memory is not None:
                self._memory.close()
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._calls, self._lock:
            close_files(self._wakeup)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self.connected else "without an owner"
        return f"SharedPool({self.path!r:.80}, {self.capacity} keys, {state})"

    # for the cache ------------------------------------------------------------------------------------------------

    def open(
        self, engine: CacheEngine | None, recorder: Callable[[int], StatisticsRecorder], weights: UsedWeights
    ) -> tuple[CacheState, RecordCalls]:
        """Return state and records for a cache over this pool; caches call it in their constructors.

        Raises:
            CapacityError: the engine's slots are not `host_memory` of this pool, or another cache is over the pool.
            LayoutError: the engine has another layout than the pool was attached with.
            ClosedError: as `check_usable`.
        """
        from kvoffload.pool.pooled_state import PooledState, PoolRecordCalls

        self.check_usable()
        self._check_free()
        slots, layout = self.capacity * self.num_groups, None if engine is None else cast(Any, engine.layout)
        if engine is not None and engine.num_slots != slots:
            raise CapacityError(
                f"the engine has {engine.num_slots} slots, the pool {slots}: give it host_memory=pool.host_memory"
            )
        if layout is not None and layout.fingerprint.hex() != self._asked["fingerprint"]:
            raise LayoutError(
                "a cache over a pool must have one device and the layout that the pool was attached with, got another: "
                f"{shown(layout)}"
            )
        assert self._memory is not None
        if engine is not None and not np.may_share_memory(cast(Any, engine).slots, self._memory.rows):
            raise CapacityError("the engine is over memory of its own: give it host_memory=pool.host_memory")
        first = self._calls is self._lock and not self._asked["engine"]  # nothing can have been granted before
        clean = math.inf if self._left else 0 if first else self.generation
        state = PooledState(self, recorder(self.capacity), engine, clean, weights)
        records = PoolRecordCalls(state, self.check_usable if engine is None else engine.check_process, engine)
        self._calls, self._records = state.lock, weakref.ref(records)
        return state, records

    def _check_free(self) -> None:
        before = self._records()
        if before is not None and before._state.busy:
            raise CapacityError(f"pool={self!r} has a cache already: delete it, end what it holds, or attach again")

    def check_usable(self) -> None:
        """Raise ClosedError in a forked child, and after `close`; not if there is no owner. Takes no lock."""
        if len(FORKS) != self._forks or self._closed:
            raise ClosedError("the shared pool is closed, or this is a forked child: attach to it here")

    def wake(self) -> None:
        """Have the thread look at transfers in flight until they have ended, as caches do: then others see the keys."""
        with self._calls, self._lock:
            if not self._woken:
                self._woken = True
                wake(self._wakeup)

    def ask(self, operation: Operation, payload: bytes, *, granted: Grant | None = None) -> bytes | None:
        """Send a message that has an answer, and return that; wait `answer_seconds`. BRING, REMOVE: `ask_slowly`.

        Args:
            granted: generation and number of what the message asks for. An owner of another generation is not asked.

        Returns:
            The answer. None: there is no owner, or not that of `granted`; it has not answered in time (then further
            calls return None at once, until it has); the message has more than 8 MiB, or the owner refused it, both of
            which are logged; or a signal handler or finalizer asks in the middle of another message.

        Raises:
            CapacityError: the owner refuses RESERVE with ALL_OR_NOTHING.
            ClosedError: the pool is closed, or this is a forked child.
        """
        self.check_usable()
        if in_call(self._lock) or (in_ours() and threading.current_thread() is not self._thread):
            return None  # a finalizer asks, perhaps in the owner's thread
        generation, number = granted or (None, self.next_number())
        with self._calls, self._lock:
            if not (self._ready() and generation in (None, self.generation) and self._send(number, operation, payload)):
                return None
            answer = self._answer(number, time.monotonic() + self._answer_seconds)
        if answer is None or answer[0] != Operation.REFUSED:
            return None if answer is None else answer[1]
        why = answer[1].decode(errors="replace")
        if operation == Operation.RESERVE and payload[0] & messages.ALL_OR_NOTHING:
            raise CapacityError(why)
        LOGGER.warning("the owner of %s has refused a message: %s", self.path, why)
        return None

    def ask_slowly(self, operation: Operation, payload: bytes, wait: float) -> bytes | None:
        """Send BRING, REMOVE or FORGET, and return the answer, before which the owner may wait for tiers. This waits
        about `wait` seconds and `answer_seconds` at most; calls of other threads go on meanwhile.

        Returns:
            The answer; b"" if the owner refused the message, or its tiers failed. None: there is no owner, it has not
            answered in time, or not answered `ask` meanwhile; or the message has more than 8 MiB, which is logged.

        Raises:
            ClosedError: the pool is closed, or this is a forked child.
            RuntimeError: called inside another call of the library.
        """
        self.check_usable()
        refuse_waiting("promote" if operation is Operation.BRING else "remove")
        number, poll, looks_at = self.next_number(), select.poll(), time.monotonic() + self._answer_seconds
        end = looks_at + wait
        self._slow[number] = None
        try:
            with self._calls, self._lock:
                if not self._ready() or not self._send(number, operation, payload):
                    return None
                connection = self._socket
                poll.register(connection, select.POLLIN)  # type: ignore[arg-type]  # it has one
            while True:
                if self._slow[number] is not None or connection is not self._socket or time.monotonic() >= end:
                    break
                poll.poll(1000 * SETTLE_SECONDS)  # another thread may read the answer
                if time.monotonic() >= looks_at:
                    looks_at = time.monotonic() + watching.RETRY_SECONDS
                    if self.ask(Operation.STATUS, messages.pack_keys([])) is None:
                        break  # it may have stopped
                with self._calls, self._lock:
                    if self._ready():  # no other answer is late, or it has come
                        self._message(0.0)
            return self._slow[number]
        finally:
            del self._slow[number]

    def use_weights(self, name: str) -> None:
        """Tell the owner, and each that follows it, which weights this member uses."""
        with self._calls, self._lock:
            self._asked["weights"] = name
        self.tell(Operation.WEIGHTS, name.encode("utf-8", "surrogatepass"), generation=self.generation)

    def tell(self, operation: Operation, payload: bytes, *, generation: int | None = None) -> None:
        """Send a message without an answer; wait about `answer_seconds` at most until it is sent, not until it is read.
        If the owner does not listen, the message is dropped; with `generation`, it is kept and sent later, unless the
        owner of that generation has ended, or 65,536 messages are kept. Does nothing after `close` and in a forked
        child.
        """
        if self._closed or len(FORKS) != self._forks:
            return
        nested = in_call(self._lock)
        with self._calls, self._lock:
            ready, number = not nested and self._ready(), self.next_number()
            if generation not in (None, self.generation) or (ready and self._send(number, operation, payload)):
                return
            if generation is not None and self._joined and len(self._unsent) < MOST_UNSENT:
                self._unsent.append((operation, payload))
                self.wake()

    # the connection -----------------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        """Whether the owner listens: it has answered whatever was asked. Does not wait, but for a new owner's first
        answer. If an answer is late for long, an interrupt may have lost it: then ask for another one.
        """
        self.check_usable()
        if self._socket is None or (self._late is None and not self._joined):  # the latter after an interrupt
            self._connect(self._answer_seconds)
        elif self._late is not None and self._answer(self._late, 0.0) is None and time.monotonic() >= self._next_try:
            if self._joined:
                self._next_try = time.monotonic() + watching.RETRY_SECONDS
                (datagram,) = messages.datagrams(self._late, Operation.STATUS, messages.pack_keys([]))
                self._send_datagram(datagram, socket.MSG_DONTWAIT)  # earlier ones may fill the socket
            else:
                self._drop()  # and ask to join again
        while self._unsent and self.connected:
            self._send(self.next_number(), *self._unsent[0])
            if self.connected:  # else it does not have all of it
                del self._unsent[0]
        return self.connected

    def _connect(self, wait: float) -> bool:
        """Find an owner, at most once in `RETRY_SECONDS`, and join it. False: there is none, or it has not answered."""
        if self._memory is not None and time.monotonic() < self._next_try:
            return False
        self._drop()
        self._next_try, number = time.monotonic() + watching.RETRY_SECONDS, self.next_number()
        try:
            self._connections.append(socket.socket.__new__(socket.socket))
            (connection,) = self._connections
            socket.socket.__init__(connection, socket.AF_UNIX, socket.SOCK_SEQPACKET)
            CLOSED_IN_CHILDREN.add(connection)
            connection.settimeout(None)
            timeout = struct.pack("ll", *divmod(int(1e6 * self._answer_seconds), 1_000_000))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)  # for `connect` and `send`
            connection.connect(self.path)
            if (user := peer_of(connection)[1]) != os.getuid():
                raise PermissionError(f"{shown(self.path)} is served by user {user}, not by this one")
            self._incoming = select.poll()
            self._incoming.register(connection, select.POLLIN)
            self._assembler, self._late = messages.Assembler(), number
            memory = [] if self._memory is None else [self._memory.descriptor]
            message = messages.datagrams(number, Operation.JOIN, json.dumps(self._asked).encode())
            socket.send_fds(connection, message, memory)
        except BaseException as error:
            made = self._socket is not None and self._socket.fileno() >= 0  # else this process has no descriptor left
            tries_again = self._memory is not None or (made and not isinstance(error, PermissionError))
            self._drop()
            if isinstance(error, OSError) and tries_again:
                return False
            raise
        self._answer(number, time.monotonic() + wait)
        return self._joined

    def _take_join(self, kind: int, content: bytes) -> None:
        """Take the owner's answer to JOIN. The first one brings the memory; a later owner must have the same."""
        if kind != Operation.JOIN:
            name, _, reason = content.decode(errors="replace").partition(": ")
            self._drop()
            if self._memory is None:
                raise _ERRORS.get(name, CapabilityError)(reason)
            final = name == messages.OtherMemoryError.__name__
            self._next_try = math.inf if final else self._next_try
            until = "you attach again and make a new engine" if final else "that has changed: it asks each second"
            self._warn(
                f"the new owner of {shown(self.path)} does not take this engine's memory ({name}: {reason}): its cache "
                f"has no hits until {until}"
            )
            return
        said: dict[str, Any] = json.loads(content)
        if self._memory is None:
            self._asked = {**said["joined"], "number": said["number"], "capacity": said["capacity"]}
            meaning = Meaning(said["capacity"], self._asked["row_bytes"], b"", b"")
            if not self._passed:
                raise CapacityError("the pool's memory has not come along: this process has no file descriptor left")
            memory = PoolMemory(self._passed, meaning, headers=False)
            memory.lock(said["number"])
            self._memory, self._passed, self.capacity, self._left = memory, [], meaning.capacity, said["left"]
        self.has_tiers = bool(said["tiers"])
        self._joined = True
        self._warned.clear()
        self.wake()

    def _answer(self, number: int, end: float) -> tuple[int, bytes] | None:
        """Return the answer with this number (0: any answer); None: it does not come in time, and is late. Answers with
        greater numbers may come first, if another thread asked between this one's number and its message.
        """
        self._late = number
        while (message := self._message(end)) is not None:
            if message[1] == Operation.WAIT:
                end = end if self._memory is not None else max(end, time.monotonic() + ALLOCATING_SECONDS)
            elif message[0] == number or not number:
                if not self._joined:
                    self._take_join(*message[1:])
                self._late = None
                return message[1:]
        return None

    def _message(self, end: float) -> tuple[int, int, bytes] | None:
        """Return the next message that is no slow answer; None: none comes in time, or the owner has ended."""
        while self._socket is not None:
            if not self._arrives(end):
                return None
            try:
                datagram = receive(self._socket, self._passed if self._memory is None else None)
                message = self._assembler.take(datagram)
            except (OSError, messages.MessageError):  # at the end there is an empty datagram
                self._lose()
                return None
            if message is not None and message[0] in self._slow:
                self._slow[message[0]] = message[2] if message[1] != Operation.REFUSED else b""
            elif message is not None and message[1] not in (Operation.BRING, Operation.REMOVE, Operation.FORGET):
                return message
        return None

    def _arrives(self, end: float) -> bool:
        """Whether a datagram comes in time. Waking a thread that sleeps may take longer than the owner does."""
        asks_until = min(end, time.monotonic() + ASK_SECONDS)
        while time.monotonic() < asks_until:
            if self._incoming.poll(0):
                return True
        return bool(self._incoming.poll(max(0.0, 1000 * (end - time.monotonic()))))

    def _send(self, number: int, operation: Operation, payload: bytes) -> bool:
        if len(payload) > messages.MOST_MESSAGE:
            size = f"keys of more than {messages.MOST_MESSAGE} bytes"
            self._warn(f"a call over the pool {shown(self.path)} has {size}: they are misses, give it fewer at once")
            return False
        return all(map(self._send_datagram, messages.datagrams(number, operation, payload)))

    def _send_datagram(self, datagram: bytes, flags: int = 0) -> bool:
        assert self._socket is not None
        try:
            self._socket.send(datagram, flags)
            return True
        except BlockingIOError:  # it does not read: any answer shows that it reads again
            self._late = self._late or 0
        except OSError:
            self._lose()
        return False

    def _warn(self, text: str) -> None:
        """Log a warning, once until an owner takes this member again."""
        if text not in self._warned:
            self._warned.append(text)
            LOGGER.warning("%s", text)

    def _lose(self) -> None:
        """Give up an owner that has ended."""
        if self._joined:
            LOGGER.warning("the owner of %s has ended: its keys are misses until another one serves it", self.path)
            self.generation += 1
        self._drop()

    def _drop(self) -> None:
        self._joined, self._late = False, None
        self._unsent.clear()
        close_files(self._passed)
        hang_up(self._connections)

    @property
    def _socket(self) -> socket.socket | None:
        return self._connections[0] if self._connections else None

    @property
    def _owes(self) -> bool:
        """Whether there is something to do that no call of the cache waits for."""
        return bool(not self.connected or self._unsent)

    def _tend(self) -> bool:
        """Find a new owner if there is none, and settle what has ended. Returns whether transfers are in flight."""
        with self._calls, self._lock:
            if self.connected:
                self._message(0.0)  # finds that the owner has ended
            if self._owes:
                self._ready()
        records = self._records()
        return records is not None and run_outside(records.settle)  # which calls the cache's hook


_ERRORS: dict[str, type[Exception]] = {e.__name__: e for e in (CapacityError, CapabilityError, LayoutError, ValueError)}
