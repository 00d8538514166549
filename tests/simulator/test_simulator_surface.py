"""The simulated driver: it offers the seam's functions, and lays structures out as the bindings do."""

from __future__ import annotations

from typing import Any

import pytest
from cuda.bindings import driver as cuda
from simulator_program import ANY, DURING_API_CALL, PER_THREAD, Program, R, attributes, rectangle, strided_operation

from kvoffload.driver import functions
from kvoffload.simulator import SimulatedDriver, copy_calls, space


def test_offers_every_function_of_the_seam() -> None:
    simulated = SimulatedDriver(bindings_version=(13, 5))
    assert [name for name in functions.REQUIRED + functions.OPTIONAL if not hasattr(simulated, name)] == []
    assert [name for name in functions.RAW if not hasattr(simulated.raw, name)] == []
    assert SimulatedDriver().raw is None


def test_describes_a_device(program: Program) -> None:
    sim = program.sim
    assert program.ok("cuDriverGetVersion") == 13000
    assert program.ok("cuDeviceGetCount") == 1
    assert program.ok("cuDeviceGetName", 64, 0).startswith(b"NVIDIA simulated GPU\0")
    assert program.ok("cuDeviceGetPCIBusId", 32, 0).startswith(b"0000:01:00.0\0")
    major = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    assert program.ok("cuDeviceGetAttribute", major, cuda.CUdevice(0)) == 9
    assert program.ok("cuDeviceGetAttribute", cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED, 0) == 0
    assert sim.cuDeviceGet(1) == (R.CUDA_ERROR_INVALID_DEVICE, None)
    assert program.ok("cuCtxGetStreamPriorityRange") == (0, -5)


def test_structures_are_laid_out_as_the_installed_bindings_lay_them_out() -> None:
    operation = strided_operation(0x22, 0x11, 3, 4, 6, 5, ANY)
    operation.src.op.ptr.layerHeight, operation.dst.op.ptr.layerHeight, operation.flags = 7, 8, 1
    (seen,) = copy_calls.structures([int(operation.getPtr())], copy_calls.OPERATION_DTYPE)
    assert seen.tolist() == (1, 0x11, 5, 7, 1, 0x22, 6, 8, 3, 4, 1, int(ANY), 1)

    made = rectangle(0x22, 0x11, 3, 4, 6, 5)
    made.srcHost, made.dstHost = 0x33, 0x44
    made.srcXInBytes, made.srcY, made.dstXInBytes, made.dstY = 9, 10, 11, 12
    (seen,) = copy_calls.structures([int(made.getPtr())], copy_calls.RECTANGLE_DTYPE)
    assert seen.tolist() == (9, 10, 4, 0x33, 0x11, 5, 11, 12, 4, 0x44, 0x22, 6, 3, 4)
    assert (copy_calls.OPERATION_DTYPE.itemsize, copy_calls.RECTANGLE_DTYPE.itemsize) == (112, 128)
    assert space.read_word(int(attributes(DURING_API_CALL).getPtr())) == int(DURING_API_CALL)


def test_stream_memory_operations_are_announced_as_a_hopper_gpu_announces_them(program: Program) -> None:
    names = cuda.CUdevice_attribute
    assert program.ok("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1, 0) == 0
    assert program.ok("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 0) == 1
    program.gate(program.stream())()


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("cuPointerGetAttribute", (2, 16), AttributeError),  # the number of CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        ("cuEventQuery", (-1,), OverflowError),
        ("cuMemAlloc", (-1,), OverflowError),
        ("cuMemAlloc", (None,), TypeError),
        ("cuMemcpyAsync", (-8, 16, 4, PER_THREAD), OverflowError),
        ("cuStreamWaitValue32", (PER_THREAD, 16, -1, 0), OverflowError),
        ("cuStreamWaitValue32", (PER_THREAD, 16, 1 << 32, 0), OverflowError),
    ],
)
def test_arguments_are_refused_as_the_bindings_refuse_them(
    program: Program, name: str, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        program.status(name, *arguments)
    assert program.status("cuDeviceGet", -1) == R.CUDA_ERROR_INVALID_DEVICE
