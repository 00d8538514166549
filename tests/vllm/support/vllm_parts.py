"""A manager's and a worker's arguments, for tests of them alone; with vLLM's classes or those of `fake_vllm`."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import fake_vllm
import numpy as np

fake_vllm.install()

from vllm.v1.kv_offload.base import (  # noqa: E402
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec  # noqa: E402

import kvoffload  # noqa: E402
from kvoffload import CacheIndex  # noqa: E402
from kvoffload.testing import SimulatedDriver  # noqa: E402
from kvoffload.vllm import KVOffloadWorker  # noqa: E402

PAGE = 512


def keys(*numbers: int, group: int = 0) -> list[Any]:
    return [make_offload_key(b"%08d" % number, group) for number in numbers]


def request(name: str, *groups: list[Any]) -> Any:
    """A context in which the keys of each group end at 4 tokens, 8 tokens and so on."""
    context = ReqContext(name)
    for group in groups:
        for place, key in enumerate(group):
            context.set_offload_key_position(key, 4 * place + 4)
    return context


class Scheduler:
    """What vLLM's scheduler does with a manager, for one request after the other. Chunks have numbers, see `keys`."""

    def __init__(self, manager: Any) -> None:
        self.manager, self.requests = manager, 0

    @property
    def index(self) -> CacheIndex:
        assert isinstance(self.manager.index, CacheIndex)
        return self.manager.index

    def context(self, numbers: Sequence[int]) -> ReqContext:
        self.requests += 1
        context: ReqContext = request(f"request {self.requests}", keys(*numbers))
        self.manager.on_new_request(context)
        return context

    def look(self, numbers: Sequence[int], context: ReqContext | None = None) -> list[LookupResult]:
        context = self.context(numbers) if context is None else context
        return [self.manager.lookup(key, context) for key in keys(*numbers)]

    def begin_store(self, numbers: Sequence[int]) -> tuple[Any, ReqContext]:
        context = self.context(numbers)
        return self.manager.prepare_store(keys(*numbers), context), context

    def end_step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))


class FakeTensor:
    """What of a torch tensor is looked at: `(num_blocks, page)` bytes at an address."""

    def __init__(self, address: int, num_blocks: int) -> None:
        self._address, self.shape = address, (num_blocks, PAGE)
        self.device = SimpleNamespace(index=0)

    def data_ptr(self) -> int:
        return self._address

    def stride(self, axis: int) -> int:
        return (PAGE, 1)[axis]

    def element_size(self) -> int:
        return 1


class Rig:
    """A worker with two layers in each of `num_groups` groups, which lie over each other."""

    def __init__(
        self, num_groups: int = 1, num_blocks: int = 16, num_chunks: int = 8, seed: int = 0, **options: Any
    ) -> None:
        self.device = kvoffload.open_device(backend=SimulatedDriver(seed=seed))
        self.memory = self.device.allocate(2 * PAGE * num_blocks)
        self.blocks = self.device.simulator.view(self.memory.address, self.memory.nbytes).reshape(2, num_blocks, PAGE)
        self.blocks[:] = np.random.default_rng(5).integers(0, 256, self.blocks.shape)
        self.stream = self.device.stream()
        tensors = [FakeTensor(self.memory.address + layer * PAGE * num_blocks, num_blocks) for layer in range(2)]
        self.caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, PAGE) for tensor in tensors],
            [[CanonicalKVCacheRef(0, PAGE), CanonicalKVCacheRef(1, PAGE)] for _ in range(num_groups)],
        )
        arguments: dict[str, Any] = {"blocks_per_chunk": 1, "staging_bytes": 0, **options}
        self.worker = KVOffloadWorker(
            self.caches, device=self.device, num_chunks=num_chunks, current_stream=lambda: self.stream, **arguments
        )

    def finish(self) -> list[Any]:
        self.device.simulator.run_all()
        return self.worker.get_finished()

    def store(self, job: int, blocks: list[int], slots: list[int]) -> list[Any]:
        """Store blocks of group 0, and return what has ended."""
        self.worker.submit_store(job, gpu((0, blocks)), host(*slots))
        return self.finish()

    def load(self, job: int, blocks: list[int], slots: list[int]) -> list[Any]:
        self.worker.submit_load(job, host(*slots), gpu((0, blocks)))
        return self.finish()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()
        self.stream.close()
        self.memory.close()
        self.device.close()


def gpu(*groups: tuple[int, list[int]]) -> Any:
    """vLLM's description of blocks: of each group the position of its first block, and the blocks."""
    blocks = [block for _, each in groups for block in each]
    return GPULoadStoreSpec(blocks, [len(each) for _, each in groups], [first for first, _ in groups])


def host(*slots: int) -> Any:
    return CPULoadStoreSpec(list(slots))
