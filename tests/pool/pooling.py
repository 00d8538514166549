"""Members of a shared pool for tests: with an engine on a simulated device, and raw ones that send any bytes."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from coded import normal
from helpers import Gate

import kvoffload
from kvoffload import NO_WAIT, BlockCache, KVLayout, MissingKeyError, OffloadEngine
from kvoffload.cache.policies import LRU
from kvoffload.layout.coding import CodecName
from kvoffload.pool import PoolOwner, SharedPool
from kvoffload.pool.messages import (
    ENDING,
    FOR_REQUEST,
    VERSION,
    Assembler,
    Operation,
    datagrams,
    pack_keys,
    unpack_entries,
)
from kvoffload.pool.pool_memory import Meaning, PoolMemory

PLANES, ROW_BYTES, SOURCES, TARGETS = 2, 2048, 64, 32
ENTRY_BYTES = PLANES * ROW_BYTES
SECONDS = 10.0
POISON = 0xEE
IDENTITY = "model"
P = TypeVar("P", bound=LRU)
forks = pytest.mark.filterwarnings("ignore:.*fork")  # of JAX, where another test of this process has loaded it


def key_of(number: int) -> bytes:
    return b"%032d" % number


def keys_of(numbers: Sequence[int] | range) -> list[bytes]:
    return list(map(key_of, numbers))


def region_bytes(capacity: int, row_bytes: int = ENTRY_BYTES) -> int:
    """Of a region with exactly so many entries."""
    return Meaning(capacity, row_bytes, bytes(16), bytes(16)).nbytes


def rows_of(random: np.random.Generator, codec: CodecName, blocks: int) -> npt.NDArray[np.uint8]:
    """(blocks, planes, bytes): random bytes; with a codec, values that fit."""
    if codec == "raw":
        return random.integers(0, 256, (blocks, PLANES, ROW_BYTES), dtype=np.uint8)
    return normal(random, blocks * PLANES * ROW_BYTES // 2).reshape(blocks, PLANES, -1).view(np.uint8)


def layout_of(planes: list[kvoffload.Plane], codec: CodecName = "raw") -> KVLayout:
    dtype = "uint8" if codec == "raw" else "bfloat16"
    return KVLayout([planes], dtype=dtype, tokens_per_block=4, block_axes=("tokens", "x"), codec=codec)


def eventually(true: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.002)


def descriptors() -> int:
    """Of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def mapped() -> int:
    """How many regions are mapped in this process."""
    return Path("/proc/self/maps").read_text().count("kvoffload-pool")


class Rows(NamedTuple):
    """What a pool asks of a layout."""

    fingerprint: bytes = bytes(16)
    slot_bytes: int = ENTRY_BYTES
    num_groups: int = 1


class Made(list[P]):
    """The `policy` of an owner: makes one for each region, and has them all."""

    def __init__(self, kind: Callable[[int], P]) -> None:
        self.kind = kind

    def __call__(self, capacity: int) -> P:
        self.append(self.kind(capacity))
        return self[-1]


class SlowTiers:
    """What makes the tiers of a region, once it is let go.

    Args:
        make: returns them, or raises.

    Attributes:
        opening: set when it is asked for them.
        go: until this is set, it waits.
    """

    def __init__(self, make: Callable[[], list[Any]] = list) -> None:
        self.make, self.opening, self.go = make, threading.Event(), threading.Event()

    def __call__(self, *_: str) -> list[Any]:
        self.opening.set()
        assert self.go.wait(SECONDS)
        return self.make()


class Member:
    """An engine with a cache over a shared pool. Key `i` stands for its block `i`; more blocks are targets of loads.

    Attributes:
        codec: of all members that are made. Where they have one, their slots have a page for each entry as well.
    """

    codec: CodecName = "raw"

    def __init__(self, path: str, stack: ExitStack, *, device: Any = None, **options: Any) -> None:
        device = device or stack.enter_context(kvoffload.open_device(backend="simulated"))
        codec = options.pop("codec", self.codec)
        self.device, self.expected = device, rows_of(np.random.default_rng(5), codec, SOURCES)
        self.planes = device.allocate_planes(PLANES, block_bytes=ROW_BYTES, num_blocks=SOURCES + TARGETS)
        self.buffer: Any = self.planes[0].owner
        image = np.full(self.buffer.nbytes, POISON, np.uint8)
        for number, plane in enumerate(self.planes):
            start = plane.address - self.buffer.address
            image[start : start + SOURCES * ROW_BYTES] = self.expected[:, number].reshape(-1)
        self.buffer.copy_from(image)
        self.layout = layout_of(self.planes, codec)
        options = {"identity": IDENTITY, "answer_seconds": SECONDS, **options}
        self.pool = stack.enter_context(SharedPool.attach(path, self.layout, **options))
        ring = 0 if codec == "raw" else 1 << 16
        self.engine = stack.enter_context(
            OffloadEngine(self.layout, device=device, host_memory=self.pool.host_memory, staging_bytes=ring)
        )
        self.cache: Any = BlockCache(self.engine, pool=self.pool)

    def store(self, *numbers: int, wait: bool = True, **options: Any) -> Any:
        job = self.cache.store(keys_of(numbers), list(numbers), **{"after": NO_WAIT, **options})
        if wait:
            job.wait(SECONDS)
        return job

    def hits(self, *numbers: int) -> int:
        return int(self.cache.lookup(keys_of(numbers)))

    def check_load(self, *numbers: int, **options: Any) -> None:
        """Load keys, and compare every byte."""
        targets = range(SOURCES, SOURCES + len(numbers))
        self.poison(targets)
        self.cache.load(keys_of(numbers), targets, **{"after": NO_WAIT, **options}).wait(SECONDS)
        assert self.wrong(numbers, targets) == []

    def check_hits(self, numbers: Sequence[int] | range) -> int:
        """Load each of these keys that is a hit, and compare; how many there were."""
        hits = [number for number in numbers if self.hits(number)]
        for start in range(0, len(hits), TARGETS):
            self.check_load(*hits[start : start + TARGETS])
        return len(hits)

    def poison(self, blocks: Sequence[int] | range) -> None:
        for block in blocks:
            self.put(block, np.full((PLANES, ROW_BYTES), POISON, np.uint8))

    def put(self, block: int, rows: npt.NDArray[np.uint8]) -> None:
        """Write a block, (planes, bytes)."""
        for plane, row in zip(self.planes, rows, strict=True):
            self.buffer.copy_from(row, offset=plane.address - self.buffer.address + block * ROW_BYTES)

    def wrong(self, numbers: Sequence[int], blocks: Sequence[int] | range) -> list[int]:
        """The keys whose bytes are not in these blocks."""
        image, found = self.buffer.to_numpy(), []
        for number, block in zip(numbers, blocks, strict=True):
            starts = [plane.address - self.buffer.address + block * ROW_BYTES for plane in self.planes]
            rows = [image[start : start + ROW_BYTES] for start in starts]
            if not np.array_equal(rows, self.expected[number]):
                found.append(number)
        return found

    def row(self, slot: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot; a view."""
        found: npt.NDArray[np.uint8] = self.engine.slots[slot, : self.layout.groups[0].payload_bytes]
        return found

    def in_slot(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """What a slot has of a block, (planes, bytes)."""
        coding = self.layout.groups[0].coding
        return (rows if coding is None else coding.encode(rows.view(np.uint16))[0]).reshape(-1)

    def counts(self) -> tuple[int, int, int]:
        """Resident, pending and pinned keys of the region."""
        statistics = self.cache.statistics()
        return statistics.resident, statistics.pending, statistics.pinned


@contextmanager
def members(path: str, count: int = 1, **options: Any) -> Iterator[list[Member]]:
    """Engines in this process, each over a membership of its own."""
    with ExitStack() as stack:
        yield [Member(path, stack, **options) for _ in range(count)]


@contextmanager
def member(path: str, **options: Any) -> Iterator[Member]:
    with members(path, **options) as (one,):
        yield one


def stored(one: Member, *numbers: int) -> None:
    """Store them, by a member that does not wait for long: on a busy machine an answer may be late."""
    eventually(lambda: one.store(*numbers) and one.hits(*numbers) == len(numbers), "the keys are stored")


def check_load_at_last(one: Member, *numbers: int) -> None:
    """The same for a load."""

    def loaded() -> bool:
        try:
            one.check_load(*numbers)
        except MissingKeyError:
            return False
        return True

    eventually(loaded, "the keys are loaded")


@contextmanager
def forked_child() -> Iterator[None]:
    """A forked child, which has what this process has open, until the block or this process has ended."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


@contextmanager
def held_by_a_thread(lock: Any) -> Iterator[None]:
    """Another thread has the lock, as it may when this process forks."""
    taken, go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            go.wait(SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(SECONDS)
    try:
        yield
    finally:
        go.set()
        thread.join()


class Standing(LRU):
    """A policy that stands still in `touch` until it is let go: so does its owner, as if it had been stopped."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.go, self.stands = threading.Event(), threading.Event()

    @staticmethod
    def let_go(policies: Sequence[Standing]) -> None:
        for each in policies:
            each.go.set()

    def touch(self, keys: Sequence[bytes]) -> None:
        self.stands.set()
        self.go.wait(SECONDS)
        super().touch(keys)


class RawMember:
    """A member that speaks the protocol by itself, without a library that keeps it from mistakes.

    Attributes:
        memory: the region, from the answer to JOIN, or as given.
    """

    def __init__(
        self, path: str, *, fingerprint: bytes = bytes(16), row_bytes: int = ENTRY_BYTES, tenant: str = ""
    ) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(SECONDS)
        self.connection.connect(path)
        self.asked: dict[str, Any] = {
            "version": VERSION, "fingerprint": fingerprint.hex(), "identity": IDENTITY, "row_bytes": row_bytes,
            "tenant": tenant,
        }  # fmt: skip
        self.number, self.assembler = 0, Assembler()
        self.memory: PoolMemory | None = None
        self.place = -1

    def send(self, operation: int, payload: bytes = b"", descriptors: Sequence[int] = ()) -> int:
        """Send a message; its number."""
        self.number += 1
        for datagram in datagrams(self.number, operation, payload):
            socket.send_fds(self.connection, [datagram], list(descriptors))
        return self.number

    def receive(self) -> tuple[int, int, bytes]:
        """The next message. Raises ConnectionError: the owner has cut the connection."""
        while True:
            datagram, passed, _, _ = socket.recv_fds(self.connection, 65_536, 1)
            if passed:
                self.passed = passed[0]
            if not datagram:
                raise ConnectionResetError("cut off")
            message = self.assembler.take(datagram)
            if message is not None:
                return message

    def ask(self, operation: int, payload: bytes = b"", descriptors: Sequence[int] = ()) -> tuple[int, bytes]:
        """Operation and payload of the answer."""
        self.send(operation, payload, descriptors)
        return self.answer()

    def answer(self) -> tuple[int, bytes]:
        """Operation and payload of the answer to the latest message."""
        kind: int = Operation.WAIT
        while kind == Operation.WAIT:
            answered, kind, content = self.receive()
        assert answered == self.number
        return kind, content

    def asking(self, **changes: Any) -> bytes:
        """What JOIN says."""
        return json.dumps({**self.asked, **changes}).encode()

    def join(self, memory: PoolMemory | None = None, **changes: Any) -> dict[str, Any]:
        """Join, and map the memory; with `memory` as one who brings it."""
        passed = [] if memory is None else [memory.descriptor]
        kind, content = self.ask(Operation.JOIN, self.asking(**changes), passed)
        assert kind == Operation.JOIN, content
        said: dict[str, Any] = json.loads(content)
        self.place = said["number"]
        if memory is None:
            meaning = Meaning(said["capacity"], self.asked["row_bytes"], b"", b"")
            self.memory = PoolMemory([self.passed], meaning, headers=True)
            self.memory.lock(self.place)
        return said

    def reserve(self, keys: Sequence[bytes], flags: int = 0) -> tuple[int, list[int]]:
        """The reservation's number, and the entries."""
        kind, content = self.ask(Operation.RESERVE, FOR_REQUEST.pack(flags, 0) + pack_keys(keys))
        assert kind == Operation.RESERVE, content
        return self.number, unpack_entries(content, 1 + len(keys))

    def room(self, count: int) -> int:
        """How many of so many new keys would get entries now."""
        number, entries = self.reserve([b"room %d %d" % (self.number, each) for each in range(count)])
        self.end(number, well=False)
        return len(entries)

    def take(self, keys: Sequence[bytes], flags: int = 0) -> tuple[int, list[int]]:
        kind, content = self.ask(Operation.TAKE, FOR_REQUEST.pack(flags, 0) + pack_keys(keys))
        assert kind == Operation.TAKE, content
        return self.number, unpack_entries(content)

    def end(self, number: int, well: bool = True) -> None:
        self.send(Operation.END, ENDING.pack(number, well))

    def store(self, keys: Sequence[bytes], byte: int) -> list[int]:
        """Reserve, write this byte into each row, commit."""
        number, entries = self.reserve(keys)
        assert self.memory is not None
        self.memory.rows[entries] = byte
        self.end(number)
        return entries

    def status(self, keys: Sequence[bytes]) -> list[int]:
        return list(self.ask(Operation.STATUS, pack_keys(keys))[1])

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self.ask(Operation.COUNTS)[1])
        return found

    def cut_off(self) -> bool:
        """Whether the owner has ended the connection."""
        try:
            while True:
                self.receive()
        except (ConnectionError, BrokenPipeError):
            return True

    def close(self) -> None:
        self.connection.close()
        if self.memory is not None:
            self.memory.close()


@contextmanager
def raw(path: str, *, join: bool = True, **options: Any) -> Iterator[RawMember]:
    made = RawMember(path, **options)
    try:
        if join:
            made.join()
        yield made
    finally:
        made.close()


@contextmanager
def serve(folder: Any, capacity: int = 16, **options: Any) -> Iterator[PoolOwner]:
    """An owner in this process, of one region with so many entries, at `folder/pool`."""
    with PoolOwner(folder / "pool", **{"nbytes": region_bytes(capacity), **options}) as owner:
        yield owner


@contextmanager
def restarting(path: str) -> Iterator[Callable[[], None]]:
    """A function that ends the owner of 8 entries at this path, and begins another one."""
    owner = [PoolOwner(path, nbytes=region_bytes(8))]

    def restart() -> None:
        owner[0].close()
        owner[0] = PoolOwner(path, nbytes=region_bytes(8))

    try:
        yield restart
    finally:
        owner[0].close()


@contextmanager
def held(one: Member) -> Iterator[tuple[Any, Gate]]:
    """A stream of the member's device that stands still until the gate is opened."""
    with one.device.stream() as stream:
        gate = Gate(one.device)
        gate.hold(stream.handle)
        try:
            yield stream, gate
        finally:
            gate.open()
            one.engine.drain(SECONDS)
            stream.synchronize(SECONDS)
            gate.close()
