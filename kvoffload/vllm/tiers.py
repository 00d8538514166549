"""Tiers below the host memory of vLLM's workers, in the scheduler's process.

Each worker offers its slots under its own name. The scheduler's process maps the slots of all workers, and gives them
to the tiers: a record is one chunk of all workers. Usually vLLM makes the workers first. If it does not, the manager
looks for them at its first use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.statistics import CacheEvent
from kvoffload.cache.tiering.tier import Tier
from kvoffload.device.shared_slots import SharedSlots
from kvoffload.errors import CapabilityError, CapacityError
from kvoffload.internal.types import UInt8Array
from kvoffload.tiers.loading import load_tier
from kvoffload.vllm.identity import config_of_connector, identity_of, layout_digest
from kvoffload.vllm.options import Options
from kvoffload.vllm.promotions import Promotions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LONGEST_WAIT = 30.0  # seconds for workers' memory


class TiersOfWorkers:
    """The tiers of kvoffload_tiers. Made in every process; only the scheduler's calls `open`."""

    def __init__(
        self, config: OffloadingConfig, options: Options, num_chunks: int, *, wait: float = _LONGEST_WAIT
    ) -> None:
        connector = config_of_connector()
        if connector is None:
            raise CapabilityError(
                'kvoffload_tiers needs kv_connector="KVOffloadConnector", kv_connector_module_path="kvoffload.vllm": '
                "with vLLM's own connector the bytes of a store that failed would get into the tiers"
            )
        if num_chunks == 0:
            raise CapacityError(
                f"kvoffload_tiers needs slots in host memory, and cpu_bytes_to_use={options.cpu_bytes_to_use} is less "
                "than a chunk of all workers; raise it"
            )
        self._config, self._options, self._num_chunks = config, options, num_chunks
        self._connector: VllmConfig = connector
        self._wait = wait

    def name_of(self, rank: int) -> str:
        """The name under which a worker offers its slots; all processes of an engine know the engine's identifier."""
        return f"{self._config.engine_id}/{rank}"

    def promotions(self) -> Promotions:
        """For the manager, which opens the index at its first use."""
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
        if per_second is not None:  # of the group whose chunks take the most: those of several are computed together
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
                    arguments["identity"] = self.identity
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

    @property
    def identity(self) -> str:
        given = self._options.kvoffload_tier_identity
        return identity_of(self._connector, self._config) if given is None else given
