"""Decode with a paged KV cache in CuPy that is larger than its room on the device; compare every bit of the logits.

A small transformer serves conversations of several turns. After a turn it stores the conversation's blocks in pinned
host memory, and gives them to other conversations. Before the next turn it finds the prefix by its tokens and loads it
into other blocks, while other conversations still decode. It compares the time with a cache that holds everything, and
with computing the prefix again. Code shared with jax_paged_decode.py is in paged_decode/.

    python examples/cupy_paged_decode.py --layer-wise --plot timeline.png       # pip install 'kvoffload[cupy,plot]'
    python examples/cupy_paged_decode.py --device simulated                     # the same in numpy, without a GPU
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from paged_decode import model, report
from paged_decode.arrays import ArrayModel, NumpyBackend
from paged_decode.backend import Backend, Followed, Logits

import kvoffload


class CupyBackend:
    """CuPy on its own stream. Transfers and the stream follow each other; the host waits only for logits.

    `division`: see `ArrayModel`; with it the host also waits for each product that ranks add up.
    """

    def __init__(self, device: kvoffload.Device, size: model.ModelSize, division: model.Division | None = None) -> None:
        import cupy

        self._cupy = cupy
        self.devices: Sequence[kvoffload.Device] = [device]
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.stream: int | None = int(self._stream.ptr)
        with self._stream:
            self._model = ArrayModel(cupy, size, "float16", division)
        self.size = self._model.size
        self._cache: Any = None
        self._load: kvoffload.CacheJob | None = None  # the layers of the next step follow its parts

    def new_cache(self, num_blocks: int) -> kvoffload.KVLayout:
        self._cache = None  # free its memory before allocating as much again
        with self._stream:
            self._cache = self._cupy.zeros(self.size.cache_shape(num_blocks), dtype="float16")
        return kvoffload.KVLayout.from_stacked(self._cache, **self.size.description)

    def step(self, step: model.Step) -> Logits:
        with self._stream:
            logits: Logits = self._model.logits(self._cache, step, self._before_layer).get()
        self._load = None
        return logits

    def after(self) -> Any:
        return self._stream

    def follow(self, job: Followed) -> None:
        job.order_before(self._stream)

    def follow_by_layer(self, job: kvoffload.CacheJob) -> None:
        self._load = job

    def _before_layer(self, number: int) -> None:
        if self._load is not None:
            self._load.order_before(self._stream, part=number)


def main() -> int:
    options = report.command_line(__doc__, by_layer=True)
    if options.device == report.CUDA and find_spec("cupy") is None:
        print("CuPy is not installed: pip install 'kvoffload[cupy]', or try --device simulated", file=sys.stderr)
        return 2
    with report.store_is_ready(options), kvoffload.open_device(backend=options.device) as device:
        size = report.model_size(options)
        backend: Backend = NumpyBackend(device, size) if device.simulated else CupyBackend(device, size)
        return report.serve_and_compare(
            backend,
            options,
            left_out="CuPy, its stream, and concurrency",
        )


if __name__ == "__main__":
    sys.exit(main())
