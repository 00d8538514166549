"""Small classes in place of vLLM's, where vLLM is not installed: what kvoffload.vllm imports, with the same fields.

`install` puts them into sys.modules. Where vLLM is installed it does nothing, and the same tests use vLLM's classes.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from enum import Enum, auto
from types import ModuleType
from typing import Any

import numpy as np


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class CacheHitSource(Enum):
    HOST = "host"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


@dataclass(frozen=True)
class KvHintAction:
    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


@dataclass(frozen=True)
class KvHintsEnvelope:
    protocol_version: str
    message_id: str
    actions: list[KvHintAction]


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: KvHintsEnvelope | None = None
    _state: dict[type, Any] = field(default_factory=dict)
    _offload_key_positions: dict[bytes, int] = field(default_factory=dict)

    def set_state(self, value: Any) -> None:
        self._state[type(value)] = value

    def get_state(self, kind: type) -> Any:
        return self._state.get(kind)

    def set_offload_key_position(self, key: bytes, end: int) -> None:
        self._offload_key_positions[key] = end

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self._offload_key_positions.get(key)


@dataclass
class PrepareStoreOutput:
    keys_to_store: list[bytes]
    store_spec: Any
    evicted_keys: list[bytes]


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Any = None
    ownership: str | None = None
    removal_expected: bool = False
    metadata_only: bool = False


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


class BlockIDsLoadStoreSpec:
    def __init__(self, block_ids: list[int]) -> None:
        self.block_ids = np.array(block_ids, dtype=np.int32)


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    def __init__(self, block_ids: list[int], group_sizes: Any, block_indices: Any) -> None:
        super().__init__(block_ids)
        self.group_sizes, self.block_indices = group_sizes, block_indices


class OffloadingSpec:
    def __init__(self, config: Any) -> None:
        self.config, self.extra_config = config, config.extra_config
        self.blocks_per_chunk = config.cache.blocks_per_chunk
        self.kv_events_config = _record("events", enable_kv_cache_events=config.enable_kv_cache_events)


class OffloadingConnectorStats:
    """The three kinds by name, as `reduce` of vLLM's gives them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def set_gauge(self, name: str, value: float, labels: tuple[str, ...] = ()) -> None:
        self.values[f"{name}:{labels}" if labels else name] = value

    def increase_counter(self, name: str, value: float = 1, labels: tuple[str, ...] = ()) -> None:
        name = f"{name}:{labels}" if labels else name
        self.values[name] = self.values.get(name, 0) + value

    def observe_histogram(self, name: str, value: float) -> None:
        self.values[f"{name}_count"] = self.values.get(f"{name}_count", 0) + 1
        self.values[f"{name}_sum"] = self.values.get(f"{name}_sum", 0) + value

    def reduce(self) -> dict[str, Any]:
        return self.values


class CPUOffloadingMetrics:
    STORES_SKIPPED = "vllm:kv_offload_stores_skipped"
    CPU_CACHE_USAGE_PERC = "vllm:kv_offload_cpu_cache_usage_perc"
    CPU_ALLOCATION_SIZE = "vllm:kv_offload_cpu_allocation_size"
    CPU_CACHE_WRITE_USAGE_PERC = "vllm:kv_offload_cpu_cache_write_usage_perc"
    CPU_CACHE_READ_USAGE_PERC = "vllm:kv_offload_cpu_cache_read_usage_perc"


@dataclass(frozen=True)
class CPUOffloadingInfo:
    cpu_num_chunks: int
    cpu_kv_cache_size_bytes: int

    @classmethod
    def config_info_keys(cls) -> tuple[str, ...]:
        return tuple(each.name for each in fields(cls))

    @classmethod
    def from_config(cls, config: Any, num_chunks: int, kv_bytes_per_chunk: int) -> CPUOffloadingInfo:
        return cls(num_chunks, num_chunks * kv_bytes_per_chunk)

    def as_config_info(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class OffloadingWorkerMetadata:
    completed_jobs: dict[int, int] = field(default_factory=dict)
    transfer_stats: Any = None

    def aggregate(self, other: Any) -> OffloadingWorkerMetadata:
        counts = dict(self.completed_jobs)
        for job, count in other.completed_jobs.items():
            counts[job] = counts.get(job, 0) + count
        return OffloadingWorkerMetadata(counts, self.transfer_stats)


@dataclass
class OffloadingConnectorMetadata:
    load_jobs: dict[int, Any]
    store_jobs: dict[int, Any]
    jobs_to_flush: set[int] | None = None


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class OffloadingConnector:
    connector_worker: Any
    connector_scheduler: Any
    _connector_metadata: Any

    @property
    def scheduler(self) -> Any:
        return self.connector_scheduler

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        self.connector_worker.start_kv_transfers(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(*self.connector_worker.get_finished(finished_req_ids))

    def build_connector_worker_meta(self) -> Any:
        return self.connector_worker.build_connector_worker_meta()

    def on_new_request(self, request: Any) -> None:
        self.connector_scheduler.on_new_request(request)

    def update_connector_output(self, connector_output: Any) -> None:
        self.connector_scheduler.update_connector_output(connector_output)


def _record(name: str, **values: Any) -> Any:
    return make_dataclass(name, list(values))(**values)


def _metadata(name: str) -> type:
    return make_dataclass(name, ["documentation", ("labelnames", tuple, ()), ("buckets", Any, None)])


def _modules() -> dict[str, dict[str, Any]]:
    offload, connector = "vllm.v1.kv_offload", "vllm.distributed.kv_transfer.kv_connector.v1"
    names = ("OffloadingManager", "OffloadingWorker", "LoadStoreSpec", "KVConnectorWorkerMetadata")
    empty = {name: type(name, (), {}) for name in (*names, "ForwardContext", "KVConnectorOutput", "OffloadingConfig")}
    base: dict[str, Any] = {
        each.__name__: each
        for each in (
            LookupResult, Medium, ReqContext, PrepareStoreOutput, OffloadingEvent, TransferResult, OffloadingSpec,
            BlockIDsLoadStoreSpec, GPULoadStoreSpec,
        )
    }  # fmt: skip
    base |= {f"Offloading{kind}Metadata": _metadata(kind) for kind in ("Metric", "Counter", "Gauge", "Histogram")}
    base |= {name: empty[name] for name in names}
    base |= {
        "OffloadKey": bytes,
        "ScheduleEndContext": make_dataclass("ScheduleEndContext", ["new_req_ids", "preempted_req_ids"]),
        "RequestOffloadingContext": make_dataclass("RequestOffloadingContext", []),
        "CanonicalKVCacheTensor": make_dataclass("CanonicalKVCacheTensor", ["tensor", "page_size_bytes"]),
        "CanonicalKVCacheRef": make_dataclass("CanonicalKVCacheRef", ["tensor_idx", "page_size_bytes"]),
        "CanonicalKVCaches": make_dataclass("CanonicalKVCaches", ["tensors", "group_data_refs"]),
        "make_offload_key": lambda digest, group: digest + group.to_bytes(4, "big"),
        "get_offload_group_idx": lambda key: int.from_bytes(key[-4:], "big"),
    }
    common = {
        "CPULoadStoreSpec": type("CPULoadStoreSpec", (BlockIDsLoadStoreSpec,), {}),
        "CPUOffloadingInfo": CPUOffloadingInfo,
        "CPUOffloadingMetrics": CPUOffloadingMetrics,
    }
    return {
        "vllm.envs": {"VLLM_USE_MODELSCOPE": False},
        "vllm": {"__version__": "0.33.0"},
        f"{offload}.base": base,
        f"{offload}.config": empty,
        "vllm.v1.kv_hints": {"KvHintAction": KvHintAction, "KvHintsEnvelope": KvHintsEnvelope},
        f"{offload}.cpu.common": common,
        "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": CacheHitSource},
        "vllm.v1.outputs": empty,
        "vllm.forward_context": empty,
        f"{connector}.base": {**empty, "KVConnectorTransferResults": KVConnectorTransferResults},
        f"{connector}.offloading.metrics": {"OffloadingConnectorStats": OffloadingConnectorStats},
        f"{connector}.offloading.common": {
            "OffloadingConnectorMetadata": OffloadingConnectorMetadata,
            "OffloadingWorkerMetadata": OffloadingWorkerMetadata,
            "TransferStats": make_dataclass("TransferStats", []),
        },
        f"{connector}.offloading_connector": {"OffloadingConnector": OffloadingConnector},
    }


def install() -> None:
    """Make `import kvoffload.vllm` work."""
    if "vllm" in sys.modules:
        return
    if importlib.util.find_spec("vllm") is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the packages that it imports
            importlib.import_module("kvoffload.vllm")
        return
    for name, contents in _modules().items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(contents)
        if len(parts) > 1:  # `import a.b` finds b in sys.modules and looks it up in a
            setattr(sys.modules[".".join(parts[:-1])], parts[-1], sys.modules[name])
