"""The processes of `late_writes.py` that have an engine: one that is killed, and one that lives on beside it.

    python late_writes_engine.py kill PLAN          queues copies until it is killed
    python late_writes_engine.py neighbour PLAN     stores and loads in another part of the memory, and compares

PLAN is a `Plan` as JSON. The memory is a memfd: a page of words for each process, then a part for each.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvoffload import Device, OffloadEngine, Plane

PAGE = 4096
STATE, SUBMITTED, ENDED, GRANDCHILD, MICROSECONDS = range(5)  # words of a process's page
QUEUED, REGISTERING, REGISTERED = range(1, 4)  # values of STATE
NUM_BLOCKS = 13  # that are stored; no divisor of 6, so a slot gets another block each time
STORES, LOADS = 6, 2  # slots
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a process does, and where.

    Attributes:
        variant: a name in `late_writes.VARIANTS`.
        memory: descriptor of the memfd. The process's page has the number `number`, and byte `number` is locked.
        first_byte: of the process's part of the memory.
        slots: how many slots the part has; the first ones are stored to, the next ones loaded from, and the rest is
            registered by a second engine.
        tag: in every word that the engine writes, so that writes of an earlier one are told from it.
        depth: transfers of each direction that are kept in flight.
        grandchild_seconds: how long a grandchild lives.
        socket: descriptor of the process's end; -1: none.
    """

    variant: str
    simulated: bool
    memory: int
    number: int
    first_byte: int
    slots: int
    slot_bytes: int
    tag: int = 0
    depth: int = 0
    grandchild_seconds: float = 0.0
    socket: int = -1

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def lock_record(kind: int, number: int) -> bytes:
    """A `struct flock` for byte `number`."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0)


def word_of(tag: int, block: int) -> int:
    """The word that block `block` of an engine consists of."""
    return (tag << 8 | block + 1) << 32


def map_part(plan: Plan) -> tuple[Words, npt.NDArray[np.uint8]]:
    """The words of a process's page, and its part of the memory. All of the memory is mapped."""
    mapped = mmap.mmap(plan.memory, os.fstat(plan.memory).st_size)
    page = np.frombuffer(mapped, np.uint64, PAGE // 8, plan.number * PAGE)
    return page, np.frombuffer(mapped, np.uint8, plan.slots * plan.slot_bytes, plan.first_byte)


# the process that is killed -------------------------------------------------------------------------------------------


class Victim:
    """Keeps transfers queued, and says in the words of its page how far it is."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.parent = os.getppid()
        self.spent = 0  # microseconds
        for descriptor in (plan.memory, plan.socket):
            os.set_inheritable(descriptor, False)
        self.lock = os.open(f"/proc/self/fd/{plan.memory}", os.O_RDWR | os.O_CLOEXEC)
        fcntl.fcntl(self.lock, fcntl.F_OFD_SETLK, lock_record(fcntl.F_WRLCK, plan.number))
        self.words, self.part = map_part(plan)

    def open_engine(self, device: Device, first_slot: int, num_slots: int, planes: list[Plane]) -> OffloadEngine:
        from kvoffload import HostMemory, KVLayout, OffloadEngine
        from kvoffload.copiers.pack import STAGING_BYTES

        size = self.plan.slot_bytes
        part = self.part[first_slot * size : (first_slot + num_slots) * size]
        return OffloadEngine(
            KVLayout([planes], on_default_stream=False),
            device=device,
            host_memory=HostMemory.of_buffer(part, num_slots=num_slots, slot_stride=size),
            staging_bytes=max(4 * size, STAGING_BYTES) if self.plan.variant == "pack" else 0,
        )

    def run(self) -> None:
        plan = self.plan
        with open_device(plan.simulated) as device:
            count = 64 if plan.variant == "pack" else 1
            planes = device.allocate_planes(count, block_bytes=plan.slot_bytes // count, num_blocks=NUM_BLOCKS + LOADS)
            self.fill(planes)
            engine = self.open_engine(device, 0, STORES + LOADS, planes)
            copier = "pack" if plan.variant == "pack" else None
            self.queue(engine, copier)
            make_grandchild(self)
            self.words[STATE] = QUEUED
            if plan.variant == "registration":
                self.words[STATE] = REGISTERING
                self.second = self.open_engine(device, STORES + LOADS, plan.slots - STORES - LOADS, planes)
                self.words[STATE] = REGISTERED
            self.queue(engine, copier, forever=True)

    def fill(self, planes: list[Plane]) -> None:
        """Each block with words of its own."""
        block = np.empty(planes[0].block_bytes // 8, np.uint64)
        for number in range(NUM_BLOCKS):
            block.fill(word_of(self.plan.tag, number))
            for plane in planes:
                buffer: Any = plane.owner
                buffer.copy_from(block, offset=plane.address - buffer.address + number * plane.block_bytes)

    def queue(self, engine: OffloadEngine, copier: Any, *, forever: bool = False) -> None:
        """Submit until `depth` transfers of each direction are in flight and some have ended, or for ever.

        (On the simulated device a submission ends the others.)
        """
        from kvoffload import NO_WAIT

        words, started, number = self.words, time.monotonic(), int(self.words[SUBMITTED])
        slots, most = np.arange(STORES), 2 * self.plan.depth
        sources, targets = np.arange(STORES, STORES + LOADS), np.arange(NUM_BLOCKS, NUM_BLOCKS + LOADS)
        while forever or (engine.in_flight < most and number < 2 * most) or not words[ENDED]:
            if os.getppid() != self.parent:
                os._exit(2)
            if engine.in_flight < most:
                engine.load(sources, targets, after=NO_WAIT)
                engine.store((slots + number * STORES) % NUM_BLOCKS, slots, after=NO_WAIT, copier=copier)
                number += 1
                words[SUBMITTED] += np.uint64(2)
            elif forever:
                time.sleep(0.0002)
            if forever or (not words[ENDED] and (engine.in_flight >= most or number >= 2 * most)):
                words[ENDED] += np.uint64(len(engine.poll()))
                words[MICROSECONDS] = int(1e6 * (time.monotonic() - started)) + self.spent
        self.spent = int(words[MICROSECONDS])


def open_device(simulated: bool) -> Device:
    import kvoffload

    return kvoffload.open_device(backend="simulated" if simulated else "cuda")


def make_grandchild(victim: Victim) -> None:
    """A process that outlives its parent, with what the variant lets it keep of the parent's descriptors."""
    plan = victim.plan
    if plan.variant.startswith("exec"):
        program = [sys.executable, "-c", f"import time; time.sleep({plan.grandchild_seconds})"]
        quiet = subprocess.DEVNULL
        close = plan.variant == "exec"
        child = subprocess.Popen(program, close_fds=close, stdin=quiet, stdout=quiet, stderr=quiet)
        victim.words[GRANDCHILD] = child.pid
    elif plan.variant.startswith("fork"):
        pid = os.fork()
        if pid:
            victim.words[GRANDCHILD] = pid
            return
        if plan.variant != "fork":
            os.close(plan.socket)
            close_memory_files()
        end = time.monotonic() + plan.grandchild_seconds
        while plan.variant == "fork, writing" and time.monotonic() < end:
            victim.part[: STORES * plan.slot_bytes].view(np.uint64)[::512] += np.uint64(1)
        time.sleep(max(0.0, end - time.monotonic()))
        os._exit(0)


def close_memory_files() -> None:
    """Close every descriptor of the memfd: that of the lock, and the copy that mmap holds, too."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder itself
            if "memfd:late-writes" in os.readlink(f"/proc/self/fd/{name}"):
                os.close(int(name))


# the process beside it ------------------------------------------------------------------------------------------------


def neighbour(plan: Plan) -> None:
    """Store, compare, load, compare, until its standard input ends. Prints the counts as JSON."""
    from kvoffload import NO_WAIT, HostMemory, KVLayout, OffloadEngine

    words, part = map_part(plan)
    rounds = wrong = 0
    with open_device(plan.simulated) as device:
        planes = device.allocate_blocks(plan.slots, planes=1, block_bytes=plan.slot_bytes)
        buffer: Any = planes[0].owner
        memory = HostMemory.of_buffer(part, num_slots=plan.slots, slot_stride=plan.slot_bytes)
        ids, forwards = np.arange(plan.slots), np.arange(part.nbytes // 8, dtype=np.uint64)
        with OffloadEngine(KVLayout([planes]), device=device, host_memory=memory, staging_bytes=0) as engine:
            words[STATE] = QUEUED
            while not select.select([sys.stdin], [], [], 0)[0]:
                rounds += 1
                expected = forwards * np.uint64(2 * rounds + 1)
                buffer.copy_from(expected)
                engine.store(ids, ids, after=NO_WAIT).wait(60)
                wrong += not np.array_equal(part.view(np.uint64), expected)
                time.sleep(0.005)  # so that deaths also fall between a transfer and its comparison
                wrong += not np.array_equal(part.view(np.uint64), expected)
                part.view(np.uint64)[:] = ~expected
                engine.load(ids, ids, after=NO_WAIT).wait(60)
                wrong += not np.array_equal(buffer.to_numpy().view(np.uint64), ~expected)
    print(json.dumps({"rounds": rounds, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    given = Plan(**json.loads(sys.argv[2]))
    if sys.argv[1] == "kill":
        Victim(given).run()
    else:
        neighbour(given)
