"""vLLM's scheduler and connectors over GPUs, simulated or real, and random requests; every block read is compared."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter, deque
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from late import Late
from msgspec import to_builtins
from seeds import seeds
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import ForwardContext
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm_model import Sequence
from vllm_worker import GpuWorker, Shape

from kvoffload.vllm.options import OF_OWNER

_CONTEXT = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})
_LONGEST = 4000  # tokens of a request
_LATE_SECONDS = {"simulated": 0.05, "gpu": 0.2}  # many steps of the scheduler and the model


@dataclass(frozen=True)
class Setting:
    """What is run, and how often what happens.

    Attributes:
        chunks: slots of the host pool.
        extra: further options of kv_connector_extra_config.
        connector: the name of the connector's class.
        spec: module and name of the spec's class.
        gpu: with real GPUs; all workers on the first one. No driver call fails there.
        quick: simulated GPUs do at once what they can, as real ones do.
        hints: each request belongs to one of four sessions, and half of them bring a hint.
        late_model, late_copies: how many of the model's steps, and of the transfers, begin late.
        reset, abort, fail, idle: probabilities for each step: of a reset, of an aborted request, of a driver call that
            fails, of running all that is queued on the GPUs.
        preempting: a reset also preempts all running requests, and clears the GPU's prefix cache, where vLLM can.
    """

    shape: Shape
    chunks: int = 64
    blocks_per_chunk: int = 1
    workers: int = 1
    asynchronous: bool = False
    requests: int = 40
    batch: int = 4
    policy: str = "prefix"
    extra: tuple[tuple[str, Any], ...] = ()
    connector: str = "KVOffloadConnector"
    spec: tuple[str, str] = ("vllm_worker", "WorkerSpec")
    reset: float = 0.01
    abort: float = 0.01
    fail: float = 0.0
    idle: float = 0.5
    gpu: bool = False
    quick: bool = False
    hints: bool = False
    late_model: float = 0.0
    late_copies: float = 0.0
    preempting: bool = False


class World:
    """A scheduler, its workers, and requests; `run` takes them to their end.

    Args:
        seed: which of the seeds that KVOFFLOAD_TEST_SEED chooses, from 0 on.

    Attributes:
        counts: what has happened.
    """

    def __init__(self, setting: Setting, seed: int, folder: Path) -> None:
        seed = seeds(seed + 1)[-1]
        self.setting, self.random = setting, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.workers = [_make_worker(setting, rank, seed + rank) for rank in range(setting.workers)]
        config, (names, caches) = _config(setting, folder), _caches(setting.shape)
        config.cache_config.num_gpu_blocks = setting.shape.num_blocks
        block_size, hash_block_size = resolve_kv_cache_block_sizes(caches, config)
        self.scheduler: Any = (AsyncScheduler if setting.asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=caches,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        connector = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        with set_current_vllm_config(config):
            for worker in self.workers:
                config.parallel_config.rank = worker.rank
                worker.connector = connector(config, KVConnectorRole.WORKER, caches)
                with worker.current():
                    worker.connector.register_kv_caches(worker.tensors(names))
        self._late, self._undo = [], ExitStack()
        for worker in self.workers:
            engine = worker.connector.connector_worker.worker.engine
            late = Late(engine.device, _LATE_SECONDS["gpu" if setting.gpu else "simulated"], seed + worker.rank)
            self._undo.callback(late.close)
            self._undo.enter_context(late.copies(engine, setting.late_copies))
            self._late.append(late)
        self.aggregator = KVOutputAggregator(setting.workers)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(setting.shape.block_size, sha256)
        self._sequences: dict[str, Sequence] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._behind: deque[tuple[Any, ModelRunnerOutput]] = deque()  # outputs that the scheduler has not had yet

    @property
    def manager(self) -> Any:
        return self.scheduler.connector.connector_scheduler.manager

    # requests -----------------------------------------------------------------------------------------------------

    def prompts(self) -> list[list[int]]:
        """Prompts that share beginnings; some go on where another one has ended."""
        random, size = self.random, self.setting.shape.block_size
        made = [[random.randrange(5, 900) for _ in range(random.randrange(3, 40) * size)] for _ in range(8)]
        bodies = len(made)
        while len(made) < bodies + self.setting.requests:
            before = random.choice(made[bodies:] if len(made) > bodies and random.random() < 0.3 else made[:bodies])
            if len(before) < 60 * size:
                made.append(before + [random.randrange(5, 900) for _ in range(random.randrange(1, 14))])
        return made[bodies:][::-1]

    def add(self, prompt: list[int]) -> None:
        parameters = SamplingParams(max_tokens=self.random.randrange(1, 12), ignore_eos=True)
        name = str(len(self._sequences))
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=parameters,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        if self.setting.hints:
            self._hint(request)
        self._sequences[name] = Sequence(prompt)
        self.scheduler.add_request(request)

    def _hint(self, request: Request) -> None:
        """Name its session, and give it a hint, or none: in vLLM's fields or in kv_transfer_params."""
        session, other = (str(self.random.randrange(4)) for _ in range(2))
        kind = self.random.choice(("kv.retain", "kv.release", "kv.demote", "kv.prefetch"))
        payload = self.random.choice(({}, {"session_id": other}, {"ttl": 1e-3}, {"estimated_resume_seconds": 5}))
        actions = [KvHintAction("a", kind, "1.0", payload)] if self.random.random() < 0.5 else []
        if self.random.random() < 0.5:
            request.session_id, request.kv_hints = session, KvHintsEnvelope("0.1", "m", actions)
        else:
            sent = {"protocol_version": "0.1", "actions": [to_builtins(action) for action in actions]}
            request.kv_transfer_params = {"session": session, "kv_hints": sent}

    # steps --------------------------------------------------------------------------------------------------------

    def run(self, *, until_wrong: bool = False) -> None:
        """All requests; then every worker's bytes have been compared.

        Args:
            until_wrong: end when a model has read wrong bytes, instead of raising AssertionError.
        """
        waiting = self.prompts()
        while waiting or self.busy:
            wrong = [each for worker in self.workers for each in worker.wrong]
            if wrong and until_wrong:
                return
            assert not wrong, wrong[:4]
            self.turn(waiting)

    def turn(self, waiting: list[list[int]]) -> None:
        """Fill the batch with requests for prompts that wait, and take a step."""
        while waiting and len(self.scheduler.requests) < self.setting.batch:
            self.add(waiting.pop())
        self.step()
        assert self.counts["steps"] < 400 * self.setting.requests, f"no end: {self.counts}, {self.manager.index}"

    @property
    def busy(self) -> bool:
        scheduler = self.scheduler
        return bool(
            scheduler.requests
            or scheduler.finished_req_ids
            or self._behind
            or scheduler.connector.has_pending_push_work()
        )

    def step(self) -> None:
        """One step of the engine: the scheduler, each worker, and an output for the scheduler; maybe the one before."""
        if self.random.random() < self.setting.abort and self.scheduler.requests:
            name = self.random.choice(list(self.scheduler.requests))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.counts["aborted"] += 1
        output = self.scheduler.schedule()
        self.counts["steps"] += 1
        self._note(output)
        work = self._work(output)
        sampled = {name: end for name, _, end in work if end >= self.scheduler.requests[name].num_tokens}
        outputs = []
        for worker in self.workers:
            with worker.current():
                outputs.append(self._run_worker(worker, output, work))
        runner = self._output(output, sampled, outputs)
        self._behind.append((output, runner))
        while len(self._behind) > (1 if self.setting.asynchronous and output.num_scheduled_tokens else 0):
            for worker in self.workers:  # the host has the tokens only once the GPU has computed them
                worker.wait_for_step(self.counts["steps"] - len(self._behind) + 1)
            self.scheduler.update_from_output(*self._behind.popleft())
        if self.random.random() < self.setting.reset:
            states = {request.status for request in self.scheduler.requests.values()}
            if self.setting.preempting and RequestStatus.WAITING_FOR_REMOTE_KVS not in states:  # else vLLM raises
                try:
                    self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
                    self.counts["preempting resets"] += 1
                except RuntimeError:  # blocks of an ended request are still in use
                    self.counts["refused resets"] += 1
            else:
                self.scheduler.connector.reset_cache()
            self.counts["resets"] += 1

    def _note(self, output: Any) -> None:
        """Keep each request's block table, as a worker does."""
        metadata = output.kv_connector_metadata
        self.counts["loaded blocks"] += sum(len(job.dst_spec.block_ids) for job in metadata.load_jobs.values())
        self.counts["stored blocks"] += sum(len(job.src_spec.block_ids) for job in metadata.store_jobs.values())
        self.counts["synchronous loads"] += sum(job.sync for job in metadata.load_jobs.values())
        self.counts["flushed"] += len(metadata.jobs_to_flush or ())
        self.counts["preempted"] += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(table) for table in new.block_ids]
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._tables[name] = [list(table) for table in blocks]
            elif blocks is not None:
                for table, more in zip(self._tables[name], blocks, strict=True):
                    table.extend(more)

    def _work(self, output: Any) -> list[tuple[str, int, int]]:
        """Name, first and last token of what each request computes in this step."""
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return [(name, starts[name], starts[name] + count) for name, count in output.num_scheduled_tokens.items()]

    def _run_worker(self, worker: GpuWorker, output: Any, work: list[tuple[str, int, int]]) -> KVConnectorOutput:
        """What vLLM's model runner does around a forward pass. Metadata are pickled, as between processes."""
        connector, metadata = worker.connector, pickle.loads(pickle.dumps(output.kv_connector_metadata))
        if self.random.random() < self.setting.fail:
            name = self.random.choice(("cuMemcpy3DBatchAsync", "cuMemcpyBatchAsync", "cuEventRecord"))
            worker.fail_call(name, self.random.randrange(1, 4))
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if output.has_sync_kv_loads:
            self._start_loads(worker)
        self._late[worker.rank].hold(worker.stream_handle, self.setting.late_model)
        for name, start, end in work:
            worker.queue_model(name, self._sequences[name], [list(t) for t in self._tables[name]], start, end)
        worker.queue_end(self.counts["steps"])
        if not output.has_sync_kv_loads:
            self._start_loads(worker)
        worker.clear_failures()
        connector.wait_for_save()
        if self.random.random() < self.setting.idle:
            worker.run_all()
        results = connector.get_transfer_results(output.finished_req_ids)
        self.counts["failed loads"] += len(results.failed_recving)
        report = pickle.loads(pickle.dumps(connector.build_connector_worker_meta()))
        connector.clear_connector_metadata()
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=report,
        )

    def _start_loads(self, worker: GpuWorker) -> None:
        if self.setting.quick:
            worker.run_all()  # the model's last steps
        worker.connector.start_load_kv(_CONTEXT)
        if self.setting.quick:
            worker.run_all()

    def _output(self, output: Any, sampled: dict[str, int], outputs: list[KVConnectorOutput]) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        tokens = [[self._sequences[n].token(sampled[n])] if n in sampled else [] for n in names]
        each: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: place for place, name in enumerate(names)},
                sampled_token_ids=tokens,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=None,
                kv_connector_output=mine,
            )
            for mine in outputs
        ]
        together = self.aggregator.aggregate(each)
        assert together is not None
        return together

    def check(self) -> None:
        """Nothing is pending or held, and the index agrees with itself."""
        for worker in self.workers:
            worker.synchronize()
            assert not worker.wrong, worker.wrong[:4]
        self.manager.index.check()
        statistics = self.manager.index.statistics()
        self.counts["failed stores"] = statistics.failed
        self.counts["late"] = sum(late.count for late in self._late)
        self.counts["compared blocks"] = sum(worker.checked for worker in self.workers)
        assert (statistics.pending, statistics.pinned) == (0, 0), statistics

    def close(self) -> None:
        self._undo.close()
        self.scheduler.connector.shutdown()
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# configuration ----------------------------------------------------------------------------------------------------


def _make_worker(setting: Setting, rank: int, seed: int) -> Any:
    if not setting.gpu:
        return GpuWorker(setting.shape, rank, seed)
    from vllm_torch_worker import TorchWorker

    return TorchWorker(setting.shape, rank, seed)


def _config(setting: Setting, folder: Path) -> VllmConfig:
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 1000,
                "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "torch_dtype": "float16",
                "max_position_embeddings": _LONGEST,
            }
        )
    )  # fmt: skip
    if not (folder / "model.safetensors").exists():
        (folder / "model.safetensors").write_bytes(b"no weights are read")
    shape = setting.shape
    slot = -(-shape.page_bytes * shape.most_layers * setting.blocks_per_chunk // 4096) * 4096
    extra = {
        "spec_module_path": setting.spec[0],
        "spec_name": setting.spec[1],
        "cpu_bytes_to_use": slot * setting.chunks * setting.workers or 1,
        "blocks_per_chunk": setting.blocks_per_chunk,
        "offload_prompt_only": False,
        "kvoffload_policy": setting.policy,
        "kvoffload_staging_bytes": 0,
        "self_describing_kv_events": True,
        **dict(setting.extra),
    }
    if "kvoffload_pool" in extra:
        extra = {name: value for name, value in extra.items() if name not in OF_OWNER}
    cache_config = CacheConfig(block_size=shape.block_size, cache_dtype="auto", enable_prefix_caching=True)
    cache_config.kv_cache_layout = "LBNHC"
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), dtype="float16", seed=0, skip_tokenizer_init=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=128,
            max_model_len=_LONGEST,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=cache_config,
        kv_transfer_config=KVTransferConfig(
            kv_connector=setting.connector,
            kv_connector_module_path="kvoffload.vllm" if setting.connector == "KVOffloadConnector" else None,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.disable_hybrid_kv_cache_manager = False  # vLLM disables it where it finds no GPU
    config.scheduler_config.async_scheduling = setting.asynchronous
    config.parallel_config.world_size = setting.workers
    return config


def _caches(shape: Shape) -> tuple[list[list[str]], KVCacheConfig]:
    """The names of each group's layers, and vLLM's description of the KV cache."""
    names = [[f"group.{g}.layer.{i}" for i in range(group.layers)] for g, group in enumerate(shape.groups)]
    common: dict[str, Any] = {
        "block_size": shape.block_size,
        "num_kv_heads": 2,
        "head_size": shape.token_bytes // 8,
        "dtype": torch.float16,
    }
    groups = [
        KVCacheGroupSpec(
            mine,
            SlidingWindowSpec(sliding_window=group.window, **common) if group.window else FullAttentionSpec(**common),
        )
        for mine, group in zip(names, shape.groups, strict=True)
    ]
    page = shape.page_bytes
    assert all(group.kv_cache_spec.page_size_bytes == page for group in groups)
    tensors = [
        KVCacheTensor(
            size=page * shape.most_layers * shape.num_blocks,
            layers=mine,
            layer_stride=page * shape.num_blocks,
            block_stride=page,
        )
        for mine in names
    ]
    return names, KVCacheConfig(num_blocks=shape.num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def seed_that_shows(setting: Setting, folder: Path, seeds: int = 12) -> int | None:
    """The first seed with which a model reads wrong bytes; None: none of these."""
    for seed in range(seeds):
        with World(setting, seed, folder) as world:
            world.run(until_wrong=True)
            for worker in world.workers:
                worker.synchronize()
        if any(worker.wrong for worker in world.workers):
            return seed
    return None
