"""The simulated driver: allocations, registered memory, and addresses that are neither."""

from __future__ import annotations

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from simulator_program import Program, R, address_of

from kvoffload.simulator import SimulatorError, memory, space


def test_allocations_are_exact_aligned_and_poisoned(program: Program) -> None:
    pointer, address = program.device(1000), program.host(1000)
    assert int(pointer) % 512 == 0
    assert address % 4096 == 0
    assert (program.bytes(pointer, 1000) == memory.FRESH_BYTE).all()
    assert program.ok("cuMemGetAddressRange", int(pointer) + 999)[1] == 1000
    assert program.status("cuMemGetAddressRange", int(pointer) + 1000) == R.CUDA_ERROR_NOT_FOUND
    free, total = program.ok("cuMemGetInfo")
    assert total - free == 1000


def test_freed_memory_is_poisoned_and_its_address_refused(program: Program) -> None:
    pointer, other = program.device(64), program.device(64)
    view = program.bytes(pointer, 64)
    program.ok("cuMemFree", pointer)
    assert (view == memory.FREED_BYTE).all()
    assert program.status("cuMemFree", pointer) == R.CUDA_ERROR_INVALID_VALUE
    assert program.status("cuMemcpyAsync", other, pointer, 64, program.stream()) == R.CUDA_ERROR_INVALID_VALUE


def test_a_write_beside_an_allocation_is_found(program: Program) -> None:
    pointer = program.device(100)
    beyond = space.view(int(pointer) + 100, 1)
    beyond[:] = 0
    with pytest.raises(SimulatorError, match="overwritten"):
        program.sim.check_guards()
    with pytest.raises(SimulatorError, match="overwritten"):
        program.sim.cuMemFree(pointer)
    beyond[:] = memory.GUARD_BYTE
    program.ok("cuMemFree", pointer)


def test_memory_has_limits() -> None:
    program = Program(memory_bytes=1000, max_register_bytes=8192, pinnable_bytes=10_000)
    program.device(900)
    assert program.sim.cuMemAlloc(101) == (R.CUDA_ERROR_OUT_OF_MEMORY, None)
    assert program.status("cuMemAlloc", 0) == R.CUDA_ERROR_INVALID_VALUE
    array = np.zeros(16_384, np.uint8)
    assert program.status("cuMemHostRegister", address_of(array), 8193, 0) == R.CUDA_ERROR_INVALID_VALUE
    program.host(9000)
    assert program.status("cuMemHostRegister", address_of(array), 4096, 0) == R.CUDA_ERROR_OUT_OF_MEMORY
    assert program.sim.cuMemHostAlloc(1001, 0) == (R.CUDA_ERROR_OUT_OF_MEMORY, None)


def test_pages_register_once(program: Program) -> None:
    array = np.zeros(5 * 4096, np.uint8)
    address = -(-address_of(array) // 4096) * 4096
    program.ok("cuMemHostRegister", address, 5000, 0)
    assert program.status("cuMemHostRegister", address + 8000, 10, 0) == R.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    program.ok("cuMemHostRegister", address + 8192, 10, 0)
    assert program.status("cuMemHostUnregister", address + 1) == R.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    assert int(program.ok("cuMemHostGetDevicePointer", address, 0)) == address
    assert program.sim.leaks()["registered_ranges"] == 2
    for start in (address, address + 8192):
        program.ok("cuMemHostUnregister", start)
    assert program.sim.leaks()["registered_ranges"] == 0


def test_a_copy_may_not_span_two_registered_ranges(program: Program) -> None:
    array = np.zeros(4 * 4096, np.uint8)
    address = -(-address_of(array) // 4096) * 4096
    target, stream = program.device(8192), program.stream()
    for start in (address, address + 4096):
        program.ok("cuMemHostRegister", start, 4096, 0)
    assert program.status("cuMemcpyAsync", target, address, 8192, stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.batch([(target, address, 8192)], stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.batch([(target, address + 4096, 4096)], stream) == R.CUDA_SUCCESS


def test_pageable_copies_are_staged_and_counted(program: Program) -> None:
    source, back = np.full(64, 7, np.uint8), np.zeros(64, np.uint8)
    pointer, stream = program.device(64), program.stream()
    release = program.gate(stream)
    program.ok("cuMemcpyAsync", pointer, address_of(source), 64, stream)
    source[:] = 9
    release()
    program.ok("cuMemcpyAsync", address_of(back), pointer, 64, stream)  # over when it returns
    assert (back == 7).all()
    program.ok("cuMemcpyHtoD", pointer, source, 64)
    program.ok("cuMemcpyDtoH", back, pointer, 64)
    assert (back == 9).all()
    assert program.sim.pageable_copies == 4


def test_a_wild_address_is_an_error_not_a_crash(program: Program) -> None:
    pointer, stream = program.device(64), program.stream()
    for wild in (0, 0x10, 1 << 46, int(pointer) - 8, int(pointer) + 8, (1 << 64) - 8):
        assert program.status("cuMemcpyAsync", pointer, wild, 64, stream) == R.CUDA_ERROR_INVALID_VALUE
        assert program.batch([(pointer, wild, 64)], stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.sim.pending_operations() == 0
    program.ok("cuStreamSynchronize", stream)  # nothing of it is sticky


def test_a_staged_copy_reaches_the_device_in_the_order_of_the_legacy_stream(program: Program) -> None:
    program.sim.scheduler.drift_probability = 0
    source, back, pointer = np.full(64, 7, np.uint8), np.zeros(64, np.uint8), program.device(64, 0)
    program.ok("cuMemcpyHtoD", pointer, source, 64)
    source[:] = 9
    assert (program.bytes(pointer, 64) == 0).all()
    program.ok("cuMemcpyDtoH", back, pointer, 64)
    assert (back == 7).all()
    pinned = program.host(64, 5)
    program.ok("cuMemcpyHtoD", pointer, pinned, 64)
    assert (program.bytes(pointer, 64) == 5).all()


def test_a_copy_from_pageable_memory_can_be_had_without_staging(program: Program) -> None:
    program.sim.staged_copies = False
    program.sim.scheduler.drift_probability = 0
    pointer = program.device(64, 0)
    program.ok("cuMemcpyHtoD", pointer, np.full(64, 7, np.uint8), 64)
    assert (program.bytes(pointer, 64) == 7).all()


def test_pointers_are_described(program: Program) -> None:
    kind = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    ordinal = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    pointer, address = program.device(64), program.host(64)
    assert program.ok("cuPointerGetAttribute", kind, int(pointer) + 63) == cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
    assert program.ok("cuPointerGetAttribute", kind, address) == cuda.CUmemorytype.CU_MEMORYTYPE_HOST
    assert program.ok("cuPointerGetAttribute", ordinal, pointer) == 0
    assert program.sim.cuPointerGetAttribute(kind, 16) == (R.CUDA_ERROR_INVALID_VALUE, None)


def test_mapped_memory_is_described_by_handle_and_copied_as_one(program: Program) -> None:
    base = program.sim.allocate_outside(2500, device=0, allocator="mapped", handle_bytes=1000)
    handles = {0: (0, 1000), 999: (0, 1000), 1000: (1000, 1000), 2499: (2000, 500)}
    for at, handle in handles.items():
        start, nbytes = program.ok("cuMemGetAddressRange", base + at)
        assert (int(start) - base, nbytes) == handle
    assert program.status("cuMemGetAddressRange", base + 2500) == R.CUDA_ERROR_NOT_FOUND
    target, stream = program.device(2500), program.stream()
    assert program.status("cuMemcpyAsync", target, base, 2500, stream) == R.CUDA_SUCCESS
    assert program.status("cuMemcpyAsync", target, base + 1, 2500, stream) == R.CUDA_ERROR_INVALID_VALUE
    handle = program.ok("cuMemRetainAllocationHandle", base + 1500)
    assert program.sim.leaks()["allocation_handles"] == 1
    program.ok("cuMemRelease", handle)
    assert program.status("cuMemRetainAllocationHandle", target) == R.CUDA_ERROR_INVALID_VALUE
    program.ok("cuStreamSynchronize", stream)
    program.sim.free_outside(base)


def test_no_copy_crosses_from_an_allocation_to_one_whose_address_follows(program: Program) -> None:
    first, second, third = program.sim.allocate_adjacent([1000, 24, 1000], [0, 0, 0], "unknown")
    assert (second, third) == (first + 1000, first + 1024)
    target, stream = program.device(2024), program.stream()
    assert program.batch([(target, first, 1000), (int(target) + 1024, third, 1000)], stream) == R.CUDA_SUCCESS
    assert program.batch([(target, first + 1, 1000)], stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.status("cuMemcpyAsync", target, first, 1024, stream) == R.CUDA_ERROR_INVALID_VALUE
    program.ok("cuStreamSynchronize", stream)
    program.sim.free_outside(second)
    assert program.status("cuMemGetAddressRange", second) == R.CUDA_ERROR_NOT_FOUND
    assert (program.bytes(third, 1000) == memory.FRESH_BYTE).all()
    program.sim.check_guards()
    for address in (first, third):
        program.sim.free_outside(address)


@pytest.mark.parametrize("allocator", ["default pool", "own pool", "unknown"])
@pytest.mark.parametrize("devices", [(1,), (0, -1)])
def test_memory_of_a_gpu_that_there_is_not_is_refused(
    program: Program, allocator: str, devices: tuple[int, ...]
) -> None:
    before = program.sim.leaks()
    with pytest.raises(ValueError, match=r"each device must be in \[0, 1\), got "):
        program.sim.allocate_adjacent([512] * len(devices), devices, allocator)
    assert program.sim.leaks() == before


def test_memory_is_freed_by_its_first_byte(program: Program) -> None:
    address = program.sim.allocate_outside(512, device=0, allocator="unknown")
    with pytest.raises(AssertionError, match="begins elsewhere"):
        program.sim.free_outside(address + 10)
    assert (program.bytes(address, 512) == memory.FRESH_BYTE).all()
    program.sim.free_outside(address)
    with pytest.raises(AssertionError, match="freed twice"):
        program.sim.free_outside(address)
