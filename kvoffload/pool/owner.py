"""PoolOwner: serves a pool of host memory to the engines of a host. It never touches a GPU.

One thread does everything but what may take long (making a region, removing keys from tiers): that has a thread of
its own for as long as it takes, and the answer follows. A member has gone when its process has ended (pidfd) or its
socket has; a forked child of it may keep the socket open.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import DEFAULT_POLICY, Policy, PolicyChoice
from kvoffload.cache.pools import Tenant
from kvoffload.cache.weights import namespace_of
from kvoffload.device.ownership import FORKS
from kvoffload.device.shared_slots import CLOSED_IN_CHILDREN, peer_of
from kvoffload.errors import CapabilityError, CapacityError, KVOffloadError
from kvoffload.internal import hostinfo
from kvoffload.internal.checks import at_least, reason, seconds, shown
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import begin_thread, new_lock, new_thread, refuse_waiting
from kvoffload.internal.teardown import Closing
from kvoffload.pool import messages
from kvoffload.pool.member_calls import OPERATIONS, Message
from kvoffload.pool.messages import MOST_TEXT, MessageError, Operation, OtherMemoryError, datagrams
from kvoffload.pool.pool_memory import MEMBERS, OWNER, Meaning, PoolMemory, close_files, receive
from kvoffload.pool.region import Member, Region, Step, meaning_of

if TYPE_CHECKING:
    from kvoffload.cache.tiering.attaching import WriteName
    from kvoffload.cache.tiering.tier import Tier

NOTICE_SECONDS = 1.0  # between messages to members that wait until memory is allocated
GRACE_SECONDS = 2.5  # after an owner with members: they bring its memory before new ones come; they look each second
QUARANTINE_SECONDS = 0.05  # between looks at locks of members that have gone
BUSY_POLL_SECONDS = 0.02 if hostinfo.usable_cpus() >= 8 else 0.0  # of an owner in a process of its own
LOCK_SECONDS = 5.0  # that the socket's folder is waited for, in which another owner may be starting
JOIN_SECONDS = 5.0  # that a connection has until it asks to join
_MOST_CONNECTIONS = 1024

RegionKey = tuple[bytes, bytes, int]


class PoolOwner(Closing):
    """Owns the memory and the index of a pool, and serves members from a thread until `close`. A context manager.

    Args:
        path: of the socket, in a folder that only this user, or root, may change (or one like /tmp). Members must be of
            this user.
        nbytes: of all regions together. A region is allocated when its first member joins.
        region_bytes: of each region, and less if less is left: members with the same layout and identity share one.
            None: `nbytes`, for a single one. If there is no room for another region, those without members make room,
            the oldest first.
        policy, tenants, write: of each region's index, as for `BlockCache`; the policy no object, which one index has.
        busy_poll: seconds for which the thread polls its sockets after each message before it sleeps. That keeps a core
            (and the interpreter) busy while members call; waking it costs a call tens to hundreds of microseconds.
        tiers: called for each region with a name of its own (letters and digits, always the same for the same layout
            and identity) and the identity; returns its tiers, which the owner closes. Called in a thread of the owner's
            when the region's first member joins; if it raises, that member is refused (CapabilityError there, unless it
            raises CapacityError, LayoutError or ValueError).

    Attributes:
        failure: what has ended the thread before `close`; None: nothing has.

    Raises:
        ValueError: another owner serves `path`; it has more than 107 bytes, or is a file that is no socket; another
            process keeps its folder locked; or a bad argument.
        TypeError: `policy` is an object, `tiers` is no function, or an argument is of a wrong type.
        PermissionError: others may write to the folder.
        OSError: the socket cannot be made there; FileNotFoundError: there is no such folder.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        nbytes: int,
        region_bytes: int | None = None,
        policy: PolicyChoice = DEFAULT_POLICY,
        tenants: Mapping[str, Tenant] | None = None,
        tiers: Callable[[str, str], Sequence[Tier]] | None = None,
        write: WriteName = "admitted",
        busy_poll: float = 0.0,
    ) -> None:
        from kvoffload.cache.tiering.attaching import TierPlan

        if isinstance(policy, Policy):
            raise TypeError(f"policy must be a name or a function of the capacity, of each region, got {shown(policy)}")
        if tiers is not None and not callable(tiers):
            raise TypeError(f"tiers must be a function of a region's name and identity, or None, got {shown(tiers)}")
        self.path = messages.socket_path(path)
        self._nbytes = at_least("nbytes", nbytes, 1)
        self._region_bytes = self._nbytes if region_bytes is None else at_least("region_bytes", region_bytes, 1)
        if self._region_bytes > self._nbytes:
            raise ValueError(f"region_bytes must be at most nbytes, {self._nbytes}, got {self._region_bytes}")
        self._options: dict[str, Any] = {"policy": policy, "tenants": tenants}
        TierPlan((), write, 1.0, None)  # which checks `write`
        self._tiers, self._write = tiers, write
        self._busy_poll = seconds("busy_poll", busy_poll, 0.0)
        with CacheIndex(0, **self._options) as index:
            self._tenants = set(index._state.pools.by_tenant)
        self._regions: dict[RegionKey, Region] = {}
        self._making: dict[RegionKey, int] = {}  # bytes of regions that other threads make; 0: that they close
        self._silent: dict[Member, float] = {}  # until when they may stay: that do not ask to join, or are refused
        self._joining: list[Member] = []  # that have no answer yet
        self._members: set[Member] = set()
        self._done: deque[Step] = deque()  # of other threads, for ours
        self._listener, self._bound, follows = _listen(self.path)
        self._epoll = select.epoll()
        self._member_of: dict[int, Member] = {}  # by descriptor, of a socket or a process
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._waking = new_lock()
        self._closing = self._full = False
        self._forks = len(FORKS)
        self.failure: BaseException | None = None
        self._warned: deque[str] = deque(maxlen=64)  # texts
        self._grace_until = time.monotonic() + (GRACE_SECONDS if follows else 0.0)
        self._epoll.register(self._listener, select.EPOLLIN)
        self._thread = new_thread("kvoffload-pool-owner", self._serve)
        self._thread.start()

    def close(self) -> None:
        """End: stop serving, and close the tiers; a thread goes on closing those that take more than a second. Members
        go on without hits, and keep the memory mapped. Idempotent. RuntimeError inside another call of the library.

        If there are members, or those of the last owner may still come back, the socket's file stays: by it the next
        owner knows that they will bring the memory.
        """
        refuse_waiting("close")
        self._closing = True
        self._post(bool)  # so that the thread looks
        self._thread.join()

    def statistics(self) -> list[dict[str, Any]]:
        """Return a dict for each region: `name`, `members` (processes, also of one engine), `nbytes`, `capacity`; keys
        `resident`, `pending` and `pinned` now; `evicted` so far. Waits for the owner's thread. Messages that members
        had sent before this call count, unless more arrive than the owner can execute. After `close`, or once `failure`
        is set: []. RuntimeError inside another call of the library.
        """
        counted: Future[list[dict[str, Any]]] = Future()

        def count() -> None:
            counted.set_result([region.counts() for region in self._regions.values()])

        if threading.current_thread() is self._thread:
            count()
        else:
            refuse_waiting("statistics")
            self._post(count)
        return counted.result()

    def __repr__(self) -> str:
        return f"PoolOwner({self.path!r:.80}, {len(self._regions)} regions, {len(self._members)} connections)"

    # the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        awake_until = 0.0
        try:
            while not self._closing:
                waits = bool(self._joining or self._silent or self._full)
                waits = waits or any(region.waits for region in self._regions.values())
                posted = len(self._done)  # what members had sent before comes first
                timeout = 0.0 if posted or time.monotonic() < awake_until else QUARANTINE_SECONDS if waits else None
                if self._handle_events(timeout):
                    awake_until = time.monotonic() + self._busy_poll
                else:
                    os.sched_yield()  # to whoever wants this core
                for _ in range(posted):
                    self._done.popleft()()
                self._joining = [member for member in self._joining if not self._join(member)]
                if waits:
                    for member in [each for each, end in self._silent.items() if time.monotonic() >= end]:
                        self._lose(member)
                    if self._full:
                        self._full = False
                        self._epoll.modify(self._listener, select.EPOLLIN)
                    for region in self._regions.values():
                        self._survive(region.settle)
            self._handle_events(0)  # who has left by now does not come back
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._end()

    def _handle_events(self, timeout: float | None) -> bool:
        """Handle events; wait for the first of them until the timeout. Returns whether there were any. In between a
        descriptor may be closed and given to another member.
        """
        ready = [(each, events, self._member_of.get(each)) for each, events in self._epoll.poll(timeout)]
        for each in ready:
            self._handle(*each)
        return bool(ready)

    def _handle(self, descriptor: int, events: int, member: Member | None) -> None:
        if descriptor == self._wakeup:
            os.eventfd_read(descriptor)
        elif descriptor == self._listener.fileno():
            self._accept()
        elif member is not None and not member.gone:
            dead = descriptor != member.watched[0]
            try:
                if dead:
                    member.connection.shutdown(socket.SHUT_RD)  # a forked child of it may send for ever
                if events & ~select.EPOLLIN and member.flush():
                    self._epoll.modify(member.connection, select.EPOLLIN)
                while events & ~select.EPOLLOUT and self._read(member) and dead:
                    pass  # messages that it sent before it died count; behind them is its end
            except Exception as error:  # noqa: BLE001  # one member's must not end the others'
                if not isinstance(error, ConnectionError):
                    LOGGER.warning("a member of %s is cut off: %s", self.path, reason(error))
                self._lose(member, dead=dead)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor is left: not again before the next look at those that do not join
            self._warn_once(f"{self.path} accepts no connection: {reason(error)}")
            self._full = True
            self._epoll.modify(self._listener, 0)
            return
        process, user, _ = peer_of(connection)
        if user != os.getuid() or len(self._members) >= _MOST_CONNECTIONS:
            self._warn_once(f"{self.path} refuses connections: of other users, or more than {_MOST_CONNECTIONS}")
            connection.close()
            return
        watched = [connection.fileno()]
        with suppress(OSError):  # it has ended, which its socket says, too; or it is in another namespace
            watched.append(os.pidfd_open(process))
        CLOSED_IN_CHILDREN.add(connection)
        connection.setblocking(False)
        member = Member(connection, watched, self._epoll, self._post)
        self._members.add(member)
        self._silent[member] = time.monotonic() + JOIN_SECONDS
        for each in watched:
            self._member_of[each] = member
            self._epoll.register(each, select.EPOLLIN)

    def _read(self, member: Member) -> bool:
        """Execute up to 64 datagrams that it has sent. Returns whether there may be more: others have their turn first.
        Raises ConnectionError: it has ended.
        """
        for _ in range(64):
            try:
                datagram = receive(member.connection, member.files if member.region is None else None)
            except BlockingIOError:
                return False
            if not datagram:
                raise ConnectionResetError("it has ended")
            message = member.assembler.take(datagram)
            if message is not None:
                self._execute(member, *message)
        return True

    def _execute(self, member: Member, number: int, kind: int, payload: bytes) -> None:
        if kind == Operation.JOIN and member.join < 0:
            member.join, member.asked = number, json.loads(payload)
            self._silent.pop(member, None)
            self._joining.append(member)
            return
        if member.region is None or kind not in OPERATIONS:
            raise MessageError(f"operation {kind} from a member that has not joined, or that nobody knows")
        try:
            answer = OPERATIONS[kind](member.region, Message(member, number, payload))
        except (KVOffloadError, ValueError, TypeError) as error:
            kind, answer = Operation.REFUSED, str(error).encode(errors="replace")[:MOST_TEXT]
        if answer is not None:
            member.answer(number, kind, answer)

    def _lose(self, member: Member, *, dead: bool = False) -> None:
        """Cut a member off. `dead`: its process is known to have ended."""
        self._silent.pop(member, None)
        if member.gone:
            return
        member.gone = True
        for each in member.watched:
            self._epoll.unregister(each)
            del self._member_of[each]
        member.connection.close()
        close_files(member.files + member.watched[1:])
        self._members.discard(member)
        if member.region is not None:
            self._survive(partial(member.region.leave, member, dead=dead))

    def _survive(self, step: Step) -> None:
        """Run a step, and go on if it raises: one member, or one region, must not end the others'."""
        try:
            step()
        except BaseException as error:  # noqa: BLE001  # SystemExit of a policy, too
            self._warn_once(f"an error in the owner of {self.path}: {reason(error)}")

    def _post(self, step: Step) -> None:
        """Have the owner's thread run a step; after its end, or in a forked child, run it here. For any thread."""
        if len(FORKS) == self._forks:  # else a thread of the parent may have had the lock
            with self._waking:
                if self._wakeup >= 0:
                    self._done.append(step)
                    os.eventfd_write(self._wakeup, 1)
                    return
        step()

    def _end(self) -> None:
        self._closing = True
        held = bool(self._making) or time.monotonic() < self._grace_until
        held = held or any(region.memory.locked(each) for region in self._regions.values() for each in range(MEMBERS))
        held = held or any(member.files or member.region is not None for member in self._members)
        for member in list(self._members):
            self._lose(member)
        self._epoll.unregister(self._listener)
        with suppress(OSError):  # before the listener ends: a new owner may bind it then
            if not held and os.path.samestat(os.lstat(self.path), self._bound):
                os.unlink(self.path)
        self._listener.close()
        for region in self._regions.values():
            region.close()
        self._regions.clear()
        self._epoll.close()
        with self._waking:
            wakeup, self._wakeup = self._wakeup, -1
            os.close(wakeup)
        while self._done:
            self._done.popleft()()

    # joining ------------------------------------------------------------------------------------------------------

    def _join(self, member: Member) -> bool:
        """Have a member join the region that is there, the one that it brings along, or a new one. Returns whether it
        has an answer. Else it waits: for other processes of its engine, for a region that is being made, or for members
        of the last owner.
        """
        if member.gone:
            return True
        try:
            key = member.key = self._checked(member)
            region = None if key is None else self._regions.get(key)
            if key in self._making and not member.files and time.monotonic() >= member.notice:
                member.notice = time.monotonic() + NOTICE_SECONDS
                member.answer(member.join, Operation.WAIT, b"")
            if key is None or key in self._making:
                return False
            if region is None and member.files:
                meaning = Meaning(int(member.asked["capacity"]), key[2], key[0], key[1])
                memory = PoolMemory.adopt(member.files[-1], meaning)
                if not memory.locked(OWNER):  # else its owner grants rows of it, or a tier there is at work on them
                    self._begin(key, member, meaning.nbytes, lambda: memory, adopts=True)
                return False
            if region is not None:
                self._admit(member, region)
            elif time.monotonic() >= self._grace_until:
                self._make(key, member)
            return region is not None
        except Exception as error:  # noqa: BLE001  # the member is told, whatever it asked for
            return self._refuse(member, error)

    def _refuse(self, member: Member, error: Any) -> bool:
        if member.files:
            self._warn_once(f"{self.path} refuses a member of the last owner: {reason(error)}")
        member.answer(member.join, Operation.REFUSED, reason(error).encode()[:MOST_TEXT])
        self._silent[member] = time.monotonic() + JOIN_SECONDS  # until it has read that
        return True

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.append(text)
            LOGGER.warning("%s", text)

    def _checked(self, member: Member) -> RegionKey | None:
        """Return the key of the region that the member wants; None: that of an engine whose processes have not joined
        yet. Raises ValueError, KeyError.
        """
        asked = member.asked
        if asked.get("version") != messages.VERSION:
            text = f"the owner speaks version {messages.VERSION}, the member {asked.get('version')!r:.20}"
            raise CapabilityError(f"{text}: run the same release of kvoffload in both")
        member.tenant = str(asked["tenant"])[:MOST_TEXT]
        if member.tenant not in self._tenants:
            known = ", ".join(map(repr, sorted(self._tenants)))
            raise ValueError(f"tenant={member.tenant!r:.80} is none of the owner's: {known}"[:500])
        member.tenant = namespace_of(member.tenant, str(asked.get("weights", "")))
        if "number" in asked and not member.files:
            raise CapacityError("its memory has not come along: the owner's process has no descriptor left for it")
        if "fingerprint" not in asked:
            processes = asked["processes"]
            found = (key for key, each in self._regions.items() if each.copying_for(member.engine) == processes)
            return next(found, None)
        identity = str(asked["identity"])
        if len(identity) > MOST_TEXT:
            raise ValueError(f"identity has {len(identity)} characters, and may have {MOST_TEXT}: give a digest of it")
        fingerprint, row_bytes = bytes.fromhex(str(asked["fingerprint"])), int(asked["row_bytes"])
        if len(fingerprint) != 16 or not 0 < row_bytes < 1 << 40 or row_bytes % 4096:
            raise ValueError(f"a member's layout is wrong: {row_bytes} bytes an entry")
        return fingerprint, meaning_of(fingerprint, identity, row_bytes).identity, row_bytes

    def _admit(self, member: Member, region: Region) -> None:
        old, engine = member.asked.get("number"), member.engine
        if member.files:
            if not os.path.samestat(os.fstat(member.files[-1]), os.fstat(region.memory.descriptor)):
                raise OtherMemoryError("this pool has other memory by now, without what the last owner granted")
            if not (isinstance(old, int) and 0 <= old < MEMBERS):
                raise ValueError(f"a member with memory has the number {old!r:.20}")
        if any(each.of_engine(engine) for each in self._regions.values() if each is not region):
            raise ValueError(f"processes of the engine {engine:.80} have joined with another layout or identity")
        member.number = region.number_for(member, old if member.files else None)
        if "fingerprint" not in member.asked:
            member.asked = {**region.of_engine(engine)[0].asked, **member.asked}
        said = {
            "number": member.number, "capacity": region.memory.meaning.capacity, "tiers": region.has_tiers,
            "joined": member.asked, "left": member.number in region.gone,
        }  # fmt: skip
        message = datagrams(member.join, Operation.JOIN, json.dumps(said).encode())
        socket.send_fds(member.connection, message, [] if member.files else [region.memory.descriptor])
        member.region = region  # now nothing raises any more
        region.members.add(member)
        close_files(member.files)
        self._survive(region.keep_weights)

    def _make(self, key: RegionKey, member: Member) -> None:
        """Begin to make a region, for which others may make room. Raises CapacityError: then none has."""
        used = sum(self._making.values()) + sum(region.memory.meaning.nbytes for region in self._regions.values())
        closing = dict[RegionKey, Region]()
        for other, region in self._regions.items():
            if used + self._region_bytes > self._nbytes and not (region.members or region.waits):
                used -= region.memory.meaning.nbytes
                closing[other] = region
        room = min(self._region_bytes, self._nbytes - used)
        meaning = meaning_of(key[0], str(member.asked["identity"]), key[2], nbytes=room)
        if meaning.capacity < 1:
            raise CapacityError(
                f"the pool has no room for a region with entries of {key[2]} bytes: {used} of {self._nbytes} bytes are "
                "regions with members; serve it with more bytes, or with smaller region_bytes"
            )

        def allocate() -> PoolMemory:
            for region in closing.values():
                region.close()
            return PoolMemory.create(meaning)

        self._begin(key, member, meaning.nbytes, allocate, closing)

    def _begin(
        self, key: RegionKey, member: Member, nbytes: int, memory: Callable[[], PoolMemory],
        closing: Collection[RegionKey] = (), *, adopts: bool = False,
    ) -> None:  # fmt: skip
        """Make a region in a thread of its own: its memory and its tiers may take minutes. If that fails, all that wait
        for it are refused. If this raises, nothing has happened. Who wants a region that `memory` closes waits, too:
        its tiers are in use until then.
        """

        def made(region: Region | None, error: Exception | None) -> None:
            for done in (key, *closing):
                del self._making[done]
            if error is not None:
                self._warn_once(f"a region of {self.path} could not be made: {reason(error)}")
                for each in [each for each in self._joining if each.key == key]:
                    self._joining.remove(each)
                    self._refuse(each, error)
            if region is not None and self._closing:
                region.close()
            elif region is not None:
                self._regions[key] = region

        def make() -> None:
            try:
                region = Region(memory(), partial(self._make_index, member.asked), adopts=adopts)
                self._post(partial(made, region, None))
            except Exception as error:  # noqa: BLE001  # the member is told
                self._post(partial(made, None, error))

        begin_thread("kvoffload-pool-region", make)
        self._making |= {**dict.fromkeys(closing, 0), key: nbytes}
        for other in closing:
            del self._regions[other]

    def _make_index(self, asked: dict[str, Any], memory: PoolMemory) -> CacheIndex:
        options, meaning = self._options, memory.meaning
        if self._tiers is not None:
            tiers = self._tiers(meaning.name, str(asked["identity"]))
            options = options | {"tiers": tiers, "pools": [memory.rows], "layout": meaning.fingerprint}
        return CacheIndex(meaning.capacity, write=self._write, **options)


def _listen(path: str) -> tuple[socket.socket, os.stat_result, bool]:
    """Listen at `path`. Returns the socket, its file, and whether that took the place of one that an owner had left.
    The folder is locked meanwhile.
    """
    folder = os.path.dirname(os.path.abspath(path))
    try:
        status = os.stat(folder)
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, f"there is no such folder: mkdir -p -m 700 {folder}", folder) from None
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if others or status.st_uid not in (os.getuid(), 0):
        raise PermissionError(
            f"others may write to {folder}, and so serve members of this pool: choose a folder of your own (mode 700)"
        )
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    CLOSED_IN_CHILDREN.add(listener)
    try:
        listener.setblocking(False)
        _lock(lock, folder)
        follows = os.path.lexists(path)
        if follows and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ValueError(f"{shown(path)} is no socket of an owner: choose another path")
        if listener.connect_ex(path) not in (errno.ENOENT, errno.ECONNREFUSED):
            raise ValueError(f"another owner serves {shown(path)}: end it first, or choose another path")
        if follows:
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(128)
        return listener, os.lstat(path), follows
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(lock)


def _lock(descriptor: int, folder: str) -> None:
    """Lock a folder, or raise ValueError after `LOCK_SECONDS`: others may open it, and so lock it."""
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise ValueError(f"another process keeps {folder} locked: choose a folder of your own") from None
            time.sleep(0.02)
