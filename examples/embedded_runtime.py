"""kvoffload inside a runtime that creates its own context, with several threads and a stream for each.

Every worker computes on its own stream (here it fills a block with a number), stores the block, overwrites it, loads it
back, and reads it. Stores are ordered on the GPU; the host waits only for loads.
Runs on a GPU if there is one, else on the simulated device, which has the same driver functions.

    python examples/embedded_runtime.py
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import kvoffload

WORKERS, TURNS, PLANES, BLOCK_BYTES = 4, 8, 16, 4096


def find_driver() -> Any:
    """The CUDA driver functions of this machine, or the simulator's: same names, same arguments."""
    from cuda.bindings import driver

    from kvoffload.testing import SimulatedDriver

    try:
        found = driver.cuInit(0)[0] == driver.CUresult.CUDA_SUCCESS and driver.cuDeviceGetCount()[1] > 0
    except RuntimeError:  # no driver library
        found = False
    if found:
        return driver
    simulated = SimulatedDriver()
    simulated.cuInit(0)
    return simulated


class Runtime:
    """Your runtime: it already has a context, and streams on it."""

    def __init__(self, driver: Any, bindings_version: tuple[int, int]) -> None:
        self.driver = driver
        device = self.call("cuDeviceGet", 0)
        parameters = (0, device) if bindings_version < (13, 0) else (None, 0, device)
        self.context = self.call("cuCtxCreate", *parameters)  # current in this thread from here on
        self.streams = [self.call("cuStreamCreateWithPriority", 1, 0) for _ in range(WORKERS)]

    def call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self.driver, name)(*arguments)
        assert code == 0, f"{name}: {code}"
        return values[0] if len(values) == 1 else values

    def close(self) -> None:
        self.call("cuCtxDestroy", self.context)


def work(number: int, runtime: Runtime, engine: kvoffload.OffloadEngine, planes: list[kvoffload.Plane]) -> int:
    """One worker, which owns block and slot `number`. Returns how many turns came back right."""
    runtime.call("cuCtxPushCurrent", runtime.context)  # current in this thread; kvoffload's calls do not change that
    stream, right = runtime.streams[number], 0

    def compute(value: int) -> None:
        for plane in planes:
            address = plane.address + number * plane.block_stride
            runtime.call("cuMemsetD8Async", address, value, BLOCK_BYTES, stream)

    for turn in range(TURNS):
        value = 1 + number * TURNS + turn
        compute(value)
        engine.store([number], [number], after=stream).order_before(stream)
        compute(0)
        load = engine.load([number], [number], after=stream)
        load.wait()
        result = np.empty(BLOCK_BYTES, dtype=np.uint8)
        plane = planes[turn % PLANES]
        address = plane.address + number * plane.block_stride
        runtime.call("cuMemcpyDtoH", result.__array_interface__["data"][0], address, BLOCK_BYTES)
        right += bool((result == value).all())
    runtime.call("cuCtxPopCurrent")
    return right


def main() -> None:
    driver = find_driver()
    simulated = hasattr(driver, "simulated")
    if simulated:
        version = driver.bindings_version
    else:
        import cuda.bindings

        major, minor = cuda.bindings.__version__.split(".")[:2]
        version = (int(major), int(minor))
    runtime = Runtime(driver, version)
    with kvoffload.open_device(0, backend=driver if simulated else "cuda", context=runtime.context) as device:
        planes = device.allocate_blocks(WORKERS, planes=PLANES, block_bytes=BLOCK_BYTES)
        layout = kvoffload.KVLayout([planes])
        with kvoffload.OffloadEngine(layout, device=device, num_slots=WORKERS) as engine:
            with ThreadPoolExecutor(WORKERS) as threads:
                right = sum(threads.map(lambda number: work(number, runtime, engine, planes), range(WORKERS)))
            loads = engine.statistics().load.jobs
            print(f"{device}: {right} of {WORKERS * TURNS} turns came back right; {loads} loads")
            assert right == WORKERS * TURNS
    runtime.close()


if __name__ == "__main__":
    main()
