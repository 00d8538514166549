"""KVOffloadConnector: vLLM's OffloadingConnector, which also reports failed transfers.

Failed slots travel from a worker to the scheduler in the metadata that vLLM sends back after each step. Requests whose
loads failed travel in `failed_recving`: vLLM computes them again or fails them, by kv_load_failure_policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import ForwardContext
from vllm.v1.outputs import KVConnectorOutput

from kvoffload.vllm.identity import making_connector
from kvoffload.vllm.manager import KVOffloadManager
from kvoffload.vllm.worker import KVOffloadWorker


@dataclass
class WorkerMetadata(OffloadingWorkerMetadata):
    """A worker's message to the scheduler; `failed_slots` are the slots of its failed transfers."""

    failed_slots: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        both = super().aggregate(other)
        failed = self.failed_slots | getattr(other, "failed_slots", set())
        return WorkerMetadata(both.completed_jobs, both.transfer_stats, failed)


class KVOffloadConnector(OffloadingConnector):
    """vLLM's OffloadingConnector, with the same arguments, for a `KVOffloadSpec`. If a store fails, its keys stay
    missing. If a load fails, vLLM computes the request again or fails it, by kv_load_failure_policy; a load that it
    awaits within its step (sync_load_budget_bytes) raises TransferError in the worker instead.

    Raises:
        TypeError: from `register_kv_caches`, if the configured spec is not `KVOffloadSpec`.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with making_connector(vllm_config, kv_cache_config):
            super().__init__(vllm_config, role, kv_cache_config)
        self._loads: dict[str, int] = {}  # the load of each request that has one

    # a worker's side

    @property
    def _worker(self) -> KVOffloadWorker:
        assert self.connector_worker is not None
        worker = self.connector_worker.worker
        if not isinstance(worker, KVOffloadWorker):
            raise TypeError(
                f'KVOffloadConnector needs spec_name="KVOffloadSpec" and spec_module_path="kvoffload.vllm" in '
                f"kv_connector_extra_config, got a worker of type {type(worker).__name__}"
            )
        return worker

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        self._worker.reports_failures = True

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, OffloadingConnectorMetadata)
        self._loads.update((load.req_id, job_id) for job_id, load in metadata.load_jobs.items() if not load.sync)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        failed = self._worker.take_failed_loads()
        results.failed_recving.update(
            request for request in results.finished_recving if self._loads.pop(request, None) in failed
        )
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        metadata = super().build_connector_worker_meta()
        if self.connector_worker is None:
            return metadata
        failed = self._worker.take_failed_slots()
        if metadata is None:
            return WorkerMetadata(failed_slots=failed) if failed else None
        return WorkerMetadata(metadata.completed_jobs, metadata.transfer_stats, failed)

    # the scheduler's side

    def on_new_request(self, request: Any) -> None:
        manager = self.scheduler.manager
        if isinstance(manager, KVOffloadManager):  # which sees only vLLM's ReqContext, and that has no session
            manager.named = {request.request_id: getattr(request, "session_id", None)}
        super().on_new_request(request)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata):
            manager = self.scheduler.manager
            assert isinstance(manager, KVOffloadManager)
            manager.note_failed(metadata.failed_slots)
        super().update_connector_output(connector_output)
