"""Driver calls about modules and kernels."""

# ruff: noqa: N802, N803 (names and signatures are CUDA's)

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings import driver as cuda

from kvoffload.simulator import interpreter, space
from kvoffload.simulator.driver import SimulatedDriver, driver_call, integer
from kvoffload.simulator.errors import INVALID_HANDLE, INVALID_VALUE, RefusedError
from kvoffload.simulator.kernels import Code, Function, LaunchOperation, Module

_R = cuda.CUresult
_F = cuda.CUfunction_attribute
_A = cuda.CUdevice_attribute
_ELF = b"\x7fELF"
_MAX_GRID_X = 2**31 - 1


@driver_call(values=1)
def cuModuleLoadData(driver: SimulatedDriver, image: Any) -> Any:
    content = bytes(memoryview(image))  # TypeError for an address: its length is not known
    if content.startswith(_ELF):
        return _R.CUDA_ERROR_NO_BINARY_FOR_GPU
    try:
        code = Code.parse(content)
    except (ValueError, TypeError):
        return _R.CUDA_ERROR_INVALID_IMAGE
    return (cuda.CUmodule(driver.modules.add(Module, driver.context(), code).handle),)


@driver_call()
def cuModuleUnload(driver: SimulatedDriver, hmod: Any) -> Any:
    module = _module(driver, hmod)
    if module.pending:
        driver.violate(f"module of {module.code.function} unloaded while a queued launch uses it")
    driver.drop_module(module)


@driver_call(values=1)
def cuModuleGetFunction(driver: SimulatedDriver, hmod: Any, name: bytes) -> Any:
    module = _module(driver, hmod)
    if name.decode() != module.code.function:
        return _R.CUDA_ERROR_NOT_FOUND
    try:
        kernel = interpreter.load(module.code.module, module.code.function)
    except AttributeError:
        return _R.CUDA_ERROR_NOT_FOUND
    function = driver.functions.add(Function, module, kernel)
    module.functions.append(function)
    return (cuda.CUfunction(function.handle),)


@driver_call(values=1)
def cuFuncGetAttribute(driver: SimulatedDriver, attrib: Any, hfunc: Any) -> Any:
    function, number = _function(driver, hfunc), integer(attrib)
    if number == _F.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        return (_max_threads(driver),)
    if number == _F.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        return (0,)
    if number == _F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        return (function.max_dynamic_shared_bytes,)
    return INVALID_VALUE


@driver_call()
def cuFuncSetAttribute(driver: SimulatedDriver, hfunc: Any, attrib: Any, value: int) -> Any:
    function = _function(driver, hfunc)
    if integer(attrib) != _F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        return INVALID_VALUE
    most = driver.attributes.get(int(_A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN), 0)
    if not 0 <= value <= most:
        return INVALID_VALUE
    function.max_dynamic_shared_bytes = value
    return None


@driver_call()
def cuLaunchKernel(
    driver: SimulatedDriver,
    f: Any,
    gridDimX: int,
    gridDimY: int,
    gridDimZ: int,
    blockDimX: int,
    blockDimY: int,
    blockDimZ: int,
    sharedMemBytes: int,
    hStream: Any,
    kernelParams: Any,
    extra: Any,
) -> Any:
    function, stream = _function(driver, f), driver.submission_stream(hStream)
    if function.module.context is not stream.context:
        return INVALID_HANDLE
    # Triton fixes a kernel's number of threads, in one dimension; its grids have one dimension here.
    if not 0 < gridDimX <= _MAX_GRID_X or (gridDimY, gridDimZ, blockDimY, blockDimZ) != (1, 1, 1, 1):
        return INVALID_VALUE
    if blockDimX != function.module.code.threads or blockDimX > _max_threads(driver):
        return INVALID_VALUE
    if not 0 <= sharedMemBytes <= function.max_dynamic_shared_bytes:
        return INVALID_VALUE
    if integer(extra):
        raise NotImplementedError("arguments are given by kernelParams here, not by extra")
    arguments = _arguments(driver, function.module.code, kernelParams)
    pointed_at = [driver.memory.at(value) for _, kind, value in arguments if kind == "i64"]
    regions = [each for each in pointed_at if each is not None]  # must not be freed before the kernel ran
    given = (function, gridDimX, sharedMemBytes, arguments, driver.memory, driver.scheduler.chance)
    driver.submit(stream, LaunchOperation(regions, *given))
    driver.scheduler.drift()
    return None


def _arguments(driver: SimulatedDriver, code: Code, pointers: Any) -> list[tuple[str, str, int]]:
    if not code.parameters:
        return []
    count = len(code.parameters)
    addresses = _host_words(driver, space.host_address(pointers), 8 * count).view(np.int64).tolist()
    arguments = []
    for (name, kind), address in zip(code.parameters, addresses, strict=True):
        dtype = np.dtype(np.int64 if kind == "i64" else np.int32)
        arguments.append((name, kind, int(_host_words(driver, address, dtype.itemsize).view(dtype)[0])))
    return arguments


def _host_words(driver: SimulatedDriver, address: int, nbytes: int) -> space.Bytes:
    """Memory that the driver reads during a launch; CUDA would crash if it is not mapped."""
    if address == 0:
        raise RefusedError(INVALID_VALUE)
    if not driver.memory.mapped(address, nbytes):
        driver.violate(f"a launch reads its arguments at {address:#x}, where there is no memory")
        raise RefusedError(INVALID_VALUE)
    return space.view(address, nbytes)


def _max_threads(driver: SimulatedDriver) -> int:
    return driver.attributes.get(int(_A.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK), 0)


def _module(driver: SimulatedDriver, handle: Any) -> Module:
    module = driver.live(driver.modules, integer(handle), "module {:#x} used after it was unloaded")
    return _of_current_context(driver, module)


def _function(driver: SimulatedDriver, handle: Any) -> Function:
    function = driver.live(driver.functions, integer(handle), "function {:#x} used after its module was unloaded")
    _of_current_context(driver, function.module)
    return function


def _of_current_context(driver: SimulatedDriver, module: Module) -> Module:
    if module.context is not driver.context():
        raise RefusedError(INVALID_HANDLE)
    return module
