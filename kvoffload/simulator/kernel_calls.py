"""Driver calls about modules and kernels."""

# ruff: noqa: N802, N803 (names and signatures are CUDA's)

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings import driver as cuda

from kvoffload.simulator import interpreter, space
from kvoffload.simulator.calls import INVALID_VALUE, Core, driver_call, integer
from kvoffload.simulator.errors import RefusedError
from kvoffload.simulator.handles import INVALID_HANDLE
from kvoffload.simulator.kernels import Code, Function, LaunchOperation, Module

_R = cuda.CUresult
_F = cuda.CUfunction_attribute
_A = cuda.CUdevice_attribute
_ELF = b"\x7fELF"
_MAX_GRID_X = 2**31 - 1


class KernelCalls(Core):
    attributes: dict[int, int]

    @driver_call(values=1)
    def cuModuleLoadData(self, image: Any) -> Any:
        content = bytes(memoryview(image))  # TypeError for an address: its length is not known
        if content.startswith(_ELF):
            return _R.CUDA_ERROR_NO_BINARY_FOR_GPU
        try:
            code = Code.parse(content)
        except (ValueError, TypeError):
            return _R.CUDA_ERROR_INVALID_IMAGE
        module = Module(self.modules.new_handle(), self.context(), code)
        self.modules.add(module)
        return (cuda.CUmodule(module.handle),)

    @driver_call()
    def cuModuleUnload(self, hmod: Any) -> Any:
        module = self._module(hmod)
        if module.pending:
            self.violate(f"module of {module.code.function} unloaded while a queued launch uses it")
        self.drop_module(module)

    @driver_call(values=1)
    def cuModuleGetFunction(self, hmod: Any, name: bytes) -> Any:
        module = self._module(hmod)
        if name.decode() != module.code.function:
            return _R.CUDA_ERROR_NOT_FOUND
        try:
            kernel = interpreter.load(module.code.module, module.code.function)
        except AttributeError:
            return _R.CUDA_ERROR_NOT_FOUND
        function = Function(self.functions.new_handle(), module, kernel)
        self.functions.add(function)
        module.functions.append(function)
        return (cuda.CUfunction(function.handle),)

    @driver_call(values=1)
    def cuFuncGetAttribute(self, attrib: Any, hfunc: Any) -> Any:
        function, number = self._function(hfunc), integer(attrib)
        if number == _F.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
            return (self._max_threads(),)
        if number == _F.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
            return (0,)
        if number == _F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            return (function.max_dynamic_shared_bytes,)
        return INVALID_VALUE

    @driver_call()
    def cuFuncSetAttribute(self, hfunc: Any, attrib: Any, value: int) -> Any:
        function = self._function(hfunc)
        if integer(attrib) != _F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            return INVALID_VALUE
        most = self.attributes.get(int(_A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN), 0)
        if not 0 <= value <= most:
            return INVALID_VALUE
        function.max_dynamic_shared_bytes = value
        return None

    @driver_call()
    def cuLaunchKernel(
        self,
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
        function, stream = self._function(f), self.submission_stream(hStream)
        if function.module.context is not stream.context:
            return INVALID_HANDLE
        grid, threads = (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ)
        self._check_shape(function, grid, threads, sharedMemBytes)
        if integer(extra):
            raise NotImplementedError("arguments are given by kernelParams here, not by extra")
        arguments = self._arguments(function.module.code, kernelParams)
        operation = LaunchOperation(function, grid[0], sharedMemBytes, arguments, self.memory, self.scheduler.chance)
        self.submit(stream, operation)
        self.scheduler.drift()
        return None

    def _check_shape(
        self, function: Function, grid: tuple[int, int, int], threads: tuple[int, int, int], shared_bytes: int
    ) -> None:
        """Triton fixes a kernel's number of threads, in one dimension; its grids have one dimension here."""
        if not 0 < grid[0] <= _MAX_GRID_X or grid[1:] != (1, 1):
            raise RefusedError(INVALID_VALUE)
        if threads != (function.module.code.threads, 1, 1) or threads[0] > self._max_threads():
            raise RefusedError(INVALID_VALUE)
        if not 0 <= shared_bytes <= function.max_dynamic_shared_bytes:
            raise RefusedError(INVALID_VALUE)

    def _arguments(self, code: Code, pointers: Any) -> list[tuple[str, str, int]]:
        """Read the arguments: `pointers` is an array with the address of each."""
        if not code.parameters:
            return []
        count = len(code.parameters)
        addresses = self._host_words(space.host_address(pointers), 8 * count).view(np.int64).tolist()
        arguments = []
        for (name, kind), address in zip(code.parameters, addresses, strict=True):
            dtype = np.dtype(np.int64 if kind == "i64" else np.int32)
            arguments.append((name, kind, int(self._host_words(address, dtype.itemsize).view(dtype)[0])))
        return arguments

    def _host_words(self, address: int, nbytes: int) -> space.Bytes:
        """Memory that the driver reads during a launch; CUDA would crash if it is not mapped."""
        if address == 0:
            raise RefusedError(INVALID_VALUE)
        if not self.memory.mapped(address, nbytes):
            self.violate(f"a launch reads its arguments at {address:#x}, where there is no memory")
            raise RefusedError(INVALID_VALUE)
        return space.view(address, nbytes)

    def _max_threads(self) -> int:
        return self.attributes.get(int(_A.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK), 0)

    def _module(self, handle: Any) -> Module:
        number = integer(handle)
        if self.modules.is_stale(number):
            self.violate(f"module {number:#x} used after it was unloaded")
        return self._of_current_context(self.modules.get(number))

    def _function(self, handle: Any) -> Function:
        number = integer(handle)
        if self.functions.is_stale(number):
            self.violate(f"function {number:#x} used after its module was unloaded")
        function = self.functions.get(number)
        self._of_current_context(function.module)
        return function

    def _of_current_context(self, module: Module) -> Module:
        if module.context is not self.context():
            raise RefusedError(INVALID_HANDLE)
        return module
