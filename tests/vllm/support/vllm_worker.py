"""A worker of vLLM's with a simulated GPU: a KV cache, a stream on which a model reads and writes it, a connector.

The model's work is queued on the stream as kernels and runs when the simulated device gets there; so a transfer that
does not wait for it, or that it does not wait for, moves or meets other bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm_model import Bytes, Sequence, content

import kvoffload
from kvoffload.internal.waiting import wait_until
from kvoffload.testing import SimulatedDriver
from kvoffload.vllm import KVOffloadSpec

WORKERS: dict[int, Any] = {}  # by the address of the KV cache, for the spec, which vLLM makes


@dataclass(frozen=True)
class GroupShape:
    """A group of layers that share a block table.

    Attributes:
        layers: their number.
        window: tokens that attention reaches back; 0: all.
    """

    layers: int
    window: int = 0


@dataclass(frozen=True)
class Shape:
    """The KV cache. A block holds `block_size` tokens of `token_bytes` bytes in each layer."""

    groups: tuple[GroupShape, ...]
    num_blocks: int
    block_size: int = 4
    token_bytes: int = 64

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @property
    def most_layers(self) -> int:
        return max(group.layers for group in self.groups)


class GpuWorker:
    """One rank. The groups lie over each other in one allocation, as vLLM lays them: no block is of two groups.

    Attributes:
        device, stream: the simulated GPU, and the stream of its model.
        wrong: what the model has read that it had not written.
        checked: blocks that it has compared.
    """

    def __init__(self, shape: Shape, rank: int, seed: int) -> None:
        self.shape, self.rank = shape, rank
        self.device = kvoffload.open_device(backend=SimulatedDriver(seed=seed))
        self.stream = self.device.stream()
        self.memory = self.device.allocate(shape.page_bytes * shape.num_blocks * shape.most_layers)
        whole = self.device.simulator.view(self.memory.address, self.memory.nbytes)
        whole[:] = 0xEE
        self.cache: Bytes = whole.reshape(shape.most_layers, shape.num_blocks, shape.block_size, shape.token_bytes)
        WORKERS[self.memory.address] = self
        self.wrong: list[str] = []
        self.checked = 0
        self.connector: Any = None
        self._ended = [0]

    @property
    def stream_handle(self) -> int:
        return self.stream.handle

    def tensors(self, layer_names: list[list[str]]) -> dict[str, torch.Tensor]:
        """vLLM's name of each layer, and its part of the KV cache."""
        heads, half = 2, self.shape.token_bytes // 8
        shape = (self.shape.num_blocks, 2, self.shape.block_size, heads, half // heads * 2)
        return {
            name: torch.from_numpy(self.cache[place].reshape(-1).view(np.float16)).reshape(shape)
            for names in layer_names
            for place, name in enumerate(names)
        }

    def open_device(self, of_spec: Callable[[], kvoffload.Device]) -> kvoffload.Device:
        """The device for a spec, which would open `of_spec()`."""
        return self.device

    def current_stream(self, of_spec: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
        """The same for the function that returns the stream of the model."""
        return lambda: self.stream

    def current(self) -> AbstractContextManager[object]:
        """What vLLM's model runner has around its work."""
        return nullcontext()

    def queue_model(self, name: str, sequence: Sequence, tables: list[list[int]], start: int, end: int) -> None:
        """Queue a step of a request: the model reads the tokens before `start`, and writes those up to `end`."""
        spans = [(self.memory.address, self.memory.nbytes)]
        prefixes = sequence.prefixes(end)

        def step() -> None:
            for number, (group, table) in enumerate(zip(self.shape.groups, tables, strict=True)):
                right = content(prefixes, group.layers, self.shape.token_bytes, 1000 * self.rank + number)
                first = max(0, start - group.window + 1) if group.window else 0
                self._read(f"{name}, group {number}", group, table, right, first, start)
                self._write(group, table, right, start, end)

        with self.device.current():
            self.device.simulator.enqueue(self.stream.handle, step, reads=spans, writes=spans)

    def queue_end(self, step: int) -> None:
        """Queue the note that a step has ended."""
        with self.device.current():
            self.device.simulator.enqueue(self.stream.handle, lambda: self._ended.append(step))

    def wait_for_step(self, step: int) -> None:
        """Wait until a step has ended; later ones may go on."""
        wait_until(lambda: self._ended[-1] >= step or self.stream.done, None, f"step {step}")

    def run_all(self) -> None:
        """Let the GPU come to the end of what is queued."""
        self.device.simulator.run_all()

    def synchronize(self) -> None:
        """Wait for the model; `wrong` and `checked` have all of it then."""
        self.stream.synchronize()

    def fail_call(self, name: str, number: int) -> None:
        """Let a driver call fail."""
        self.device.simulator.faults.fail_call(name, number)

    def clear_failures(self) -> None:
        self.device.simulator.faults.clear()

    def _read(self, name: str, group: GroupShape, table: list[int], right: Bytes, first: int, end: int) -> None:
        size = self.shape.block_size
        for place in range(first // size, -(-end // size)):
            begin, stop = max(first, place * size), min(end, (place + 1) * size)
            found = self.cache[: group.layers, table[place], begin - place * size : stop - place * size]
            self.checked += 1
            if not np.array_equal(found, right[begin:stop].swapaxes(0, 1)):
                self.wrong.append(f"worker {self.rank}: {name} reads wrong bytes in block {place} ({table[place]})")

    def _write(self, group: GroupShape, table: list[int], right: Bytes, start: int, end: int) -> None:
        size = self.shape.block_size
        for place in range(start // size, -(-end // size)):
            begin, stop = max(start, place * size), min(end, (place + 1) * size)
            if not table[place]:
                continue  # outside the window already
            target = self.cache[: group.layers, table[place], begin - place * size : stop - place * size]
            target[:] = right[begin:stop].swapaxes(0, 1)

    def close(self) -> None:
        if self.connector is not None:
            self.connector.shutdown()
        self.stream.close()
        WORKERS.pop(self.memory.address, None)
        self.memory.close()
        self.device.close()


class WorkerSpec(KVOffloadSpec):
    """KVOffloadSpec on the GPU of the worker whose KV cache it gets."""

    def open_device(self, kv_caches: CanonicalKVCaches) -> kvoffload.Device:
        device: kvoffload.Device = _worker_of(kv_caches).open_device(partial(super().open_device, kv_caches))
        return device

    def current_stream(self, kv_caches: CanonicalKVCaches) -> Callable[[], Any]:
        function: Callable[[], Any] = _worker_of(kv_caches).current_stream(partial(super().current_stream, kv_caches))
        return function


def _worker_of(kv_caches: CanonicalKVCaches) -> Any:
    return WORKERS[min(tensor.tensor.data_ptr() for tensor in kv_caches.tensors)]
