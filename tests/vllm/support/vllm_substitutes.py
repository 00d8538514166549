"""kvoffload's manager, worker and spec with the constructors and the few attributes that vLLM's own tests use.

The tests look into vLLM's worker for two tensors of each kind, on the GPU and on the host. Ours has slots instead, in
which a group's blocks lie one after another: the worker here copies host tensors to slots before a transfer, and slots
to host tensors after it, and compares all slots that the transfer did not name.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, CanonicalKVCaches, GPULoadStoreSpec, Medium, TransferResult

import kvoffload
from kvoffload.engine.request import GroupTransfer
from kvoffload.errors import CapabilityError
from kvoffload.testing import SimulatedDriver
from kvoffload.vllm import KVOffloadManager, KVOffloadSpec, KVOffloadWorker

MADE: list[str] = []  # the classes of this module that were made since a test began


class Manager(KVOffloadManager):
    """Made as vLLM's CPUOffloadingManager is. Its public attributes, with what ours knows."""

    medium = Medium.CPU

    def __init__(
        self,
        num_chunks: int,
        cache_policy: Any = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
        info: Any = None,
    ) -> None:
        MADE.append("manager")
        if cache_policy_module_path is not None:
            raise CapabilityError("policies of vLLM cannot be used")
        super().__init__(
            num_chunks,
            policy=cache_policy,
            enable_events=enable_events,
            store_threshold=store_threshold,
            max_tracker_size=max_tracker_size,
            info=None if info is None else info.as_config_info(),
        )

    @property
    def counts(self) -> dict[bytes, int] | None:
        return self._offers._counts if self._offers.threshold >= 2 else None

    @property
    def stores_skipped_in_current_batch(self) -> int:
        return self._offers.skipped


class Spec(KVOffloadSpec):
    """Made as vLLM's CPUOffloadingSpec is: its eviction_policy is ours of the same name."""

    def __init__(self, config: Any) -> None:
        MADE.append("spec")
        policy = config.extra_config.pop("eviction_policy", None)
        if policy is not None:
            config.extra_config["kvoffload_policy"] = policy
        super().__init__(config)


class Worker(KVOffloadWorker):
    """Made as vLLM's CPUOffloadingWorker is, on the GPU that has the tensors, or on a simulated one."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        num_cpu_chunks: int,
        mmap_region: Any = None,
        canonical_layout: bool = False,
    ) -> None:
        MADE.append("worker")
        if canonical_layout:
            raise CapabilityError("canonical_layout is not supported")
        tensors = [each.tensor for each in kv_caches.tensors]
        self._region, self._on_gpu = mmap_region, tensors[0].is_cuda
        if self._on_gpu:
            self._device = kvoffload.open_device(tensors[0].device.index or 0)
            current_stream: Any = lambda: int(torch.cuda.current_stream().cuda_stream)  # noqa: E731
        else:
            self._device = kvoffload.open_device(backend=SimulatedDriver(seed=1))
            stream = self._device.stream()
            current_stream = lambda: stream  # noqa: E731
            self._memory = [_move(tensor, self._device) for tensor in tensors]
        super().__init__(
            kv_caches,
            device=self._device,
            blocks_per_chunk=blocks_per_chunk,
            num_chunks=num_cpu_chunks,
            current_stream=current_stream,
        )
        host = [
            torch.zeros((num_cpu_chunks, each.page_size_bytes * blocks_per_chunk), dtype=torch.int8)
            for each in kv_caches.tensors
        ]
        refs = kv_caches.group_data_refs
        self._planes = [[host[index] for index in dict.fromkeys(ref.tensor_idx for ref in group)] for group in refs]
        self._store_handler = SimpleNamespace(
            src_tensors=tensors, dst_tensors=host, layer_refs_per_group=refs, _transfers=[]
        )
        self._load_handler = SimpleNamespace(
            src_tensors=host, dst_tensors=tensors, layer_refs_per_group=refs, _transfers=[]
        )
        self._parts_of: dict[int, list[GroupTransfer]] = {}
        self._before: dict[int, Any] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        self._begin(job_id, self._store_handler, src_spec, dst_spec)
        return super().submit_store(job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False) -> bool:
        self._begin(job_id, self._load_handler, dst_spec, src_spec)
        return super().submit_load(job_id, src_spec, dst_spec, expedited)

    def _begin(self, job_id: int, handler: Any, gpu: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec) -> None:
        parts = self._parts_of[job_id] = self._by_group(gpu, host)
        for part in parts:
            for tensor, slots in self._places(part):
                slots[:] = tensor
        self._before[job_id] = self.engine.slots.copy()
        handler._transfers.append(SimpleNamespace(job_id=job_id))

    def _places(self, part: GroupTransfer) -> list[tuple[Any, Any]]:
        """For each slot, plane and block of a slot: the bytes in a host tensor, and in the slot."""
        factor, places = self.layout.blocks_per_slot, []
        group = self.layout.groups[part.group]
        each = [plane.block_bytes for plane in group.planes]
        for slot in np.asarray(part.slots).tolist():
            for number, (nbytes, tensor) in enumerate(zip(each, self._planes[part.group], strict=True)):
                for block in range(factor):
                    if group.slot_order == "block-major":
                        start = block * sum(each) + sum(each[:number])
                    else:
                        start = factor * sum(each[:number]) + block * nbytes
                    row = tensor[slot, block * nbytes : (block + 1) * nbytes].numpy().view(np.uint8)
                    places.append((row, self.engine.slots[slot, start : start + nbytes]))
        return places

    def get_finished(self) -> list[TransferResult]:
        if not self._on_gpu:
            self._device.simulator.run_all()
        results = super().get_finished()
        for result in results:
            parts, before = self._parts_of.pop(result.job_id), self._before.pop(result.job_id)
            named = {slot for part in parts for slot in np.asarray(part.slots).tolist()}
            others = [slot for slot in range(len(before)) if slot not in named]
            assert np.array_equal(before[others], self.engine.slots[others]), "a transfer has changed other slots"
            for part in parts:
                for tensor, slots in self._places(part):
                    tensor[:] = slots
            for handler in (self._store_handler, self._load_handler):
                handler._transfers = [each for each in handler._transfers if each.job_id != result.job_id]
        return results

    def shutdown(self) -> None:
        super().shutdown()
        if self._region is not None:
            self._region.cleanup()
            self._region = None


def _move(tensor: Any, device: Any) -> Any:
    """Let a tensor, in place, lie in memory of a simulated device, with the same content."""
    memory = device.allocate(tensor.numel() * tensor.element_size())
    view = device.simulator.exported(memory.address, memory.nbytes, memory)
    there = torch.from_numpy(view).view(tensor.dtype).reshape(tensor.shape)
    there.copy_(tensor)
    tensor.set_(there)
    return memory
