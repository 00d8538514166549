"""The simulated driver: what depends on the versions of driver and bindings."""

from __future__ import annotations

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from simulator_program import STREAM, Program, R, address_of, attributes, strided_operation

from kvoffload.simulator import DriverError, FunctionNotFoundError, copy_calls


@pytest.mark.parametrize(
    ("bindings", "driver", "works"),
    [((12, 9), (12, 7), False), ((12, 9), (12, 8), True), ((13, 3), (12, 9), False), ((13, 3), (13, 0), True)],
)
def test_batch_calls_by_version(bindings: tuple[int, int], driver: tuple[int, int], works: bool) -> None:
    program = Program(bindings_version=bindings, driver_version=driver)
    source, target, stream = program.host(64), program.device(64), program.stream()
    arguments = ([target], [cuda.CUdeviceptr(source)], [64], 1, [attributes(STREAM)], [0], 1, stream)
    operation = strided_operation(target, source, 8, 2, 8, 8)
    if not works:
        with pytest.raises(FunctionNotFoundError):
            program.sim.cuMemcpyBatchAsync(*arguments)
        with pytest.raises(RuntimeError):
            program.strided([operation], stream)
        return
    extra = 1 if bindings < (13, 0) else 0
    assert program.sim.cuMemcpyBatchAsync(*arguments) == (R.CUDA_SUCCESS, *(0,) * extra)
    assert program.sim.cuMemcpyBatchAsync(*arguments[:-1], 0) == (R.CUDA_ERROR_INVALID_VALUE, *(None,) * extra)
    assert len(program.sim.cuMemcpy3DBatchAsync(1, [operation], 0, stream)) == 1 + extra


def test_raw_calls_take_addresses_and_raise() -> None:
    program = Program(bindings_version=(13, 5))
    raw, stream = program.sim.raw, program.stream()
    assert raw is not None
    source, target = program.host(64), program.device(64)
    program.bytes(source, 64)[:] = np.arange(64)
    columns = [np.array([int(base), int(base) + 32], np.uint64) for base in (target, source)]
    sizes, indices = np.array([32, 32], np.uint64), np.zeros(1, np.uint64)
    given = attributes(STREAM)
    arguments = [*map(address_of, [*columns, sizes]), 2, int(given.getPtr()), address_of(indices), 1]
    assert raw.memcpy_batch_async_v2(*arguments, int(stream)) is None
    program.ok("cuStreamSynchronize", stream)
    assert (program.bytes(target, 64) == np.arange(64)).all()

    operations = np.zeros(2, copy_calls.OPERATION_DTYPE)
    for field, value in (("src_type", 1), ("dst_type", 1), ("width", 8), ("height", 4), ("depth", 1), ("order", 1)):
        operations[field] = value
    operations["src_ptr"], operations["dst_ptr"] = [source + 32, source], [int(target), int(target) + 32]
    raw.memcpy_3d_batch_async_v2(2, address_of(operations), 0, int(stream))
    program.ok("cuStreamSynchronize", stream)
    assert (program.bytes(target, 64) == np.roll(np.arange(64), 32)).all()
    with pytest.raises(DriverError) as caught:
        raw.memcpy_3d_batch_async_v2(2, address_of(operations), 0, 0)
    assert (caught.value.status, str(caught.value)) == (1, "ERROR_INVALID_VALUE (1)")
    with pytest.raises(TypeError):
        raw.memcpy_batch_async_v2(*arguments, stream)
