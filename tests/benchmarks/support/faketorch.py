"""As much of PyTorch and of vLLM's workers as `bench vllm` uses, in numpy on a simulated device.

Every operation happens at once. `FakeWorker` and `FakeBackend` copy when a transfer is submitted; `skip` leaves a block
of each transfer out, `fails` reports transfers as failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvoffload
from kvoffload_bench.vllm_classes import REBUILT, TransferClasses


class FakeTensor(np.ndarray[Any, Any]):
    """A tensor; on the GPU or not makes no difference."""

    def transpose(self, *axes: Any) -> FakeTensor:
        return tensor(self.swapaxes(*axes))

    def contiguous(self) -> FakeTensor:
        return tensor(np.ascontiguousarray(self))

    def any(self, dim: int) -> Any:  # type: ignore[override]
        return np.asarray(self).any(axis=dim)

    def to(self, where: Any, non_blocking: bool = False) -> FakeTensor:  # noqa: ARG002
        return tensor(np.array(self))

    def copy_(self, source: Any, non_blocking: bool = False) -> None:  # noqa: ARG002
        assert self.shape == source.shape
        self[...] = source

    def data_ptr(self) -> int:
        return int(self.ctypes.data)


def tensor(array: Any) -> FakeTensor:
    view: FakeTensor = np.asarray(array).view(FakeTensor)
    return view


class FakeEvent:
    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return True


class FakeStream(nullcontext[None]):
    def __init__(self, handle: int) -> None:
        super().__init__()
        self.cuda_stream = handle

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5


@dataclass
class FakeCaches:
    tensors: list[tuple[FakeTensor, int]]
    group_data_refs: list[list[tuple[int, int]]]


class FakeWorker:
    """vLLM's `CPUOffloadingWorker`."""

    skip = 0
    fails = False

    def __init__(self, kv_caches: FakeCaches, blocks_per_chunk: int, num_cpu_chunks: int) -> None:
        assert blocks_per_chunk == 1
        assert kv_caches.group_data_refs == [[(i, size) for i, (_, size) in enumerate(kv_caches.tensors)]]
        self._device = [plane for plane, _ in kv_caches.tensors]
        self._host = [tensor(np.zeros((num_cpu_chunks, size), np.int8)) for _, size in kv_caches.tensors]
        self._store_handler = SimpleNamespace(dst_tensors=self._host)
        self._ended: list[Any] = []

    def submit_store(self, job_id: int, device: Any, host: Any) -> None:
        self._copy(job_id, self._device, device[0], self._host, host)

    def submit_load(self, job_id: int, host: Any, device: Any) -> None:
        self._copy(job_id, self._host, host, self._device, device[0])

    def _copy(self, job_id: int, sources: Any, source: Any, targets: Any, target: Any) -> None:
        for a, b in zip(sources, targets, strict=True):
            b[target[self.skip :]] = a[source[self.skip :]]
        self._ended.append(SimpleNamespace(job_id=job_id, success=not self.fails))

    def get_finished(self) -> list[Any]:
        ended, self._ended = self._ended, []
        return ended

    def shutdown(self) -> None: ...


class FakeBackend:
    """vLLM's `DmaCopyBackend`."""

    skip = 0

    def init(self, gpu_caches: Any, cpu_caches: Any, device: Any, load_stream: Any, store_stream: Any) -> None:
        assert list(gpu_caches) == list(cpu_caches)
        assert load_stream is not store_stream
        assert device is not None
        self._gpu, self._cpu = list(gpu_caches.values()), list(cpu_caches.values())

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        assert (wait_event is not None) == is_store
        sources, targets = (self._gpu, self._cpu) if is_store else (self._cpu, self._gpu)
        for source, target in zip(sources, targets, strict=True):
            target[dst_blocks[self.skip :]] = source[src_blocks[self.skip :]]
        events_list.append((event_idx, FakeEvent()))

    def shutdown(self) -> None: ...


@contextmanager
def fake_classes(
    device: kvoffload.Device, *, worker: Any = FakeWorker, backend: Any = FakeBackend, expandable: bool = False
) -> Iterator[TransferClasses]:
    """PyTorch and vLLM; what was allocated is freed at the end."""
    with ExitStack() as stack:
        segments: list[dict[str, Any]] = []
        stack.enter_context(device.current())
        stream = FakeStream(device.driver.stream_create(0))
        stack.callback(device.driver.stream_destroy, stream.cuda_stream)

        def full(shape: tuple[int, ...], value: int, dtype: Any, device: Any) -> FakeTensor:
            found = tensor(np.full(shape, value, dtype)) if len(shape) < 3 else allocate(shape, dtype)
            found[...] = value
            assert device is not None
            return found

        def allocate(shape: tuple[int, ...], dtype: Any) -> FakeTensor:
            memory = device.empty(shape, dtype)
            stack.callback(memory.buffer.close)
            found = tensor(np.from_dlpack(memory))
            segments.append({"address": found.data_ptr(), "total_size": found.nbytes, "is_expandable": expandable})
            return found

        def randint(low: int, high: int, shape: Any, dtype: Any, device: Any, generator: Any) -> FakeTensor:
            assert device is not None
            return tensor(generator.numpy.integers(low, high, shape, dtype=dtype))

        cuda = SimpleNamespace(
            set_device=lambda _: None,
            synchronize=lambda _: None,
            empty_cache=lambda: None,
            memory_snapshot=lambda: segments,
            current_stream=lambda: stream,
            stream=lambda chosen: chosen,
            Stream=type("Stream", (FakeStream,), {"__init__": _new_stream}),
        )
        torch = SimpleNamespace(
            int8=np.int8,
            int64=np.int64,
            full=full,
            randint=randint,
            stack=lambda each: tensor(np.stack(each)),
            from_numpy=tensor,
            Generator=lambda device: FakeGenerator(),  # noqa: ARG005
            Event=FakeEvent,
            device=lambda kind, index: (kind, index),
            cuda=cuda,
        )
        base = SimpleNamespace(
            CanonicalKVCaches=FakeCaches,
            CanonicalKVCacheTensor=lambda plane, size: (plane, size),
            CanonicalKVCacheRef=lambda number, size: (number, size),
            GPULoadStoreSpec=lambda blocks, sizes, first: (blocks, sizes, first),
        )
        yield TransferClasses(
            torch,
            base,
            SimpleNamespace(CPULoadStoreSpec=lambda slots: slots),
            SimpleNamespace(CPUOffloadingWorker=worker),
            SimpleNamespace(DmaCopyBackend=backend),
            REBUILT,
        )


def _new_stream(self: FakeStream, where: Any, priority: int = 0) -> None:  # noqa: ARG001
    FakeStream.__init__(self, 0)


class FakeGenerator:
    def manual_seed(self, seed: int) -> None:
        self.numpy = np.random.default_rng(seed)
