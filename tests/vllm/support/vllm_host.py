"""What vLLM's scheduler and connector do with a spec's manager and worker, over torch's memory on a GPU.

With vLLM's classes, or those of `fake_vllm` where it is not installed. On the simulated device the KV cache is not
torch's, and a stream of the device stands for torch's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import numpy as np
import pytest
from helpers import Bytes
from tiering import SECONDS

import kvoffload

fake_vllm.install()

from vllm.v1.kv_offload.base import (  # noqa: E402
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    LookupResult,
    ReqContext,
)
from vllm_parts import PAGE, FakeTensor, Scheduler, gpu, keys  # noqa: E402

from kvoffload.vllm import KVOffloadSpec, KVOffloadWorker  # noqa: E402
from kvoffload.vllm.identity import making_connector  # noqa: E402

LAYERS, NUM_BLOCKS, CHUNKS = 2, 32, 16


class TorchCache:
    """A KV cache of `LAYERS` tensors `(NUM_BLOCKS, PAGE)` in torch's memory on a GPU.

    Attributes:
        tensors: of each layer.
        stream: torch's, of the model; not the default one.
    """

    def __init__(self, device: kvoffload.Device) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        if not torch.cuda.is_available():
            pytest.skip("torch finds no GPU")
        self._torch, self._where = torch, torch.device("cuda", device.index)
        whole = torch.zeros((LAYERS, NUM_BLOCKS, PAGE), dtype=torch.int8, device=self._where)
        self.tensors = list(whole)
        self.stream = torch.cuda.Stream(self._where)
        self._sleep(1)
        torch.cuda.synchronize(self._where)

    def _sleep(self, cycles: int) -> None:
        with self._torch.cuda.device(self._where):
            self._torch.cuda._sleep(cycles)

    def write(self, contents: Mapping[int, Bytes], *, queued: bool = False) -> None:
        """Write blocks of all layers on torch's current stream; `queued`: behind a wait, which goes on afterwards."""
        values = {block: self._torch.from_numpy(each.view(np.int8)).to(self._where) for block, each in contents.items()}
        self._torch.cuda.current_stream(self._where).synchronize()
        if queued:
            self._sleep(20_000_000)
        for block, layers in values.items():
            for tensor, value in zip(self.tensors, layers, strict=True):
                tensor[block].copy_(value)

    def read(self, block: int) -> Bytes:
        """A block of all layers, read on torch's current stream."""
        return np.stack([tensor[block].cpu().numpy().view(np.uint8) for tensor in self.tensors])


class SimulatedCache:
    """The same on the simulated device, which calls a function when its stream gets there."""

    def __init__(self, device: kvoffload.Device) -> None:
        self.device, self.stream = device, device.stream()
        self.memory = device.allocate(LAYERS * NUM_BLOCKS * PAGE)
        self._blocks = device.simulator.view(self.memory.address, self.memory.nbytes).reshape(LAYERS, NUM_BLOCKS, PAGE)
        addresses = [self.memory.address + layer * NUM_BLOCKS * PAGE for layer in range(LAYERS)]
        self.tensors = [FakeTensor(address, NUM_BLOCKS) for address in addresses]

    def write(self, contents: Mapping[int, Bytes], *, queued: bool = False) -> None:
        def write() -> None:
            for block, each in contents.items():
                self._blocks[:, block] = each

        spans = [(self.memory.address, self.memory.nbytes)]
        with self.device.current():
            self.device.simulator.enqueue(self.stream.handle, write, writes=spans)
        if not queued:
            self.stream.synchronize()

    def read(self, block: int) -> Bytes:
        self.stream.synchronize()
        copied: Bytes = self._blocks[:, block].copy()
        return copied


class SimulatedSpec(KVOffloadSpec):
    cache: SimulatedCache

    def open_device(self, kv_caches: CanonicalKVCaches) -> kvoffload.Device:
        return self.cache.device

    def current_stream(self, kv_caches: CanonicalKVCaches) -> Callable[[], Any]:
        return lambda: self.cache.stream


def config(engine: str, *, kv_cache_layout: str = "LBNHC", **extra: Any) -> Any:
    """What of vLLM's OffloadingConfig is read, of one group and one worker. `extra`: kv_connector_extra_config."""
    group = SimpleNamespace(group_id=0, tokens_per_block=4, sliding_window_size_in_chunks=None)
    return SimpleNamespace(
        engine_id=engine,
        extra_config=extra if "kvoffload_pool" in extra else {"cpu_bytes_to_use": CHUNKS * 4096, **extra},
        worker_kv_bytes_per_block=LAYERS * PAGE,
        cache=SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=4),
        parallel=SimpleNamespace(
            world_size=1, rank=0, data_parallel_index=0, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1
        ),
        model=SimpleNamespace(max_model_len=100, dtype="auto"),
        groups=(group,),
        kv_cache_layout=kv_cache_layout,
        enable_kv_cache_events=False,
    )


class Server(Scheduler):
    """And what its connector does with a worker."""

    def __init__(self, cache: Any, manager: Any, worker: KVOffloadWorker) -> None:
        super().__init__(manager)
        self.cache, self.worker = cache, worker

    def finish(self, job: int) -> None:
        """Wait for a transfer, and take its result."""
        self.worker.wait({job})
        assert [(result.job_id, result.success) for result in self.worker.get_finished()] == [(job, True)]

    def store(self, chunks: Sequence[int], *, queued: bool = False) -> None:
        """Compute chunks in blocks of the same numbers modulo `NUM_BLOCKS`, and store them."""
        wanted = keys(*chunks)
        output, context = self.begin_store(chunks)
        blocks = [chunks[wanted.index(each)] % NUM_BLOCKS for each in output.keys_to_store]
        self.cache.write({chunk % NUM_BLOCKS: content(chunk) for chunk in chunks}, queued=queued)
        self.worker.submit_store(self.requests, gpu((0, blocks)), output.store_spec)
        self.finish(self.requests)
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.end_step()

    def look_up(self, chunks: Sequence[int], context: ReqContext) -> list[LookupResult]:
        """Until none of them is pending; in each step the request asks again."""
        end = time.monotonic() + SECONDS
        while True:
            found = self.look(chunks, context)
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                return found
            assert time.monotonic() < end, found
            self.end_step()
            time.sleep(1e-3)

    def load(self, chunks: Sequence[int], *, expedited: bool = False) -> list[Bytes]:
        """Load chunks that are there or in a tier into blocks 0 and on, and read these on the model's stream."""
        wanted, context = keys(*chunks), self.context(chunks)
        assert self.look_up(chunks, context) == [LookupResult.HIT] * len(chunks)
        spec = self.manager.prepare_load(wanted, context)
        self.end_step()
        self.worker.submit_load(self.requests, spec, gpu((0, list(range(len(chunks))))), expedited=expedited)
        self.finish(self.requests)
        self.manager.complete_load(wanted, context)
        self.manager.on_request_finished(context)
        return [self.cache.read(block) for block in range(len(chunks))]

    def check(self, chunks: Sequence[int], **options: Any) -> None:
        found = self.load(chunks, **options)
        wrong = [chunk for chunk, each in zip(chunks, found, strict=True) if not np.array_equal(each, content(chunk))]
        assert not wrong, f"wrong bytes of {wrong}"


def content(chunk: int) -> Bytes:
    return np.random.default_rng(chunk).integers(0, 256, (LAYERS, PAGE), dtype=np.uint8)


@contextmanager
def server(device: kvoffload.Device, engine: str, **extra: Any) -> Iterator[Server]:
    """A spec's manager and worker, closed as vLLM does; on a GPU under a stream of torch's that is not the default."""
    with ExitStack() as stack:
        cache: Any = SimulatedCache(device) if device.simulated else TorchCache(device)
        if device.simulated:
            stack.callback(cache.memory.close)
            stack.callback(cache.stream.close)
        else:
            stack.enter_context(pytest.importorskip("torch").cuda.stream(cache.stream))
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, PAGE) for tensor in cache.tensors],
            [[CanonicalKVCacheRef(layer, PAGE) for layer in range(LAYERS)]],
        )
        with making_connector(SimpleNamespace(), SimpleNamespace()):
            spec = (SimulatedSpec if device.simulated else KVOffloadSpec)(config(engine, **extra))
        if isinstance(spec, SimulatedSpec):
            spec.cache = cache
        worker = spec.get_worker(caches)
        if not device.simulated:
            stack.callback(worker.engine.device.close)  # the spec has opened it
        stack.callback(worker.shutdown)
        manager = spec.get_manager()
        stack.callback(manager.shutdown)
        yield Server(cache, manager, worker)


def with_disk(folder: Path) -> dict[str, Any]:
    folder.chmod(0o700)
    tier = {"kind": "disk", "path": str(folder / "records.{dp}"), "nbytes": 1 << 23}
    return {
        "kvoffload_tiers": [tier],
        "kvoffload_tier_write": "through",
        "kvoffload_tier_identity": "a model",
        "kvoffload_policy": "lru",
    }
