"""What the driver does where a good guess is wrong: the same rows for the simulated driver and for a GPU's.

Seen first with driver 580.159 on an H100. The simulated driver is not strict here: it goes on where it would raise.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from seeds import seeds

import kvoffload
from kvoffload.testing import SimulatedDriver

R = cuda.CUresult
STREAM = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
NON_BLOCKING, LEGACY, PER_THREAD = 1, 1, 2
OLD, NEW, LATER = 1, 7, 9
PAGE = mmap.PAGESIZE
MAX_PITCH = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_PITCH


class Caller:
    """Calls a driver, simulated or a GPU's, whose context is current. What it makes is given back by `undo`.

    Attributes:
        large: bytes that take a GPU a while, and the simulated driver not.
    """

    def __init__(self, api: Any, device: int = 0) -> None:
        self.api, self.device, self.undo = api, device, ExitStack()
        self.simulator: SimulatedDriver | None = api if isinstance(api, SimulatedDriver) else None
        self.large = 1 << 16 if self.simulator else 256 << 20
        self.main = self.stream()

    def status(self, name: str, *arguments: Any) -> str:
        return str(getattr(self.api, name)(*arguments)[0].name)

    def ok(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self.api, name)(*arguments)
        assert status == R.CUDA_SUCCESS, (name, status)
        return values[0] if len(values) == 1 else tuple(values)

    def stream(self) -> Any:
        made = self.ok("cuStreamCreate", NON_BLOCKING)
        self.undo.callback(self.ok, "cuStreamDestroy", made)
        return made

    def event(self) -> Any:
        made = self.ok("cuEventCreate", 0)
        self.undo.callback(self.ok, "cuEventDestroy", made)
        return made

    def memory(self, nbytes: int, value: int = OLD) -> int:
        address = int(self.ok("cuMemAlloc", nbytes))
        self.undo.callback(self.ok, "cuMemFree", address)
        self.ok("cuMemsetD8Async", address, value, nbytes, self.main)
        self.finish()
        return address

    def pinned(self, nbytes: int, value: int = NEW) -> Any:
        address = int(self.ok("cuMemHostAlloc", nbytes, 0))
        self.undo.callback(self.ok, "cuMemFreeHost", address)
        array = array_at(address, nbytes)
        array[:] = value
        return array

    def register(self, array: Any) -> str:
        status = self.status("cuMemHostRegister", address_of(array), array.nbytes, 0)
        if status == "CUDA_SUCCESS":
            self.undo.callback(lambda: self.status("cuMemHostUnregister", address_of(array)))  # keeps it mapped
        return status

    def batch(self, triples: list[tuple[int, int, int]], stream: Any = None, starts: tuple[int, ...] = (0,)) -> str:
        """The status of one flat batch of (target, source, nbytes)."""
        targets, sources, sizes = zip(*triples, strict=True) if triples else ((), (), ())
        orders = [cuda.CUmemcpyAttributes() for _ in starts]
        for each in orders:
            each.srcAccessOrder = STREAM
        pointers = ([cuda.CUdeviceptr(int(each)) for each in side] for side in (targets, sources))
        queue = self.main if stream is None else cuda.CUstream(int(stream))
        counts = list(map(int, sizes)), len(triples), orders, list(starts), len(starts)
        return self.status("cuMemcpyBatchAsync", *pointers, *counts, queue)

    def strided(self, triples: list[tuple[int, int, int]]) -> str:
        """The status of one strided batch of (target, source, nbytes), each in one row."""
        operations = []
        for target, source, nbytes in triples:
            made = cuda.CUDA_MEMCPY3D_BATCH_OP()
            for operand, address in ((made.src, source), (made.dst, target)):
                operand.type = cuda.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
                operand.op.ptr.ptr, operand.op.ptr.rowLength = address, nbytes
            made.extent.width, made.extent.height, made.extent.depth = nbytes, 1, 1
            made.srcAccessOrder = STREAM
            operations.append(made)
        return self.status("cuMemcpy3DBatchAsync", len(operations), operations, 0, self.main)

    def copy(self, target: int, source: int, nbytes: int) -> str:
        return self.status("cuMemcpyAsync", target, source, nbytes, self.main)

    def finish(self) -> None:
        self.ok("cuStreamSynchronize", self.main)

    def read(self, address: int, nbytes: int) -> Any:
        found = np.empty(nbytes, np.uint8)
        self.ok("cuMemcpyDtoH", found.ctypes.data, address, nbytes)
        return found

    def values(self, address: int, blocks: int, nbytes: int = PAGE) -> list[int]:
        """The value of each block, all of whose bytes are the same."""
        rows = self.read(address, blocks * nbytes).reshape(blocks, nbytes)
        assert (rows == rows[:, :1]).all()
        return [int(each) for each in rows[:, 0]]


def array_at(address: int, nbytes: int) -> Any:
    return np.asarray(_At(address, nbytes))


class _At:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def mapped(nbytes: int, value: int = NEW, file: int = -1, flags: int = mmap.MAP_SHARED) -> Any:
    array = np.frombuffer(mmap.mmap(file, nbytes, flags), np.uint8)
    array[:] = value
    return array


def simulated(seed: int) -> Caller:
    simulator = SimulatedDriver(seed=seed, strict=False, deadlock_seconds=0.05)
    simulator.cuInit(0)
    simulator.cuCtxPushCurrent(simulator.cuDevicePrimaryCtxRetain(0)[1])
    return Caller(simulator)


@pytest.fixture(params=["simulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def caller(request: pytest.FixtureRequest, seed: int) -> Iterator[Caller]:
    if request.param == "simulated":
        made = simulated(seed)
        with made.undo:
            yield made
        return
    device: kvoffload.Device = request.getfixturevalue("gpu_device")
    if not device.capabilities.flat_batch:
        pytest.skip("no batch calls here")
    with device.current():
        made = Caller(device.driver.api, device.index)
        with made.undo:
            yield made


# batches


WRONG: dict[str, Callable[[int, int], tuple[int, int, int]]] = {
    "of no bytes": lambda target, source: (target, source, 0),
    "past the end": lambda target, source: (target, source, 1 << 20),
}


def copied_of_three(caller: Caller, call: str, wrong: str) -> list[bool]:
    """Which entries of a batch are copied whose middle entry is wrong. The context goes on."""
    target, source = caller.memory(3 * PAGE), caller.pinned(3 * PAGE).ctypes.data
    triples = [(target + at, source + at, PAGE) for at in range(0, 3 * PAGE, PAGE)]
    triples[1] = WRONG[wrong](*triples[1][:2])
    assert getattr(caller, call)(triples) == "CUDA_ERROR_INVALID_VALUE"
    caller.finish()
    found = [value == NEW for value in caller.values(target, 3)]
    assert caller.copy(target, source, 3 * PAGE) == "CUDA_SUCCESS"
    caller.finish()
    assert caller.values(target, 3) == [NEW] * 3
    return found


three_batches = pytest.mark.parametrize(
    ("call", "wrong"), [("batch", "of no bytes"), ("batch", "past the end"), ("strided", "past the end")]
)


@three_batches
def test_a_batch_that_is_refused_may_have_copied_what_stands_before_its_wrong_entry(
    caller: Caller, call: str, wrong: str
) -> None:
    first, middle, last = copied_of_three(caller, call, wrong)
    assert not middle
    assert not last
    if caller.simulator is None and wrong == "of no bytes":
        assert first


@three_batches
def test_the_simulated_driver_copies_that_with_some_seeds_only(call: str, wrong: str) -> None:
    assert {copied_of_three(simulated(seed), call, wrong)[0] for seed in seeds(16)} == {True, False}


def test_a_batch_without_entries_or_with_wrong_attributes_is_refused(caller: Caller) -> None:
    target, source = caller.memory(4 * PAGE), caller.pinned(4 * PAGE).ctypes.data
    two = [(target, source, PAGE), (target + PAGE, source + PAGE, PAGE)]
    refused = [caller.batch([]), *(caller.batch(two, starts=starts) for starts in ((1,), (0, 0), (0, 5)))]
    refused.append(caller.status("cuMemcpyBatchAsync", [], [], [], 0, [], [], 0, caller.main))
    assert refused == ["CUDA_ERROR_INVALID_VALUE"] * 5
    assert caller.batch(two, starts=(0, 1)) == "CUDA_SUCCESS"
    caller.finish()
    assert caller.values(target, 4) == [NEW, NEW, OLD, OLD]


def test_the_legacy_stream_takes_no_batch_and_the_stream_of_the_thread_does(caller: Caller) -> None:
    target, source = caller.memory(PAGE), caller.pinned(PAGE).ctypes.data
    for handle in (0, LEGACY):
        assert caller.batch([(target, source, PAGE)], handle) == "CUDA_ERROR_INVALID_VALUE"
    assert caller.batch([(target, source, PAGE)], PER_THREAD) == "CUDA_SUCCESS"
    caller.ok("cuStreamSynchronize", PER_THREAD)
    assert caller.values(target, 1) == [NEW]


@pytest.mark.parametrize("call", ["batch", "strided"])
def test_a_stream_that_refuses_a_batch_goes_on_capturing(caller: Caller, call: str) -> None:
    target, source = caller.memory(4 * PAGE), caller.pinned(4 * PAGE).ctypes.data
    triples = [(target + at, source + at, PAGE) for at in range(0, 4 * PAGE, PAGE)]
    for entries in (triples[:1], triples):
        caller.ok("cuStreamBeginCapture", caller.main, RELAXED)
        assert getattr(caller, call)(entries) == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
        capturing = caller.ok("cuStreamIsCapturing", caller.main)
        assert capturing == cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        graph = caller.ok("cuStreamEndCapture", caller.main)
        if caller.simulator is None:
            caller.ok("cuGraphDestroy", graph)
    caller.finish()
    assert caller.values(target, 4) == [OLD] * 4


def test_a_batch_reads_pageable_memory_late_and_a_single_copy_does_not(caller: Caller) -> None:
    blocks, nbytes = 64, caller.large // 256
    target, source = caller.memory(blocks * nbytes), np.full(blocks * nbytes, NEW, np.uint8)
    ahead, waiting = caller.memory(caller.large), caller.pinned(caller.large).ctypes.data
    if caller.simulator is not None:
        caller.simulator.scheduler.drift_probability = 0
    at = [(target + i * nbytes, source.ctypes.data + i * nbytes, nbytes) for i in range(blocks)]
    assert caller.copy(ahead, waiting, caller.large) == "CUDA_SUCCESS"
    assert caller.batch(at) == "CUDA_SUCCESS"
    source[:] = LATER
    caller.finish()
    assert (caller.read(target, blocks * nbytes) == LATER).any()
    assert caller.copy(ahead, waiting, caller.large) == "CUDA_SUCCESS"
    source[:] = NEW
    assert caller.copy(target, source.ctypes.data, blocks * nbytes) == "CUDA_SUCCESS"
    source[:] = LATER
    caller.finish()
    assert (caller.read(target, blocks * nbytes) == NEW).all()


def test_two_entries_with_one_target_are_no_error(caller: Caller) -> None:
    """So nothing but the caller keeps the bytes from being those of either."""
    target, source = caller.memory(PAGE), caller.pinned(2 * PAGE)
    source[PAGE:] = LATER
    assert caller.batch([(target, source.ctypes.data + at, PAGE) for at in (0, PAGE)]) == "CUDA_SUCCESS"
    caller.finish()
    assert caller.values(target, 1)[0] in (NEW, LATER)


def test_copies_on_two_streams_do_not_share_the_link(caller: Caller) -> None:
    """One is copied after the other: when the first has ended, the other one has all its bytes, or most, to copy."""
    start, streams, ends = caller.event(), [caller.main, caller.stream()], [caller.event(), caller.event()]
    nbytes = 4 * caller.large
    targets, sources = [caller.memory(nbytes) for _ in ends], [caller.pinned(nbytes) for _ in ends]
    caller.ok("cuEventRecord", start, streams[0])
    caller.ok("cuStreamWaitEvent", streams[1], start, 0)
    for target, source, stream, end in zip(targets, sources, streams, ends, strict=True):
        caller.ok("cuMemcpyAsync", target, source.ctypes.data, nbytes, stream)
        caller.ok("cuEventRecord", end, stream)
    ended = [False, False]
    while not any(ended):
        ended = [caller.status("cuEventQuery", end) == "CUDA_SUCCESS" for end in ends]
    assert not all(ended)
    for end in ends:
        caller.ok("cuEventSynchronize", end)


def test_a_pitch_above_the_greatest_is_accepted(caller: Caller) -> None:
    """The simulated driver has no memory for a second row."""
    assert caller.ok("cuDeviceGetAttribute", MAX_PITCH, caller.device) == 2**31 - 1
    pitch, height = 1 << 32, 1 if caller.simulator else 2
    target, source = caller.memory((height - 1) * pitch + PAGE), caller.pinned(height * PAGE)
    made = cuda.CUDA_MEMCPY2D()
    made.srcMemoryType = made.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    made.srcDevice, made.dstDevice = cuda.CUdeviceptr(source.ctypes.data), cuda.CUdeviceptr(target)
    made.srcPitch, made.dstPitch, made.WidthInBytes, made.Height = PAGE, pitch, PAGE, height
    caller.ok("cuMemcpy2DAsync", made, caller.main)
    caller.finish()
    for row in range(height):
        assert caller.values(target + row * pitch, 1) == [NEW]


# registered memory


def test_a_page_is_registered_once(caller: Caller) -> None:
    array = mapped(4 * PAGE)
    first = array[: 2 * PAGE]
    assert caller.register(first) == "CUDA_SUCCESS"
    for again in (first, array[:PAGE], array[PAGE : 2 * PAGE], array[PAGE : 3 * PAGE], array):
        assert caller.register(again) == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    assert caller.register(array[2 * PAGE :]) == "CUDA_SUCCESS"


def test_no_copy_crosses_from_one_registration_to_the_next(caller: Caller) -> None:
    array, target = mapped(2 * PAGE), caller.memory(2 * PAGE)
    for half in (array[:PAGE], array[PAGE:]):
        assert caller.register(half) == "CUDA_SUCCESS"
    source = array.ctypes.data
    assert caller.copy(target, source, 2 * PAGE) == "CUDA_ERROR_INVALID_VALUE"
    assert caller.batch([(target, source, 2 * PAGE)]) == "CUDA_ERROR_INVALID_VALUE"
    caller.finish()
    assert caller.values(target, 2) == [OLD, OLD]
    assert caller.batch([(target, source, PAGE), (target + PAGE, source + PAGE, PAGE)]) == "CUDA_SUCCESS"
    caller.finish()
    assert caller.values(target, 2) == [NEW, NEW]


def test_two_registrations_side_by_side_are_two_ranges_though_their_device_addresses_follow(caller: Caller) -> None:
    """How `HostMemory(registered=True)` finds a slot that lies in both."""
    array = mapped(2 * PAGE)
    for half in (array[:PAGE], array[PAGE:]):
        assert caller.register(half) == "CUDA_SUCCESS"
    ends = [array.ctypes.data + at for at in (0, 2 * PAGE - 1)]
    there = [int(caller.ok("cuMemHostGetDevicePointer", each, 0)) for each in ends]
    assert there[1] - there[0] == 2 * PAGE - 1
    bases = [int(caller.ok("cuMemGetAddressRange", each)[0]) for each in ends]
    assert bases[1] - bases[0] == PAGE


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE], ids=["shared", "private"])
def test_only_a_private_mapping_of_a_file_is_registered(caller: Caller, tmp_path: Path, flags: int) -> None:
    """A private one has pages of its own from then on."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * PAGE))
    kind = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()
    if caller.simulator is None and kind != "ext2/ext3":
        pytest.skip(f"what a GPU's driver does with files on {kind} is not known")
    with path.open("r+b") as file:
        array = mapped(4 * PAGE, file=file.fileno(), flags=flags)
    expected = "CUDA_SUCCESS" if flags == mmap.MAP_PRIVATE else "CUDA_ERROR_INVALID_VALUE"
    assert caller.register(array) == expected


def test_memory_without_a_disk_is_registered(caller: Caller) -> None:
    memfd = os.memfd_create("kvoffload-test")
    try:
        os.ftruncate(memfd, PAGE)
        arrays = [mapped(PAGE, file=memfd), mapped(PAGE), mapped(PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)]
    finally:
        os.close(memfd)
    target = caller.memory(3 * PAGE)
    for number, array in enumerate(arrays):
        assert caller.register(array) == "CUDA_SUCCESS"
        assert caller.copy(target + number * PAGE, array.ctypes.data, PAGE) == "CUDA_SUCCESS"
    caller.finish()
    assert caller.values(target, 3) == [NEW] * 3


def test_unregistering_waits_for_the_copies_that_are_queued(caller: Caller) -> None:
    nbytes = caller.large
    array, pinned = mapped(nbytes), caller.pinned(nbytes).ctypes.data
    ahead, target = caller.memory(nbytes), caller.memory(nbytes)
    if caller.simulator is not None:
        caller.simulator.scheduler.drift_probability = 0
    assert caller.register(array) == "CUDA_SUCCESS"
    for _ in range(4):
        assert caller.copy(ahead, pinned, nbytes) == "CUDA_SUCCESS"
    assert caller.copy(target, array.ctypes.data, nbytes) == "CUDA_SUCCESS"
    assert caller.status("cuMemHostUnregister", array.ctypes.data) == "CUDA_SUCCESS"
    assert caller.status("cuStreamQuery", caller.main) == "CUDA_SUCCESS"
    array[:] = LATER
    assert (caller.read(target, nbytes) == NEW).all()


def test_memory_that_is_unmapped_while_it_is_registered_keeps_its_old_bytes(caller: Caller) -> None:
    nbytes, target = 16 * PAGE, caller.memory(16 * PAGE)
    address = map_at(None, nbytes)
    view = array_at(address, nbytes)
    view[:] = NEW
    assert caller.status("cuMemHostRegister", address, nbytes, 0) == "CUDA_SUCCESS"
    if caller.simulator is not None:
        caller.simulator.unmap(address)
    assert map_at(address, nbytes) == address  # in one step: nothing else can come there
    view[:] = LATER
    for in_batch in (False, True):
        caller.ok("cuMemsetD8Async", target, OLD, nbytes, caller.main)
        copied = caller.batch([(target, address, nbytes)]) if in_batch else caller.copy(target, address, nbytes)
        assert copied == "CUDA_SUCCESS"
        caller.finish()
        assert caller.values(target, 16) == [NEW] * 16
    caller.ok("cuMemsetD8Async", target, OLD, nbytes, caller.main)
    assert caller.copy(address, target, nbytes) == "CUDA_SUCCESS"
    caller.finish()
    assert (view == LATER).all(), "what is written goes to the old pages, too"
    assert caller.status("cuMemHostUnregister", address) == "CUDA_SUCCESS"
    assert caller.status("cuMemHostRegister", address, nbytes, 0) == "CUDA_SUCCESS"
    assert caller.copy(target, address, nbytes) == "CUDA_SUCCESS"
    caller.finish()
    assert caller.values(target, 16) == [LATER] * 16
    assert caller.status("cuMemHostUnregister", address) == "CUDA_SUCCESS"


def map_at(address: int | None, nbytes: int) -> int:
    """Map fresh memory, at `address` in the place of what is there. It stays mapped."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed = 0 if address is None else 0x10
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
    found = libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert found not in (None, ctypes.c_void_p(-1).value)
    return int(found)
