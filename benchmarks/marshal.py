"""`python benchmarks/marshal.py`: what Python adds to a batch call, with driver functions that do nothing.

Needs no GPU, only the types of cuda.bindings. The time that the bindings spend on the lists inside a real call is not
in these figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvoffload.copiers import BatchCopier, StridedCopier
from kvoffload.driver import Driver, SourceOrder, binding_types
from kvoffload.driver.functions import REQUIRED
from kvoffload.planning.transfer_plan import Direction, TransferPlan
from kvoffload.terminal.console import Output
from kvoffload.terminal.options import whole

BARS_NS = {"descriptor": 25.0, "operation": 50.0}
_STREAM = 16  # any handle: no function reads it
_ADDRESS = 1 << 30  # any address


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Fill the descriptor tables and make the batch calls, with driver functions that do nothing: "
        "nanoseconds of Python per descriptor of cuMemcpyBatchAsync, of varying sizes, in chunks as the batch copier "
        "makes them, and per operation of cuMemcpy3DBatchAsync. No GPU is used."
    )
    parser.add_argument("--repeats", type=whole(1), default=50, metavar="N", help="timed rounds (default 50)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout instead of a table")
    arguments = parser.parse_args()
    output = Output(arguments.json)
    fields = measure(arguments.repeats)
    output.result(fields)
    show(fields, output)
    return 0


def show(fields: Mapping[str, Any], output: Output) -> None:
    lines = [
        (
            f"per {what}",
            f"{fields[f'{what}_ns']:.1f}",
            f"{fields[f'{what}_best_ns']:.1f}",
            f"{fields[f'{what}_bar_ns']:.0f}",
        )
        for what in BARS_NS
    ]
    output.table("Python's share of a batch call, ns", ("what", "median", "best", "bar"), lines)


def measure(repeats: int) -> dict[str, Any]:
    """Nanoseconds of Python per descriptor and per strided operation: medians and best."""
    driver = idle_driver()
    batch, folded = BatchCopier(driver), StridedCopier(driver, batched=True)
    flat, strided = _flat_plan(batch.segment_operations), _strided_plan(folded.segment_operations)
    batch_ns = _rounds(lambda: batch.stage(flat, SourceOrder.STREAM).submit(_STREAM, None), repeats, len(flat))
    strided_ns = _rounds(lambda: folded.stage(strided, SourceOrder.STREAM).submit(_STREAM, None), repeats, len(strided))
    fields: dict[str, Any] = {"descriptors": len(flat), "operations": len(strided), "repeats": repeats}
    for what, values in (("descriptor", batch_ns), ("operation", strided_ns)):
        fields[f"{what}_ns"] = statistics.median(values)
        fields[f"{what}_best_ns"] = min(values)
        fields[f"{what}_bar_ns"] = BARS_NS[what]
    return fields


def idle_driver() -> Driver:
    """A driver whose functions return success and do nothing; every allocation has the same address, without memory.

    Raises:
        CapabilityError: cuda-bindings, which has the argument types, is not installed.
    """
    result = (binding_types().CUresult.CUDA_SUCCESS,)

    def nothing(*_: object) -> tuple[object, ...]:
        return result

    names = (*REQUIRED, "cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync")
    api = SimpleNamespace(**dict.fromkeys(names, nothing) | {"cuMemAlloc": lambda _: (*result, _ADDRESS)})
    return Driver(api, raw=None, bindings_version=(13, 0), simulated=True)


def _rounds(work: Callable[[], object], repeats: int, count: int) -> list[float]:
    """Nanoseconds per element of each round; the first round, which makes the bindings' objects, is not counted."""
    work()
    values = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        work()
        values.append((time.perf_counter_ns() - begin) / count)
    return values


def _flat_plan(count: int) -> TransferPlan:
    random = np.random.default_rng(0)
    width = random.integers(1, 4096, count, dtype=np.uint64) * np.uint64(16)
    return _plan(random, width, np.ones(count, dtype=np.uint64))


def _strided_plan(count: int) -> TransferPlan:
    random = np.random.default_rng(0)
    width = np.full(count, 32768, dtype=np.uint64)
    return _plan(random, width, np.full(count, 64, dtype=np.uint64))


def _plan(random: np.random.Generator, width: Any, height: Any) -> TransferPlan:
    device, host = random.integers(1, 1 << 20, (2, len(width)), dtype=np.uint64) << np.uint64(16)
    pitch = np.full(len(width), 1 << 24, dtype=np.uint64)
    return TransferPlan(Direction.LOAD, device, host, width, height, pitch, width)


if __name__ == "__main__":
    sys.exit(main())
