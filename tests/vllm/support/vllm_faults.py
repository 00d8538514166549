"""Defects for tests of the tests: each is a spec whose worker or manager does one thing wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    TransferResult,
)
from vllm_worker import WorkerSpec

import kvoffload
from kvoffload.vllm import KVOffloadManager, KVOffloadWorker


class _SwapsSlots(KVOffloadWorker):
    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        src_spec.block_ids[:2] = src_spec.block_ids[:2][::-1]
        return super().submit_load(job_id, src_spec, dst_spec, expedited)


class _FinishesEarly(KVOffloadWorker):
    def get_finished(self) -> list[TransferResult]:
        ended, self._transfers = self._transfers, {}
        return [TransferResult(job_id, success=True) for job_id in ended]


class _DoesNotWait(KVOffloadWorker):
    def wait(self, job_ids: set[int]) -> None:
        pass


class _HidesFailures(KVOffloadWorker):
    def take_failed_slots(self) -> set[int]:
        self._bad_slots.clear()
        super().take_failed_slots()
        return set()


class _SpecOfWorker(WorkerSpec):
    worker: type[KVOffloadWorker]

    def get_worker(self, kv_caches: CanonicalKVCaches) -> KVOffloadWorker:
        made = super().get_worker(kv_caches)
        made.__class__ = self.worker
        return made


class SwappedSlots(_SpecOfWorker):
    """A load reads its first two slots in the wrong order."""

    worker = _SwapsSlots


class EarlyFinish(_SpecOfWorker):
    """Transfers are reported as ended at once."""

    worker = _FinishesEarly


class DroppedHostWait(_SpecOfWorker):
    """`wait` returns at once."""

    worker = _DoesNotWait


class HiddenFailure(_SpecOfWorker):
    """A store that has failed is reported as any other."""

    worker = _HidesFailures


class DroppedStreamWait(WorkerSpec):
    """Transfers do not wait for what the model has queued."""

    def current_stream(self, kv_caches: CanonicalKVCaches) -> Callable[[], Any]:
        return lambda: kvoffload.NO_WAIT


class StaleWindows(WorkerSpec):
    """After a reset, chunks of groups with a sliding window are stored as vLLM offers them."""

    def get_manager(self) -> OffloadingManager:
        manager = super().get_manager()
        assert isinstance(manager, KVOffloadManager)
        manager._windowed = frozenset()
        return manager
