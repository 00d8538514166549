"""A worker of vLLM's on a real GPU: the KV cache is a tensor, the model's work is PyTorch's kernels on a stream.

What the model reads is compared on the GPU, in the order of its stream, and a verdict is copied to the host behind it.
Before some of its work the GPU waits for a while, so that transfers are submitted while the model is under way.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from vllm_model import Sequence, content
from vllm_worker import WORKERS, GroupShape, Shape

import kvoffload

_LONGEST_WAIT = 400_000  # cycles of the GPU, about 0.2 ms
_WAITS = 0.5  # how often


class TorchWorker:
    """One rank; see `vllm_worker.GpuWorker`, whose interface this is. All ranks are on the first GPU.

    Attributes:
        stream: of the model; PyTorch's current one in `current`.
        wrong: what the model has read that it had not written, as far as the host knows.
        checked: blocks that it has compared.
    """

    def __init__(self, shape: Shape, rank: int, seed: int) -> None:
        self.shape, self.rank = shape, rank
        self._where = torch.device("cuda", 0)
        self.stream = torch.cuda.Stream(self._where)
        self._random = random.Random(seed)
        size = (shape.most_layers, shape.num_blocks * shape.block_size, shape.token_bytes)
        self._cache = torch.full(size, 0xEE, dtype=torch.uint8, device=self._where)
        torch.cuda.synchronize(self._where)
        WORKERS[self._cache.data_ptr()] = self
        self.device: kvoffload.Device | None = None
        self.wrong: list[str] = []
        self.checked = 0
        self.connector: Any = None
        self._known: dict[tuple[Sequence, int], torch.Tensor] = {}
        self._verdicts: list[tuple[str, Any]] = []
        self._steps: deque[tuple[int, Any, list[tuple[str, Any]]]] = deque()

    @property
    def stream_handle(self) -> int:
        return int(self.stream.cuda_stream)

    def tensors(self, layer_names: list[list[str]]) -> dict[str, torch.Tensor]:
        heads, half = 2, self.shape.token_bytes // 8
        shape = (self.shape.num_blocks, 2, self.shape.block_size, heads, half // heads * 2)
        return {
            name: self._cache[place].view(torch.float16).reshape(shape)
            for names in layer_names
            for place, name in enumerate(names)
        }

    def open_device(self, of_spec: Callable[[], kvoffload.Device]) -> kvoffload.Device:
        """That of the spec; it is closed with the worker, while vLLM's processes leave that to their end."""
        self.device = of_spec()
        return self.device

    def current_stream(self, of_spec: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
        return of_spec()

    def current(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(self.stream)
        return context

    def queue_model(self, name: str, sequence: Sequence, tables: list[list[int]], start: int, end: int) -> None:
        if self._random.random() < _WAITS:
            torch.cuda._sleep(self._random.randrange(_LONGEST_WAIT))
        size = self.shape.block_size
        for number, (group, table) in enumerate(zip(self.shape.groups, tables, strict=True)):
            right = self._content(sequence, number, end)
            first = max(0, start - group.window + 1) if group.window else 0
            if start > first:
                self._read(f"{name}, group {number}", group, table, right, np.arange(first, start))
            written = np.arange(start, end)
            self._write(group, table, right, written[np.array(table)[written // size] != 0])

    def _content(self, sequence: Sequence, number: int, end: int) -> torch.Tensor:
        """(layers, tokens, token_bytes): what a group holds of a request's tokens, up to `end` or more. Kept."""
        known = self._known.get((sequence, number))
        begin = 0 if known is None else known.shape[1]
        if begin < end:
            layers, salt = self.shape.groups[number].layers, 1000 * self.rank + number
            values = content(sequence.prefixes(end)[begin:], layers, self.shape.token_bytes, salt)
            more = self._moved(values.swapaxes(0, 1))
            known = more if known is None else torch.cat([known, more], dim=1)
            self._known[sequence, number] = known
        assert known is not None
        return known

    def _moved(self, array: Any) -> torch.Tensor:
        """A copy on the GPU, made in the order of the stream; the host does not wait."""
        return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(self._where, non_blocking=True)

    def _places(self, table: list[int], positions: Any) -> torch.Tensor:
        size = self.shape.block_size
        return self._moved(np.array(table)[positions // size] * size + positions % size)

    def _read(self, name: str, group: GroupShape, table: list[int], right: torch.Tensor, positions: Any) -> None:
        found = self._cache[: group.layers].index_select(1, self._places(table, positions))
        wrong = (found != right[:, positions[0] : positions[-1] + 1]).any()
        verdict = torch.empty((), dtype=torch.bool, pin_memory=True)
        verdict.copy_(wrong, non_blocking=True)
        self._verdicts.append(
            (f"worker {self.rank}: {name} reads wrong bytes in tokens up to {positions[-1]}", verdict)
        )
        self.checked += len(np.unique(positions // self.shape.block_size))

    def _write(self, group: GroupShape, table: list[int], right: torch.Tensor, positions: Any) -> None:
        if len(positions):
            values = right.index_select(1, self._moved(positions))
            self._cache[: group.layers].index_copy_(1, self._places(table, positions), values)

    def queue_end(self, step: int) -> None:
        event = torch.cuda.Event()
        event.record(self.stream)
        self._steps.append((step, event, self._verdicts))
        self._verdicts = []

    def wait_for_step(self, step: int) -> None:
        while self._steps and self._steps[0][0] <= step:
            _, event, verdicts = self._steps.popleft()
            event.synchronize()
            self.wrong += [text for text, verdict in verdicts if verdict]

    def run_all(self) -> None:
        torch.cuda.synchronize(self._where)

    def synchronize(self) -> None:
        self.stream.synchronize()
        if self._steps:
            self.wait_for_step(self._steps[-1][0])

    def fail_call(self, name: str, number: int) -> None:
        raise NotImplementedError("no driver call fails on a GPU: leave `Setting.fail` at 0")

    def clear_failures(self) -> None:
        """None has been asked for."""

    def close(self) -> None:
        torch.cuda.synchronize(self._where)
        if self.connector is not None:
            self.connector.shutdown()
        WORKERS.pop(self._cache.data_ptr(), None)
        if self.device is not None:
            self.device.close()
