"""The simulated driver: copies, their source access order, and what CUDA leaves undefined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_program import (
    ANY,
    DURING_API_CALL,
    ILLEGAL_ADDRESS,
    LEGACY,
    ORDER,
    PER_THREAD,
    STREAM,
    Program,
    R,
    address_of,
    attributes,
    rectangle,
    strided_operation,
)

from kvoffload.simulator import SimulatorError, memory


def carried(program: Program, order: Any) -> bool:
    """Whether a gated batch copy carried bytes written after its submission."""
    source, target, stream = program.host(64, 1), program.device(64), program.stream()
    release = program.gate(stream)
    assert program.batch([(target, source, 64)], stream, order) == R.CUDA_SUCCESS
    program.status("cuStreamQuery", stream)
    program.bytes(source, 64)[:] = 2
    release()
    program.ok("cuStreamSynchronize", stream)
    (value,) = set(program.bytes(target, 64).tolist())
    return bool(value == 2)


@pytest.mark.parametrize(("order", "moments"), [(STREAM, {"run"}), (DURING_API_CALL, {"call"}), (ANY, {"run", "call"})])
def test_a_source_is_read_when_its_access_order_says(order: Any, moments: set[str]) -> None:
    assert {"run" if carried(Program(seed=seed), order) else "call" for seed in range(20)} == moments


@pytest.mark.parametrize("order", [ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_INVALID, ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_MAX])
def test_an_invalid_access_order_is_refused(program: Program, order: Any) -> None:
    source, target, stream = program.host(64), program.device(64), program.stream()
    assert program.batch([(target, source, 64)], stream, order) == R.CUDA_ERROR_INVALID_VALUE
    assert program.strided([strided_operation(target, source, 8, 2, 8, 8, order)], stream) == R.CUDA_ERROR_INVALID_VALUE


def test_each_copy_of_a_batch_has_the_order_of_its_attribute(program: Program) -> None:
    source, target, stream = program.host(64, 1), program.device(64), program.stream()
    release = program.gate(stream)
    pointers = [[cuda.CUdeviceptr(int(base) + 16 * i) for i in range(4)] for base in (target, source)]
    given = [attributes(STREAM), attributes(DURING_API_CALL)]
    program.ok("cuMemcpyBatchAsync", *pointers, [16] * 4, 4, given, [0, 3], 2, stream)
    program.bytes(source, 64)[:] = 2
    release()
    program.ok("cuStreamSynchronize", stream)
    assert program.bytes(target, 64).tolist() == [2] * 48 + [1] * 16
    for indices in ([1, 3], [0, 0], [0, 4]):
        arguments = (*pointers, [16] * 4, 4, given, indices, 2, stream)
        assert program.status("cuMemcpyBatchAsync", *arguments) == R.CUDA_ERROR_INVALID_VALUE


def test_batches_refuse_what_the_bindings_refuse(program: Program) -> None:
    call: Callable[..., Any] = program.sim.cuMemcpyBatchAsync
    stream = program.stream()
    pointers, given = [cuda.CUdeviceptr(8)], [attributes(STREAM)]
    for arguments in (
        ([8], pointers, [8], 1, given, [0], 1),
        (pointers, pointers, [8.0], 1, given, [0], 1),
        (pointers, pointers, [np.int64(8)], 1, given, [0], 1),
        (pointers, pointers, [8], 1, [STREAM], [0], 1),
    ):
        with pytest.raises(TypeError):
            call(*arguments, stream)
    with pytest.raises(RuntimeError, match="too small"):
        call(pointers, pointers, [8], 2, given, [0], 1, stream)
    with pytest.raises(TypeError):
        program.sim.cuMemcpy3DBatchAsync(1, [3], 0, stream)
    with pytest.raises(TypeError):
        program.sim.cuMemcpy2DAsync(3, stream)


def test_batches_refuse_the_legacy_stream_empty_copies_and_no_copies(program: Program) -> None:
    source, target, stream = program.host(64), program.device(64), program.stream()
    for handle in (0, LEGACY):
        assert program.batch([(target, source, 64)], handle) == R.CUDA_ERROR_INVALID_VALUE
        assert program.strided([strided_operation(target, source, 8, 2, 8, 8)], handle) == R.CUDA_ERROR_INVALID_VALUE
    assert program.batch([(target, source, 64)], PER_THREAD) == R.CUDA_SUCCESS
    assert program.batch([(target, source, 0)], stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.strided([strided_operation(target, source, 8, 0, 8, 8)], stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.strided([], stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.status("cuMemcpyBatchAsync", [], [], [], 0, [], [], 0, stream) == R.CUDA_ERROR_INVALID_VALUE


def test_strided_rows_stay_inside_one_allocation(program: Program) -> None:
    source, stream = program.host(4096), program.stream()
    first, second = sorted(int(program.device(1024)) for _ in range(2))
    good = strided_operation(first, source, 64, 4, 256, 64)
    crossing = strided_operation(first, source, 64, 2, second - first, 64)
    past_end = strided_operation(first, source, 64, 5, 256, 64)
    narrow = strided_operation(first, source, 64, 2, 63, 64)
    for bad in (crossing, past_end, narrow):
        assert program.strided([good, bad], stream) == R.CUDA_ERROR_INVALID_VALUE
    for bad in ((second - first, 2), (256, 5), (63, 2)):
        made = rectangle(first, source, 64, bad[1], bad[0], 64)
        assert program.status("cuMemcpy2DAsync", made, stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.strided([good], stream) == R.CUDA_SUCCESS


def test_a_rectangle_honours_offsets_and_memory_types(program: Program) -> None:
    source, target, stream = program.host(256), program.device(256, 0), program.stream()
    program.bytes(source, 256)[:] = np.arange(256)
    made = rectangle(target, 0, 4, 3, 16, 32)
    made.srcMemoryType, made.srcHost = cuda.CUmemorytype.CU_MEMORYTYPE_HOST, source
    made.srcXInBytes, made.srcY, made.dstXInBytes, made.dstY = 8, 2, 1, 5
    program.ok("cuMemcpy2DAsync", made, stream)
    program.ok("cuStreamSynchronize", stream)
    expected = np.zeros((16, 16), np.uint8)
    expected[5:8, 1:5] = np.arange(256).reshape(8, 32)[2:5, 8:12]
    assert (program.bytes(target, 256) == expected.reshape(-1)).all()
    made.srcHost = int(target)
    assert program.status("cuMemcpy2DAsync", made, stream) == R.CUDA_ERROR_INVALID_VALUE


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(["strided", "2d", "batch", "loop"]), st.sampled_from([STREAM, ANY]))
def test_every_copy_call_moves_the_bytes_of_a_naive_loop(data: st.DataObject, method: str, order: Any) -> None:
    program = Program(seed=data.draw(st.integers(0, 99)))
    blocks, width, height = (data.draw(st.integers(1, 4)) for _ in range(3))
    pitch = width * blocks
    shuffled = data.draw(st.permutations(range(blocks)))
    source, target, stream = program.host(pitch * height), program.device(pitch * height, 0), program.stream()
    grid = np.random.default_rng(0).integers(1, 255, (height, blocks, width), np.uint8)
    program.bytes(source, pitch * height)[:] = grid.reshape(-1)
    starts = [(int(target) + to * width, source + at * width) for at, to in enumerate(shuffled)]
    rows = [(to + r * pitch, at + r * pitch, width) for to, at in starts for r in range(height)]
    if method == "strided":
        made = [strided_operation(to, at, width, height, pitch, pitch, order) for to, at in starts]
        assert program.strided(made, stream) == R.CUDA_SUCCESS
    elif method == "2d":
        for to, at in starts:
            program.ok("cuMemcpy2DAsync", rectangle(to, at, width, height, pitch, pitch), stream)
    elif method == "batch":
        assert program.batch(rows, stream, order) == R.CUDA_SUCCESS
    else:
        for to, at, nbytes in rows:
            program.ok("cuMemcpyAsync", to, at, nbytes, stream)
    program.ok("cuStreamSynchronize", stream)
    expected = np.empty_like(grid)
    expected[:, shuffled] = grid
    assert (program.bytes(target, pitch * height) == expected.reshape(-1)).all()
    program.sim.check_guards()


@pytest.mark.parametrize("flat", [True, False])
def test_overlapping_targets_in_one_batch_are_found(program: Program, flat: bool) -> None:
    source, target, stream = program.host(256), program.device(256), program.stream()
    interleaved = [strided_operation(int(target) + 8 * i, source, 8, 4, 32, 8) for i in range(4)]
    assert program.strided(interleaved, stream) == R.CUDA_SUCCESS
    with pytest.raises(SimulatorError, match="overlap"):  # noqa: PT012
        if flat:
            program.batch([(target, source, 64), (int(target) + 63, source, 64)], stream)
        else:
            program.strided([interleaved[0], strided_operation(int(target) + 7, source, 8, 4, 32, 8)], stream)


def test_a_target_that_is_also_a_source_is_found(program: Program) -> None:
    pointer, stream = int(program.device(256)), program.stream()
    assert program.batch([(pointer, pointer + 128, 64), (pointer + 64, pointer + 192, 64)], stream) == R.CUDA_SUCCESS
    with pytest.raises(SimulatorError, match="also a source"):
        program.batch([(pointer, pointer + 64, 64), (pointer + 64, pointer + 128, 64)], stream)
    with pytest.raises(SimulatorError, match="overlap"):
        program.sim.cuMemcpyAsync(pointer, pointer + 8, 64, stream)


@pytest.mark.parametrize("kind", ["device", "host", "registered"])
def test_freeing_under_a_queued_copy_is_found(program: Program, kind: str) -> None:
    array = np.zeros(64, np.uint8)
    source, target, stream = program.host(64), program.device(64), program.stream()
    free = {"device": ("cuMemFree", target), "host": ("cuMemFreeHost", source)}.get(kind)
    if free is None:
        source = address_of(array)
        program.ok("cuMemHostRegister", source, 64, 0)
        free = ("cuMemHostUnregister", source)
    release = program.gate(stream)
    program.ok("cuMemcpyAsync", target, source, 64, stream)
    with pytest.raises(SimulatorError, match="freed while"):
        getattr(program.sim, free[0])(free[1])
    release()
    program.ok("cuStreamSynchronize", stream)
    program.ok(*free)


def test_without_strict_a_late_copy_reads_poison() -> None:
    program = Program(strict=False)
    source, target, stream = program.host(64, 1), program.device(64), program.stream()
    release = program.gate(stream)
    program.ok("cuMemcpyAsync", target, source, 64, stream)
    program.ok("cuMemFreeHost", source)
    release()
    program.ok("cuStreamSynchronize", stream)
    assert (program.bytes(target, 64) == memory.FREED_BYTE).all()
    assert len(program.sim.violations) == 1


def test_a_kernel_may_not_touch_unpinned_memory(program: Program) -> None:
    array, stream, ran = np.zeros(64, np.uint8), program.stream(), []
    event = program.event()
    pinned = program.host(64)
    program.sim.enqueue(stream, lambda: ran.append(1), reads=[(pinned, 64)], writes=[(int(program.device(8)), 8)])
    program.ok("cuStreamSynchronize", stream)
    program.sim.enqueue(stream, lambda: ran.append(2), reads=[(address_of(array), 64)])
    assert program.status("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS
    assert program.status("cuEventRecord", event, stream) == ILLEGAL_ADDRESS
    assert ran == [1]
