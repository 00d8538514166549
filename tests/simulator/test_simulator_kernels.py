"""The simulated driver: modules, and launches of Triton kernels through Triton's interpreter."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from capture_probe import GLOBAL
from cuda.bindings import driver as cuda
from simulator_program import ILLEGAL_ADDRESS, Program, R, address_of, in_threads

from kvoffload.simulator import SimulatorError, interpreter, kernels

A = cuda.CUdevice_attribute
F = cuda.CUfunction_attribute
MAX_THREADS = F.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
MAX_SHARED = F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MISALIGNED_ADDRESS = R.CUDA_ERROR_MISALIGNED_ADDRESS

COPY_ROWS: dict[str, Any] = {
    "module": "kernel_for_tests",
    "function": "copy_rows",
    "parameters": [("table", "i64"), ("result", "i64"), ("num_rows", "i32")],
    "constants": {"WORDS": 8, "ROWS": 4, "ALIGNMENT": 16},
    "threads": 128,
    "shared_bytes": 0,
}
WRITE_WORD = COPY_ROWS | {
    "function": "write_word",
    "parameters": [("target", "i64"), ("value", "i64")],
    "constants": {"BYTES": 8},
}
READ_WORD = COPY_ROWS | {"function": "read_word", "parameters": [("source", "i64"), ("target", "i64")], "constants": {}}


class Arguments:
    """Arguments as a launch takes them: values, and an array with their addresses."""

    def __init__(self, *values: int) -> None:
        self.values = np.array(values, np.int64)
        self._pointers = address_of(self.values) + 8 * np.arange(len(values), dtype=np.uint64)
        self.pointers = address_of(self._pointers)


def load(program: Program, code: dict[str, Any]) -> Any:
    """A function of a new module."""
    module = program.ok("cuModuleLoadData", kernels.pack(**code))
    return program.ok("cuModuleGetFunction", module, code["function"].encode())


def launch(
    program: Program,
    function: Any,
    arguments: Arguments,
    stream: Any,
    *,
    grid: Any = (1, 1, 1),
    threads: Any = (128, 1, 1),
    shared_bytes: int = 0,
) -> Any:
    return program.status("cuLaunchKernel", function, *grid, *threads, shared_bytes, stream, arguments.pointers, 0)


class Rows(NamedTuple):
    """Rows of random bytes on the device, room for them on the host, and their addresses in pinned memory."""

    source: Any
    target: Any
    table: Any
    arguments: Arguments


def make_rows(program: Program, count: int, nbytes: int = 64) -> Rows:
    source = program.bytes(program.device(count * nbytes), count * nbytes)
    source[:] = np.random.default_rng(count).integers(0, 256, count * nbytes)
    target = program.bytes(program.host(count * nbytes), count * nbytes)
    table = program.bytes(program.host(16 * count), 16 * count).view(np.int64)
    for half, each in zip((table[:count], table[count:]), (source, target), strict=True):
        half[:] = address_of(each) + nbytes * np.arange(count)
    return Rows(source, target, table, Arguments(address_of(table), program.host(4, 0), count))


# modules


def test_a_module_gives_its_function_and_is_counted_until_it_is_unloaded(program: Program) -> None:
    module = program.ok("cuModuleLoadData", kernels.pack(**COPY_ROWS))
    function = program.ok("cuModuleGetFunction", module, b"copy_rows")
    assert isinstance(module, cuda.CUmodule)
    assert isinstance(function, cuda.CUfunction)
    assert program.sim.leaks()["modules"] == 1
    assert program.status("cuModuleGetFunction", module, b"other") == R.CUDA_ERROR_NOT_FOUND
    assert program.status("cuModuleGetFunction", 5, b"copy_rows") == R.CUDA_ERROR_INVALID_HANDLE
    program.ok("cuModuleUnload", module)
    assert program.sim.leaks()["modules"] == 0


def test_a_handle_used_after_its_module_was_unloaded_is_a_violation(program: Program) -> None:
    module = program.ok("cuModuleLoadData", kernels.pack(**COPY_ROWS))
    function = program.ok("cuModuleGetFunction", module, b"copy_rows")
    program.ok("cuModuleUnload", module)
    with pytest.raises(SimulatorError, match=r"module .* used after it was unloaded"):
        program.status("cuModuleUnload", module)
    with pytest.raises(SimulatorError, match=r"function .* used after its module was unloaded"):
        launch(program, function, Arguments(0, 0, 0), program.stream())


def test_a_module_must_not_be_unloaded_under_a_queued_launch(program: Program) -> None:
    module = program.ok("cuModuleLoadData", kernels.pack(**COPY_ROWS))
    function = program.ok("cuModuleGetFunction", module, b"copy_rows")
    stream, rows = program.stream(), make_rows(program, 4)
    release = program.gate(stream)
    assert launch(program, function, rows.arguments, stream) == R.CUDA_SUCCESS
    with pytest.raises(SimulatorError, match="unloaded while a queued launch uses it"):
        program.status("cuModuleUnload", module)
    release()
    program.ok("cuStreamSynchronize", stream)
    program.ok("cuModuleUnload", module)


@pytest.mark.parametrize(
    ("image", "status"),
    [
        (b"\x7fELF and so on", R.CUDA_ERROR_NO_BINARY_FOR_GPU),
        (b"something else", R.CUDA_ERROR_INVALID_IMAGE),
        (b"", R.CUDA_ERROR_INVALID_IMAGE),
        (kernels.MAGIC + b"{", R.CUDA_ERROR_INVALID_IMAGE),
        (kernels.MAGIC + b"[]", R.CUDA_ERROR_INVALID_IMAGE),
        (kernels.pack(module="kernel_for_tests"), R.CUDA_ERROR_INVALID_IMAGE),
        (kernels.pack(**COPY_ROWS | {"parameters": [["table", "f32"]]}), R.CUDA_ERROR_INVALID_IMAGE),
        (kernels.pack(**COPY_ROWS | {"parameters": 5}), R.CUDA_ERROR_INVALID_IMAGE),
    ],
)
def test_only_images_for_this_gpu_are_taken(program: Program, image: bytes, status: Any) -> None:
    assert program.sim.cuModuleLoadData(image) == (status, None)
    with pytest.raises(TypeError):
        program.sim.cuModuleLoadData(12345)


@pytest.mark.parametrize("name", ["no_such_kernel", "not_a_kernel"])
def test_a_kernel_that_its_module_lacks_is_not_found(program: Program, name: str) -> None:
    module = program.ok("cuModuleLoadData", kernels.pack(**COPY_ROWS | {"function": name}))
    assert program.status("cuModuleGetFunction", module, name.encode()) == R.CUDA_ERROR_NOT_FOUND


def test_modules_belong_to_a_context_and_go_with_it(program: Program) -> None:
    function = load(program, WRITE_WORD)
    other = program.ok("cuCtxCreate", None, 0, 0)
    assert launch(program, function, Arguments(0, 0), program.stream()) == R.CUDA_ERROR_INVALID_HANDLE
    load(program, WRITE_WORD)
    assert program.sim.leaks()["modules"] == 2
    program.ok("cuCtxDestroy", other)
    assert program.sim.leaks()["modules"] == 1
    program.ok("cuDevicePrimaryCtxRelease", 0)
    assert program.sim.leaks()["modules"] == 1, "left over in the primary context when it was given up"


def test_modules_are_loaded_but_not_unloaded_while_a_stream_is_captured(program: Program) -> None:
    """As driver 580 does."""
    image, stream = kernels.pack(**COPY_ROWS), program.stream()
    program.ok("cuStreamBeginCapture", stream, GLOBAL)
    module = program.ok("cuModuleLoadData", image)
    program.ok("cuStreamEndCapture", stream)
    program.ok("cuStreamBeginCapture", stream, GLOBAL)
    assert program.status("cuModuleUnload", module) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert program.status("cuStreamEndCapture", stream) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    program.ok("cuModuleUnload", module)


# launches


@pytest.mark.parametrize(("count", "grid"), [(1, 1), (4, 1), (5, 2), (37, 4), (3, 7)])
def test_a_kernel_does_what_it_says(program: Program, count: int, grid: int) -> None:
    function, stream, rows = load(program, COPY_ROWS), program.stream(), make_rows(program, count)
    assert launch(program, function, rows.arguments, stream, grid=(grid, 1, 1)) == R.CUDA_SUCCESS
    program.ok("cuStreamSynchronize", stream)
    assert (rows.target == rows.source).all()
    assert program.bytes(int(rows.arguments.values[1]), 4).view(np.int32)[0] == count
    program.sim.check_guards()
    assert "torch" not in sys.modules


def test_a_kernel_runs_in_stream_order_and_takes_time(program: Program) -> None:
    function, stream, rows = load(program, COPY_ROWS), program.stream(), make_rows(program, 8)
    source, events = rows.source.copy(), [program.event(), program.event()]
    release = program.gate(stream)
    program.ok("cuEventRecord", events[0], stream)
    launch(program, function, rows.arguments, stream, grid=(2, 1, 1))
    program.ok("cuEventRecord", events[1], stream)
    program.ok("cuMemsetD8Async", address_of(rows.source), 0, rows.source.size, stream)
    program.sim.run_all()
    assert (rows.target == 0xA5).all(), "ran before its stream got there"
    release()
    program.ok("cuStreamSynchronize", stream)
    assert (rows.target == source).all()
    assert program.ok("cuEventElapsedTime", *events) > 0


def test_arguments_are_read_at_the_call_and_memory_when_the_kernel_runs(program: Program) -> None:
    function, stream = load(program, COPY_ROWS), program.stream()
    right, wrong = make_rows(program, 4), make_rows(program, 4)
    release = program.gate(stream)
    arguments = Arguments(*right.arguments.values.tolist())
    launch(program, function, arguments, stream)
    arguments.values[:] = 0
    right.table[:4] = wrong.table[:4]  # the addresses of the sources
    release()
    program.ok("cuStreamSynchronize", stream)
    assert (right.target == wrong.source).all()


@pytest.mark.parametrize(
    ("kind", "value", "nbytes", "expected"),
    [
        ("i64", 5, 8, 10),
        ("i64", 1 << 40, 8, 1 << 41),
        ("i64", 2**31 - 1, 8, 2**32 - 2),  # 8 bytes wide, however small the value
        ("i64", -3, 8, -6),
        ("i32", -3, 4, -6),
        ("i32", 7, 4, 14),
        ("i32", 1 << 30, 4, -(1 << 31)),  # as on a GPU
    ],
)
def test_arguments_have_the_types_that_were_declared(
    program: Program, kind: str, value: int, nbytes: int, expected: int
) -> None:
    code = WRITE_WORD | {"parameters": [("target", "i64"), ("value", kind)], "constants": {"BYTES": nbytes}}
    function, stream, target = load(program, code), program.stream(), program.device(nbytes)
    launch(program, function, Arguments(int(target), value), stream)
    program.ok("cuStreamSynchronize", stream)
    assert program.bytes(target, nbytes).view(f"i{nbytes}")[0] == expected


def test_a_sum_is_computed_once(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not again in 64 bits for an assertion that Triton does not make."""
    from triton.runtime import interpreter as tritons

    code = WRITE_WORD | {"parameters": [("target", "i64"), ("value", "i32")], "constants": {"BYTES": 4}}
    function, stream, target = load(program, code), program.stream(), program.device(4)
    builder, computed = type(tritons.interpreter_builder), []
    binary_op = builder.binary_op

    def counted(self: Any, left: Any, right: Any, operation: Any) -> Any:
        computed.append(operation)
        return binary_op(self, left, right, operation)

    monkeypatch.setattr(builder, "binary_op", counted)
    launch(program, function, Arguments(int(target), 7), stream)
    program.ok("cuStreamSynchronize", stream)
    assert program.bytes(target, 4).view("i4")[0] == 14
    assert computed.count(np.add) == 1


def test_a_launch_that_cannot_be_is_refused(program: Program) -> None:
    function, stream, rows = load(program, COPY_ROWS), program.stream(), make_rows(program, 4)
    for shape in (
        {"grid": (0, 1, 1)},
        {"grid": (2**31, 1, 1)},
        {"grid": (1, 2, 1)},
        {"threads": (64, 1, 1)},
        {"threads": (128, 2, 1)},
        {"threads": (0, 1, 1)},
        {"shared_bytes": (48 << 10) + 1},
    ):
        assert launch(program, function, rows.arguments, stream, **shape) == R.CUDA_ERROR_INVALID_VALUE, shape
    assert program.status("cuLaunchKernel", function, 1, 1, 1, 128, 1, 1, 0, stream, 0, 0) == R.CUDA_ERROR_INVALID_VALUE
    assert launch(program, function, rows.arguments, 0x1234) == R.CUDA_ERROR_INVALID_HANDLE
    assert launch(program, 5, rows.arguments, stream) == R.CUDA_ERROR_INVALID_HANDLE
    with pytest.raises(NotImplementedError):
        program.status("cuLaunchKernel", function, 1, 1, 1, 128, 1, 1, 0, stream, rows.arguments.pointers, 16)
    with pytest.raises(SimulatorError, match="reads its arguments at 0x10"):
        program.status("cuLaunchKernel", function, 1, 1, 1, 128, 1, 1, 0, stream, 16, 0)
    assert program.sim.pending_operations() == 0


def test_a_gpu_with_fewer_threads_a_block_refuses_the_launch_and_says_so_before(program: Program) -> None:
    function, stream, rows = load(program, COPY_ROWS), program.stream(), make_rows(program, 4)
    assert program.ok("cuFuncGetAttribute", MAX_THREADS, function) == 1024
    program.sim.attributes[int(A.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)] = 64
    assert program.ok("cuFuncGetAttribute", MAX_THREADS, function) == 64
    assert launch(program, function, rows.arguments, stream) == R.CUDA_ERROR_INVALID_VALUE


def test_shared_memory_beyond_48_kib_is_asked_for_and_is_bounded(program: Program) -> None:
    function = load(program, COPY_ROWS | {"shared_bytes": 65_536})
    stream, rows = program.stream(), make_rows(program, 4)
    assert launch(program, function, rows.arguments, stream, shared_bytes=65_536) == R.CUDA_ERROR_INVALID_VALUE
    assert program.status("cuFuncSetAttribute", function, MAX_SHARED, 232_449) == R.CUDA_ERROR_INVALID_VALUE
    assert program.status("cuFuncSetAttribute", function, MAX_THREADS, 64) == R.CUDA_ERROR_INVALID_VALUE
    program.ok("cuFuncSetAttribute", function, MAX_SHARED, 65_536)
    assert program.ok("cuFuncGetAttribute", MAX_SHARED, function) == 65_536
    assert program.ok("cuFuncGetAttribute", F.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function) == 0
    assert program.status("cuFuncGetAttribute", F.CU_FUNC_ATTRIBUTE_NUM_REGS, function) == R.CUDA_ERROR_INVALID_VALUE
    assert launch(program, function, rows.arguments, stream, shared_bytes=65_536) == R.CUDA_SUCCESS
    program.ok("cuStreamSynchronize", stream)
    assert (rows.target == rows.source).all()
    launch(program, function, rows.arguments, stream, shared_bytes=16_384)
    assert program.status("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS
    assert program.sim.device_faults == ["copy_rows uses 65536 shared bytes, got 16384"]


def test_programs_run_in_no_order_that_can_be_relied_on(program: Program) -> None:
    seen: set[tuple[int, ...]] = set()

    class Recorder(interpreter.Interpreted):
        def run(self, _: int, order: Any, *rest: Any) -> None:
            assert rest
            seen.add(tuple(order))

    function, stream, rows = load(program, COPY_ROWS), program.stream(), make_rows(program, 4)
    program.sim.functions.get(int(function)).kernel = Recorder(lambda: None, "recorder")
    for _ in range(20):
        launch(program, function, rows.arguments, stream, grid=(3, 1, 1))
    program.ok("cuStreamSynchronize", stream)
    assert len(seen) > 3
    assert {tuple(sorted(order)) for order in seen} == {(0, 1, 2)}


# faults


UNPINNED = np.zeros(16, np.int64)
PAGES = np.zeros(8192, np.uint8)
PAGE = -(-address_of(PAGES) // 4096) * 4096


def wrong_addresses(program: Program) -> dict[str, int]:
    """Addresses of 8 bytes that a kernel must not touch."""
    freed = program.device(64)
    program.ok("cuMemFree", freed)
    program.ok("cuMemHostRegister", PAGE, 4096, 1)
    program.ok("cuMemHostUnregister", PAGE)
    return {
        "behind": int(program.device(64)) + 64,
        "before": int(program.device(64)) - 8,
        "partly behind": int(program.host(12)) + 8,
        "freed": int(freed),
        "unpinned": address_of(UNPINNED),
        "no longer registered": PAGE,
        "null": 0,
        "wild": 1 << 46,
    }


WRONG = ("behind", "before", "partly behind", "freed", "unpinned", "no longer registered", "null", "wild")


@pytest.mark.parametrize("verb", ["load", "store"])
@pytest.mark.parametrize("case", WRONG)
def test_an_address_that_the_gpu_cannot_reach_loses_the_context(program: Program, case: str, verb: str) -> None:
    function, stream, right = load(program, READ_WORD), program.stream(), int(program.device(8))
    wrong = wrong_addresses(program)[case]
    pair = (wrong, right) if verb == "load" else (right, wrong)
    assert launch(program, function, Arguments(*pair), stream) in (R.CUDA_SUCCESS, ILLEGAL_ADDRESS)
    assert program.status("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS
    assert program.status("cuMemAlloc", 8) == ILLEGAL_ADDRESS, "sticky"
    assert launch(program, function, Arguments(right, right), stream) == ILLEGAL_ADDRESS
    (fault,) = program.sim.device_faults
    verbed = {"load": "loaded", "store": "stored"}[verb]
    assert fault == f"read_word {verbed} 8 bytes at {wrong:#x}, which the GPU cannot reach"
    program.sim.check_guards()
    assert program.sim.violations == []


def test_one_wrong_address_among_many_is_found(program: Program) -> None:
    function, stream, rows = load(program, COPY_ROWS), program.stream(), make_rows(program, 8)
    rows.table[8 + 5] += 3 * 64  # the sixth target: its row would end behind the last one
    launch(program, function, rows.arguments, stream)
    assert program.status("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS
    (fault,) = program.sim.device_faults
    assert fault.startswith(f"copy_rows stored 8 bytes at {address_of(rows.target) + 512:#x},")
    program.sim.check_guards()


@pytest.mark.parametrize("nbytes", [64, 56])
def test_rows_in_several_allocations_are_reached_where_each_is_whole(program: Program, nbytes: int) -> None:
    function, stream, rows = load(program, COPY_ROWS), program.stream(), make_rows(program, 4)
    pieces = [program.device(64), program.host(64), program.device(64), program.device(nbytes)]
    rows.table[:4] = [int(piece) for piece in pieces]
    launch(program, function, rows.arguments, stream)
    whole = nbytes == 64
    assert program.status("cuStreamSynchronize", stream) == (R.CUDA_SUCCESS if whole else ILLEGAL_ADDRESS)
    assert (rows.target == 0xA5).all(), "fresh memory holds that, too"
    assert program.sim.device_faults == ([] if whole else [_at(int(pieces[3]) + 56)])


def _at(address: int) -> str:
    return f"copy_rows loaded 8 bytes at {address:#x}, which the GPU cannot reach"


def test_memory_of_another_device_is_not_reached() -> None:
    program = Program(device_count=2)
    function, stream, target = load(program, READ_WORD), program.stream(), program.host(8)
    program.ok("cuCtxPushCurrent", program.ok("cuDevicePrimaryCtxRetain", 1))
    foreign, pinned = int(program.device(8)), program.host(8, 7)
    program.ok("cuCtxPopCurrent")
    launch(program, function, Arguments(pinned, target), stream)
    program.ok("cuStreamSynchronize", stream)
    assert (program.bytes(target, 8) == 7).all(), "pinned memory is everybody's"
    launch(program, function, Arguments(foreign, target), stream)
    assert program.status("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS


def test_registered_memory_is_reached(program: Program) -> None:
    program.ok("cuMemHostRegister", PAGE, 4096, 1)
    assert int(program.ok("cuMemHostGetDevicePointer", PAGE, 0)) == PAGE
    function, stream, source = load(program, READ_WORD), program.stream(), program.device(8, 9)
    launch(program, function, Arguments(int(source), PAGE + 4088), stream)
    program.ok("cuStreamSynchronize", stream)
    assert (program.bytes(PAGE + 4088, 8) == 9).all()
    program.ok("cuMemHostUnregister", PAGE)


@pytest.mark.parametrize("offset", [4, 1])
def test_an_address_that_is_not_aligned_to_its_word_loses_the_context(program: Program, offset: int) -> None:
    function, stream = load(program, READ_WORD), program.stream()
    launch(program, function, Arguments(int(program.device(32)) + offset, program.host(8)), stream)
    assert program.status("cuStreamSynchronize", stream) == MISALIGNED_ADDRESS


@pytest.mark.parametrize(("alignment", "status"), [(8, R.CUDA_SUCCESS), (16, MISALIGNED_ADDRESS)])
def test_a_kernel_that_is_promised_more_alignment_than_there_is_loses_the_context(
    program: Program, alignment: int, status: Any
) -> None:
    function = load(program, COPY_ROWS | {"constants": {"WORDS": 8, "ROWS": 4, "ALIGNMENT": alignment}})
    stream, rows = program.stream(), make_rows(program, 4)
    rows.table[:4] = int(program.device(400, 7)) + 8 + 72 * np.arange(4)
    launch(program, function, rows.arguments, stream)
    assert program.status("cuStreamSynchronize", stream) == status


def test_memory_that_an_argument_points_to_must_not_be_freed_under_a_queued_launch(program: Program) -> None:
    function, stream, memory = load(program, READ_WORD), program.stream(), program.device(8)
    program.gate(stream)
    launch(program, function, Arguments(int(memory), program.host(8)), stream)
    with pytest.raises(SimulatorError, match="freed while a queued copy uses it"):
        program.status("cuMemFree", memory)


def test_a_kernel_that_the_interpreter_cannot_run_is_the_tests_fault(program: Program) -> None:
    function = load(program, WRITE_WORD | {"function": "broken", "parameters": [("target", "i64")], "constants": {}})
    stream = program.stream()
    release = program.gate(stream)
    launch(program, function, Arguments(int(program.device(8))), stream)
    release()
    with pytest.raises(SimulatorError, match=r"cannot run kernel_for_tests\.broken: AttributeError"):
        program.status("cuStreamSynchronize", stream)


# beside other things


def test_triton_is_left_as_it_was(program: Program) -> None:
    """Or whoever compiles with Triton in the same process would get the interpreter's functions."""
    import triton.language as tl
    from triton.runtime import interpreter as tritons

    def state() -> list[dict[str, Any]]:
        holders = [tl, tl.core, tl.math, tl.tensor, tl.dtype, tritons.interpreter_builder]
        return [{name: id(value) for name, value in vars(each).items()} for each in holders]

    function, stream, rows = load(program, COPY_ROWS), program.stream(), make_rows(program, 4)
    kernel = sys.modules["kernel_for_tests"]
    before, names = state(), set(vars(kernel))
    launch(program, function, rows.arguments, stream)
    program.ok("cuStreamSynchronize", stream)
    rows.table[0] = 0
    launch(program, function, rows.arguments, stream)
    assert program.status("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS
    after = state()
    grid = {"grid_dim", "grid_idx"}  # of the builder
    assert [set(a.items()) ^ set(b.items()) for a, b in zip(before, after, strict=True)][:-1] == [set()] * 5
    assert {name for name, _ in set(before[-1].items()) ^ set(after[-1].items())} <= grid
    assert set(vars(kernel)) == names


def test_kernels_of_several_drivers_and_threads_do_not_disturb_each_other() -> None:
    def work() -> None:
        program = Program()
        function, stream = load(program, COPY_ROWS), program.stream()
        for count in (3, 9):
            rows = make_rows(program, count)
            launch(program, function, rows.arguments, stream, grid=(2, 1, 1))
            program.ok("cuStreamSynchronize", stream)
            assert (rows.target == rows.source).all()

    in_threads(work, 4)
