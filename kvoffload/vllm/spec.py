"""KVOffloadSpec: vLLM's entry to kvoffload, made in the scheduler's process and in each worker's.

Tiers are below the host memory of all workers, in the scheduler's process. Each worker offers its slots under its own
name. The scheduler's process maps the slots of all workers, and gives them to the tiers: a record is one chunk of all
workers. Usually vLLM makes the workers first. If it does not, the manager looks for them at its first use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingMetricMetadata, OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPUOffloadingInfo
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.statistics import CacheEvent
from kvoffload.cache.tiering.tier import Tier
from kvoffload.device.device import Device, open_device
from kvoffload.device.shared_slots import SharedSlots
from kvoffload.errors import CapabilityError, CapacityError
from kvoffload.internal.types import StreamLike, UInt8Array
from kvoffload.layout.coding import CHUNK_PARTS, RECORD_PART
from kvoffload.layout.layout import KVLayout
from kvoffload.pool.shared_pool import SharedPool
from kvoffload.tiers.loading import load_tier
from kvoffload.vllm.identity import cache_dtypes, connector_for, identity_of, layout_digest, note_of
from kvoffload.vllm.manager import KVOffloadManager
from kvoffload.vllm.metrics import definitions, tier_definitions
from kvoffload.vllm.options import Options
from kvoffload.vllm.pooled import PoolOfEngine
from kvoffload.vllm.promotions import Promotions
from kvoffload.vllm.worker import KVOffloadWorker

_ALIGNMENT = 4096  # of slots
_ENGINE_OPTIONS = ("prefer", "staging_bytes", "max_in_flight", "most_queued_bytes")


class KVOffloadSpec(OffloadingSpec):
    """Offloads vLLM's KV cache to pinned host memory, and from there to tiers.

    Args:
        config: vLLM's; see `Options` for its kv_connector_extra_config.

    Attributes:
        options: the checked options.
        num_chunks: slots of each worker; 0 if cpu_bytes_to_use is less than a chunk of all workers, and with a pool.

    Raises:
        ValueError: kv_connector_extra_config lacks cpu_bytes_to_use, or has an unknown or wrong option.
        CapabilityError: an option of vLLM's has no effect here; with kvoffload_tiers, kvoffload_pool or
            kvoffload_codec, the connector is another than KVOffloadConnector; or with kvoffload_codec, the KV cache is
            not of bfloat16.
        CapacityError: with kvoffload_tiers, there are no slots.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.options = Options.read(self.extra_config)
        payload = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        if self.options.kvoffload_codec != "raw":
            check_codec(config)
            payload = -(-payload * RECORD_PART // CHUNK_PARTS)
        self._chunk_bytes = -(-payload // _ALIGNMENT) * _ALIGNMENT
        self._of_all_workers = self._chunk_bytes * config.parallel.world_size
        self.num_chunks = self.options.cpu_bytes_to_use // self._of_all_workers if self._of_all_workers else 0
        tiers, pool = self.options.kvoffload_tiers, self.options.kvoffload_pool
        self._tiers = TiersOfWorkers(config, self.options, self.num_chunks) if tiers else None
        self._pool = None if pool is None else PoolOfEngine(pool, config, self.options.kvoffload_tier_identity)
        self._windowed = [each.group_id for each in config.groups if each.sliding_window_size_in_chunks is not None]
        self._manager: KVOffloadManager | None = None
        self._worker: KVOffloadWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        of_tiers = tier_definitions() if extra_config.get("kvoffload_tiers") else {}
        return {**definitions(int(extra_config.get("store_threshold", 0))), **of_tiers}

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        return (*CPUOffloadingInfo.config_info_keys(), "kvoffload_policy")

    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's side, the same at each call. Pins no memory, and needs no GPU.

        If all workers offer their slots by now, it opens the tiers, and raises their errors; or joins the pool, if they
        have. Else the manager's first use does.
        """
        if self._manager is not None:
            return self._manager
        options, below = self.options, self._tiers or self._pool
        there = below is not None and below.workers_are_there()
        num_chunks = self.num_chunks if self._pool is None else self._pool.capacity
        info = CPUOffloadingInfo.from_config(self.config, num_chunks, self._of_all_workers)
        manager = KVOffloadManager(
            num_chunks,
            policy=options.kvoffload_policy,
            enable_events=self.kv_events_config.enable_kv_cache_events and self._pool is None,
            store_threshold=options.store_threshold,
            max_tracker_size=options.max_tracker_size,
            windowed_groups=self._windowed,
            info={**info.as_config_info(), "kvoffload_policy": options.kvoffload_policy},
            promotions=None if below is None else below.promotions(),
        )
        with ExitStack() as undo:
            undo.callback(manager.shutdown)
            if there:
                manager.index.check()  # errors of tiers, and of the pool, come at the start
            undo.pop_all()
        self._manager = manager
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> KVOffloadWorker:
        """Return a worker's side, the same at each call. The first call pins the worker's host memory.

        Raises:
            CapacityError: the memory cannot be pinned, or a chunk is larger than vLLM's configuration says.
            LayoutError: the tensors are not on the GPU.
            Also errors of `open_device`. After an error nothing is pinned, and the next call tries again.
        """
        if self._worker is not None:
            return self._worker
        host: Callable[[KVLayout], SharedSlots | SharedPool] | None = None
        if self._pool is not None:
            host = self._pool.attach
        elif self._tiers is not None:
            host = lambda layout: SharedSlots(self.num_chunks, layout.slot_bytes)  # noqa: E731
        given = {name: getattr(self.options, f"kvoffload_{name}") for name in _ENGINE_OPTIONS}
        worker = KVOffloadWorker(
            kv_caches,
            device=self.open_device(kv_caches),
            blocks_per_chunk=self.blocks_per_chunk,
            num_chunks=self.num_chunks,
            current_stream=self.current_stream(kv_caches),
            codec=self.options.kvoffload_codec,
            windowed=bool(self._windowed),
            host=host,
            **{name: value for name, value in given.items() if value is not None},
        )
        try:
            needed = worker.layout.slot_bytes
            if needed > max(self._chunk_bytes, _ALIGNMENT) and self._pool is None:
                raise CapacityError(
                    f"a chunk of this worker takes {needed} bytes, and cpu_bytes_to_use was divided into chunks of "
                    f"{self._chunk_bytes}: vLLM's configuration and its tensors disagree"
                )
            if self._tiers is not None:
                worker.offer(self._tiers.name_of(self.config.parallel.rank), note_of(worker.layout))
        except BaseException:
            worker.shutdown()
            raise
        self._worker = worker
        return worker

    def open_device(self, kv_caches: CanonicalKVCaches) -> Device:
        """Open the GPU of the tensors. Nothing here closes it. A subclass may give another device, for tests."""
        return open_device(kv_caches.tensors[0].tensor.device.index or 0)

    def current_stream(self, kv_caches: CanonicalKVCaches) -> Callable[[], StreamLike]:
        """Return a function that gives vLLM's current stream. A subclass may override it, for tests."""
        import torch

        device = kv_caches.tensors[0].tensor.device
        return lambda: int(torch.cuda.current_stream(device).cuda_stream)


def check_codec(config: OffloadingConfig) -> None:
    """Raise CapabilityError if slots cannot be coded."""
    why = "vLLM's own connector cannot say that a block which the codec does not hold was not stored"
    dtype = cache_dtypes(connector_for("kvoffload_codec", why), config)
    if dtype != "bfloat16":
        raise CapabilityError(
            f"kvoffload_codec is for a KV cache of bfloat16, and this one is of {dtype}: leave it out"
        )


# tiers below the workers ----------------------------------------------------------------------------------------------


_LONGEST_WAIT = 30.0  # seconds for workers' memory


class TiersOfWorkers:
    """The tiers of kvoffload_tiers. Made in every process; only the scheduler's calls `open`."""

    def __init__(
        self, config: OffloadingConfig, options: Options, num_chunks: int, *, wait: float = _LONGEST_WAIT
    ) -> None:
        why = "with vLLM's own connector the bytes of a store that failed would get into the tiers"
        self._connector = connector_for("kvoffload_tiers", why)
        if num_chunks == 0:
            raise CapacityError(
                f"kvoffload_tiers needs slots in host memory, and cpu_bytes_to_use={options.cpu_bytes_to_use} is less "
                "than a chunk of all workers; raise it"
            )
        self._config, self._options, self._num_chunks = config, options, num_chunks
        self._wait = wait

    def name_of(self, rank: int) -> str:
        """Return the name of a worker's offer of its slots; all processes of an engine know the engine's identifier."""
        return f"{self._config.engine_id}/{rank}"

    def promotions(self) -> Promotions:
        """Make the promotions of the manager, which opens the index at its first use."""
        sizes = {group.group_id: group.sliding_window_size_in_chunks for group in self._config.groups}
        disks_alone = all(choice.kind == "disk" for choice in self._options.kvoffload_tiers)
        return Promotions(
            self.open,
            seconds=self._options.kvoffload_promotion_seconds,
            windows={number: size for number, size in sizes.items() if size is not None},
            source=CacheHitSource.DISK if disks_alone else CacheHitSource.EXTERNAL_UNSPECIFIED,
        )

    def workers_are_there(self) -> bool:
        try:
            for rank in range(self._config.parallel.world_size):
                SharedSlots.receive(self.name_of(rank)).close()
        except TimeoutError:
            return False
        return True

    def open(self, on_event: Callable[[CacheEvent], None] | None) -> CacheIndex:
        """Open the index over all workers' slots."""
        options, replica = self._options, str(self._config.parallel.data_parallel_index)
        pools, notes = self._pools()
        per_chunk, per_second = None, options.kvoffload_prefill_tokens_per_second
        if per_second is not None:  # the group with the most tokens counts: groups are computed together
            tokens = max(int(group.tokens_per_block) for group in self._config.groups)
            per_chunk = tokens * int(self._config.cache.blocks_per_chunk) / per_second
        tiers: list[Tier] = []
        with ExitStack() as stack:  # closes the tiers if one of them, or the index, cannot be opened
            stack.callback(lambda: [tier.close() for tier in tiers])
            for place, choice in enumerate(options.kvoffload_tiers):
                arguments: dict[str, Any] = {
                    name: value.replace("{dp}", replica) if isinstance(value, str) else value
                    for name, value in choice.arguments.items()
                }
                if choice.kind != "memory" and "identity" not in arguments:
                    arguments["identity"] = identity_of(self._connector, self._config, options.kvoffload_tier_identity)
                try:
                    tiers.append(load_tier(choice.kind, **arguments))
                except (TypeError, ValueError) as error:
                    raise ValueError(f"kvoffload_tiers[{place}], {choice.kind}: {error}") from error
            index = CacheIndex(
                len(pools[0]),
                pools=pools,
                tiers=tiers,
                layout=layout_digest(self._config, notes),
                write=options.kvoffload_tier_write,
                seconds_per_key=per_chunk,
                policy=options.kvoffload_policy,
                on_event=on_event,
            )
            stack.pop_all()
        return index

    def _pools(self) -> tuple[list[UInt8Array], list[str]]:
        pools, notes = [], []
        for rank in range(self._config.parallel.world_size):
            try:
                with SharedSlots.receive(self.name_of(rank), timeout=self._wait) as slots:
                    pools.append(slots.array)
                    notes.append(slots.note)
            except TimeoutError as error:
                raise CapabilityError(
                    f"kvoffload_tiers needs all {self._config.parallel.world_size} workers on the scheduler's machine, "
                    f"in its network namespace; worker {rank} has offered no memory there for {self._wait:g} seconds. "
                    "Leave out kvoffload_tiers where workers are on several machines"
                ) from error
        return pools, notes
