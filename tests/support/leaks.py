"""What our own driver calls have created and not destroyed: on a GPU, too, and whatever other programs do there."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import kvoffload

PAIRS = {  # named as by the simulator's `leaks`
    "device_allocations": ("cuMemAlloc", "cuMemFree"),
    "registered_ranges": ("cuMemHostRegister", "cuMemHostUnregister"),
    "streams": ("cuStreamCreateWithPriority", "cuStreamDestroy"),
    "events": ("cuEventCreate", "cuEventDestroy"),
    "modules": ("cuModuleLoadData", "cuModuleUnload"),
    "allocation_handles": ("cuMemRetainAllocationHandle", "cuMemRelease"),
}


def count_held(device: kvoffload.Device) -> Counter[str]:
    """How many of each exist of those that are created from now on; changes as the device is used."""
    held: Counter[str] = Counter()

    def counted(kind: str, by: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                result = function(*arguments)
                held[kind] += 0 if result[0] else by
                return result

            return call

        return wrap

    for kind, names in PAIRS.items():
        for name, by in zip(names, (1, -1), strict=True):
            if device.driver.has(name):
                device.driver.intercept(name, counted(kind, by))
    return held


def leaked(device: kvoffload.Device, use: Callable[[], None], rounds: int = 4) -> set[str]:
    """Kinds of which each of several uses, after a first one, leaves more than before.

    One that leaves more now and then has needed more at a time, and keeps it for the next: no leak. How much is needed
    at a time depends on the GPU's other users, so of 3 rounds each leaves more by chance in one case of 24, of 6 in one
    of 5,040.
    """
    held, left = count_held(device), []
    for _ in range(1 + rounds):
        use()
        gc.collect()
        device.reclaim()
        left.append(dict(held))
    return {kind for kind in PAIRS if all(after.get(kind, 0) > before.get(kind, 0) for before, after in pairwise(left))}
