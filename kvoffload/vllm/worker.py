"""KVOffloadWorker: a worker's side of the offloading, an OffloadEngine over the worker's KV cache.

Order. A transfer waits on the GPU for work that vLLM queued before on its current stream: so a store reads blocks after
the model wrote them, and a load overwrites blocks after the model read or zeroed them. vLLM's host waits for loads (it
computes a request only after `get_finished` has reported its load, or `wait` has returned) and for stores whose blocks
it is about to give away.

Failures. vLLM 0.33 asserts that every transfer succeeds, so `get_finished` reports none as failed:
    1. A store: its slots are bad until another store into them succeeds. KVOffloadConnector tells the scheduler, which
       then has no key for them. Without that connector, a load from a bad slot fails.
       With a codec, the slots of a store that a block does not fit are bad in the same way, and not the others.
    2. A load: KVOffloadConnector tells the scheduler, which computes the request again or fails it, by
       kv_load_failure_policy. Without that connector `get_finished` raises, which ends the worker.
    3. A load that vLLM awaits within its step (`expedited`): `wait` raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvoffload.device.device import Device
from kvoffload.device.shared_slots import SharedSlots
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job
from kvoffload.engine.request import GroupTransfer
from kvoffload.errors import CapacityError, DriverError, TransferError
from kvoffload.internal.log import LOGGER
from kvoffload.internal.types import StreamLike
from kvoffload.layout.coding import CodecName
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Plane
from kvoffload.pool.shared_pool import SharedPool

_CONNECTOR = (
    'vLLM\'s OffloadingConnector cannot report it; give kv_connector="KVOffloadConnector" and '
    'kv_connector_module_path="kvoffload.vllm", with which the request is computed again'
)


@dataclass(slots=True)
class _Transfer:
    """A transfer of vLLM's.

    Attributes:
        job_id: vLLM's number.
        ids: numbers of its slots.
        job: None if it was refused.
        error: why it was refused, or None.
    """

    job_id: int
    is_load: bool
    urgent: bool
    ids: npt.NDArray[np.int32]
    job: Job | None = None
    error: BaseException | None = None

    @property
    def slots(self) -> set[int]:
        return set(self.ids.tolist())

    @property
    def ended(self) -> bool:
        return self.job is None or self.job.finished

    @property
    def failure(self) -> BaseException | None:
        return self.error if self.job is None else self.job.error


class KVOffloadWorker(OffloadingWorker):
    """Moves blocks of a worker's KV cache to slots of pinned memory and back. See vLLM's `OffloadingWorker`.

    Args:
        device: the GPU of the KV caches. `shutdown` does not close it.
        codec: of the slots, see `KVLayout`. Give another than "raw" with a KVOffloadConnector only.
        current_stream: returns the stream on which vLLM queues its work.
        windowed: a group's blocks are freed while a request runs.
        host: gives the memory of the slots, for the layout; the worker closes it. None: memory of this process alone.

    Attributes:
        reports_failures: KVOffloadConnector sets it, and calls `take_failed_loads` and `take_failed_slots`.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        *,
        device: Device,
        blocks_per_chunk: int,
        num_chunks: int,
        current_stream: Callable[[], StreamLike],
        codec: CodecName = "raw",
        windowed: bool = False,
        host: Callable[[KVLayout], SharedSlots | SharedPool] | None = None,
        **engine_options: Any,
    ) -> None:
        self.reports_failures = False
        self._blocks_per_chunk, self._windowed = blocks_per_chunk, windowed
        self._current_stream = current_stream
        self._transfers: dict[int, _Transfer] = {}
        self._bad_slots: set[int] = set()
        self._failed_slots: set[int] = set()
        self._failed_loads: set[int] = set()
        self.layout = layout_of(kv_caches, blocks_per_chunk).with_codec(codec)
        self._host = None if host is None else host(self.layout)
        try:
            memory = {"num_slots": num_chunks} if self._host is None else {"host_memory": self._host.host_memory}
            self.engine = OffloadEngine(self.layout, device=device, **memory, **engine_options)
        except BaseException:
            if self._host is not None:
                self._host.close()
            raise

    def offer(self, name: str, note: str) -> None:
        """Let the scheduler's process map the slots, which must be `SharedSlots`; see `SharedSlots.offer`."""
        assert isinstance(self._host, SharedSlots)
        self._host.offer(name, note=note)

    # transfers ----------------------------------------------------------------------------------------------------

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy blocks to slots, after the work that vLLM has queued so far. Returns True at once, unless
        `max_in_flight` transfers are unfinished: then it first waits for the oldest. If the driver refuses the copy,
        or a chunk lacks a block, that counts as a failed transfer.
        """
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        transfer = _Transfer(job_id, False, False, dst_spec.block_ids)
        # vLLM 0.33 leaves out blocks that are behind a window and another request's by now. Those in the middle of a
        # chunk would move the ones that follow. Those at its begin are read by a request that ends a token earlier.
        if self._windowed and len(src_spec.block_ids) < len(dst_spec.block_ids) * self._blocks_per_chunk:
            transfer.error = TransferError("a chunk lacks blocks, which have left a sliding window that is shorter")
        self._submit(
            transfer,
            lambda: self.engine.store_groups(self._by_group(src_spec, dst_spec), after=self._current_stream()),
        )
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Copy slots to blocks, as `submit_store`. `expedited`: ahead of loads that are still queued on the host."""
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        transfers = self._by_group(dst_spec, src_spec)
        transfer = _Transfer(job_id, True, expedited, src_spec.block_ids)
        bad = sorted(self._bad_slots & transfer.slots) if self._bad_slots else []
        if bad:
            transfer.error = TransferError(f"slots {bad[:8]} hold no bytes to load: a store into them has failed")
        self._submit(
            transfer, lambda: self.engine.load_groups(transfers, after=self._current_stream(), urgent=expedited)
        )
        return True

    def _submit(self, transfer: _Transfer, submit: Callable[[], Job]) -> None:
        """Submit a transfer, or note why it was refused. While `max_in_flight` are unfinished, wait for the oldest."""
        while transfer.job is None and transfer.error is None:
            try:
                transfer.job = submit()
            except CapacityError as error:
                unfinished = [each.job for each in self._transfers.values() if each.job is not None and not each.ended]
                if not unfinished:
                    transfer.error = error
                for job in unfinished[:1]:
                    with suppress(TransferError):
                        job.wait()
            except (DriverError, TransferError) as error:
                transfer.error = error
        self._transfers[transfer.job_id] = transfer

    def _by_group(self, gpu: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec) -> list[GroupTransfer]:
        """Return the blocks and slots of each group. `gpu` has blocks group after group. The position of a group's
        first block in the request says where in its chunk it lies.
        """
        transfers, block, slot = [], 0, 0
        for group, (size, first) in enumerate(zip(gpu.group_sizes, gpu.block_indices, strict=True)):
            if size == 0:
                continue
            skip = first % self._blocks_per_chunk
            count = self.layout.slots_for(size, first_sub_block=skip)
            blocks, slots = gpu.block_ids[block : block + size], host.block_ids[slot : slot + count]
            transfers.append(GroupTransfer(group, blocks, slots, first_sub_block=skip))
            block, slot = block + size, slot + count
        assert block == len(gpu.block_ids)
        assert slot == len(host.block_ids)
        return transfers

    # their ends ---------------------------------------------------------------------------------------------------

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that have ended since the last call, all as successes. Does not wait.

        Raises:
            TransferError: a load has failed, and there is no KVOffloadConnector to report it. The worker is of no use
                any more: later calls raise again, and other transfers may never be returned.
        """
        if not self._transfers:
            return []
        self.engine.poll()
        results = []
        for transfer in [each for each in self._transfers.values() if each.ended]:
            failure, seconds, nbytes = transfer.failure, None, None
            if failure is not None:
                self._note_failure(transfer, failure)
            elif transfer.job is not None and transfer.job.unfit:
                self._bad_slots -= transfer.slots
                self._note_bad(transfer.job.unfit)
            elif not transfer.is_load and self._bad_slots:
                self._bad_slots -= transfer.slots
            del self._transfers[transfer.job_id]
            if transfer.job is not None and failure is None:
                outcome = transfer.job.outcome()
                nbytes, seconds = outcome.nbytes, None if math.isnan(outcome.seconds) else outcome.seconds
            results.append(TransferResult(transfer.job_id, True, transfer_size=nbytes, transfer_time=seconds))
        return results

    def _note_failure(self, transfer: _Transfer, failure: BaseException) -> None:
        if transfer.is_load and not self.reports_failures:
            raise TransferError(f"load {transfer.job_id} of vLLM has failed: {failure}; {_CONNECTOR}") from failure
        kind = "load" if transfer.is_load else "store"
        LOGGER.warning("%s %d of vLLM has failed, its chunks are missing: %s", kind, transfer.job_id, failure)
        if transfer.is_load:
            self._failed_loads.add(transfer.job_id)
        self._note_bad(transfer.slots, store=not transfer.is_load)

    def _note_bad(self, slots: AbstractSet[int], *, store: bool = True) -> None:
        if store and self._host is None:  # else a tier or another engine may fill them; the connector reports failures
            self._bad_slots |= slots
        if self.reports_failures:
            self._failed_slots |= slots

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these transfers have ended. Ids that are unknown or that `get_finished` has returned are ignored.

        Raises:
            TransferError: an expedited load has failed; the model would compute with wrong bytes. The others may not
                have ended.
        """
        for job_id in job_ids:
            transfer = self._transfers.get(job_id)
            if transfer is None:
                continue
            if transfer.job is not None:
                with suppress(TransferError):
                    transfer.job.wait()
            if transfer.urgent and transfer.failure is not None:
                raise TransferError(
                    f"load {job_id}, which vLLM awaits within its step, has failed: {transfer.failure}; without "
                    "sync_load_budget_bytes loads are not awaited, and a request whose load fails is computed again"
                ) from transfer.failure

    def take_failed_loads(self) -> set[int]:
        """Return vLLM's numbers of failed loads that `get_finished` has met since the last call of this."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def take_failed_slots(self) -> set[int]:
        """Return slots of failed stores and loads that `get_finished` has met since the last call of this."""
        failed, self._failed_slots = self._failed_slots, set()
        return failed

    def shutdown(self) -> None:
        """Wait for transfers in flight, for as long as they take, and free the pinned memory. Idempotent."""
        self.engine.close()
        if self._host is not None:
            self._host.close()
        self._transfers.clear()


def layout_of(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> KVLayout:
    """Describe vLLM's KV cache tensors, with vLLM's groups; a slot holds `blocks_per_chunk` blocks of one group.

    The tensors are `(num_blocks, page bytes)`, with any stride between blocks. Groups may share memory, since a block
    number belongs to one group only. The layout keeps the tensors alive. Each block is one range of its slot, whatever
    the order of the tensors, so that "pack" can carry it.
    """
    groups = []
    for refs in kv_caches.group_data_refs:
        page_bytes: dict[int, int] = {}  # layers of the group may share a tensor, and the largest page counts
        for ref in refs:
            page_bytes[ref.tensor_idx] = max(page_bytes.get(ref.tensor_idx, 0), ref.page_size_bytes)
        planes = []
        for index, nbytes in page_bytes.items():
            tensor = kv_caches.tensors[index].tensor
            stride = tensor.stride(0) * tensor.element_size()
            sizes = {"block_bytes": nbytes, "num_blocks": tensor.shape[0], "block_stride": stride}
            planes.append(Plane(tensor.data_ptr(), **sizes, owner=tensor))
        groups.append(planes)
    return KVLayout(groups, blocks_per_slot=blocks_per_chunk, slot_order="block-major")
