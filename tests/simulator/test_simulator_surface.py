"""The simulated driver: it offers the seam's functions, and lays structures out as the bindings do."""

from __future__ import annotations

from cuda.bindings import driver as cuda
from program import (
    ANY,
    DURING_API_CALL,
    Program,
    R,
    attributes,
    program_fixture,  # noqa: F401
    rectangle,
    strided_operation,
)

from kvoffload.driver import functions
from kvoffload.driver.simulator import SimulatedDriver, copies


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
    (seen,) = copies.structures([int(operation.getPtr())], copies.OPERATION_DTYPE)
    assert seen.tolist() == (1, 0x11, 5, 7, 1, 0x22, 6, 8, 3, 4, 1, int(ANY), 1)

    made = rectangle(0x22, 0x11, 3, 4, 6, 5)
    made.srcHost, made.dstHost = 0x33, 0x44
    made.srcXInBytes, made.srcY, made.dstXInBytes, made.dstY = 9, 10, 11, 12
    (seen,) = copies.structures([int(made.getPtr())], copies.RECTANGLE_DTYPE)
    assert seen.tolist() == (9, 10, 4, 0x33, 0x11, 5, 11, 12, 4, 0x44, 0x22, 6, 3, 4)
    assert (copies.OPERATION_DTYPE.itemsize, copies.RECTANGLE_DTYPE.itemsize) == (112, 128)
    assert copies.order_at(int(attributes(DURING_API_CALL).getPtr())) == int(DURING_API_CALL)
