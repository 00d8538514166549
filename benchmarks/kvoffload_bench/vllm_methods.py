"""What `bench vllm` compares: this library's engine, vLLM's `CPUOffloadingWorker` and its `DmaCopyBackend`.

All copy the same blocks of the same tensor. The engine's slots are its own; the two classes of vLLM share pinned
tensors, one for each plane, which the worker has allocated. Every transfer is ordered after PyTorch's current stream,
as vLLM's worker does it; that stream is idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Plane
from kvoffload.planning.transfer_plan import Direction
from kvoffload_bench.lab import Lab
from kvoffload_bench.vllm_classes import TransferClasses
from kvoffload_bench.vllm_setup import POISON, TensorSetup

ENGINE, ENGINE_COPIES = "kvoffload", "kvoffload, sm_limit=0"
WORKER, BACKEND = "CPUOffloadingWorker", "DmaCopyBackend"
OURS, THEIRS = (ENGINE, ENGINE_COPIES), (WORKER, BACKEND)


class VllmMethod(Protocol):
    """Submits the transfers of a series. PyTorch's current stream and the device's context must be current.

    Attributes:
        setup: whose blocks it copies.
    """

    setup: TensorSetup

    def take(self) -> None:
        """Prepare the transfers of the series that the setup has taken, and write what loads read."""

    def submit(self, direction: Direction, index: int) -> None:
        """Submit a transfer of the series."""

    def done(self) -> bool:
        """Whether all that was submitted is reported to have ended. Never waits."""

    def finish(self) -> None:
        """Raise the failure of a transfer; all have ended."""

    def poison_slots(self) -> None:
        """Overwrite the slots that stores write."""

    def wrong_slots(self) -> int:
        """Wrong rows of the slots that stores write."""


class EngineMethod:
    """An `OffloadEngine`.

    Args:
        options: of the engine.

    Attributes:
        chosen: jobs by the label of their copy method.
    """

    def __init__(self, lab: Lab, setup: TensorSetup, undo: ExitStack, **options: Any) -> None:
        self.setup, geometry = setup, setup.geometry
        planes = [
            Plane(plane.data_ptr(), block_bytes=geometry.block_bytes, num_blocks=plane.shape[0], owner=setup.cache)
            for plane in setup.cache
        ]
        engine = OffloadEngine(KVLayout([planes]), device=lab.device, num_slots=setup.num_slots, **options)
        self.engine = undo.enter_context(engine)
        self._slots = setup.torch.from_numpy(engine.slots.view("int8"))
        self._unfinished: list[Job] = []
        self._ended: list[Job] = []
        self.chosen: Counter[str] = Counter()

    def take(self) -> None:
        setup = self.setup
        self._stream = setup.torch.cuda.current_stream().cuda_stream
        self._ids = {
            direction: [
                (setup.blocks[direction][places].copy(), setup.slots[direction][places].copy())
                for places in map(setup.series.of, range(setup.series.transfers))
            ]
            for direction in Direction
        }
        rows = setup.by_slot(Direction.LOAD).transpose(0, 1).reshape(setup.series.places, -1)
        self._of(Direction.LOAD)[:, : rows.shape[1]].copy_(rows)
        setup.synchronize()
        self.chosen.clear()

    def _of(self, direction: Direction) -> Any:
        """The slots of a direction, whole rows."""
        first = self.setup.first_slot(direction)
        return self._slots[first : first + self.setup.series.places]

    def submit(self, direction: Direction, index: int) -> None:
        blocks, slots = self._ids[direction][index]
        if direction is Direction.STORE:
            job = self.engine.store(blocks, slots, after=self._stream)
        else:
            job = self.engine.load(slots, blocks, after=self._stream)
        self._unfinished.append(job)

    def done(self) -> bool:
        while self._unfinished and self._unfinished[0].done:
            self._ended.append(self._unfinished.pop(0))
        return not self._unfinished

    def finish(self) -> None:
        for job in self._ended:
            job.wait()
            if job.method is not None:
                self.chosen[job.method.label] += 1
        self._ended.clear()
        self.engine.poll()

    def poison_slots(self) -> None:
        rows = self._of(Direction.STORE)
        rows.copy_(self.setup.torch.full(rows.shape, POISON, dtype=rows.dtype, device=self.setup.where))
        self.setup.synchronize()

    def wrong_slots(self) -> int:
        setup, geometry = self.setup, self.setup.geometry
        found = self._of(Direction.STORE).to(setup.where)[:, : geometry.planes * geometry.block_bytes]
        found = found.reshape(-1, geometry.planes, geometry.block_bytes).transpose(0, 1)
        return setup.differing(found, setup.by_slot(Direction.STORE))


class PinnedTensors:
    """The host memory that vLLM's classes share: a tensor for each plane, (slots, block_bytes)."""

    def __init__(self, setup: TensorSetup, tensors: Sequence[Any]) -> None:
        self.setup, self.tensors = setup, tensors

    def _of(self, direction: Direction) -> Iterator[Any]:
        first = self.setup.first_slot(direction)
        return (tensor[first : first + self.setup.series.places] for tensor in self.tensors)

    def prepare(self) -> None:
        """Write what loads read."""
        for rows, right in zip(self._of(Direction.LOAD), self.setup.by_slot(Direction.LOAD), strict=True):
            rows.copy_(right, non_blocking=True)
        self.setup.synchronize()

    def poison(self) -> None:
        setup, geometry = self.setup, self.setup.geometry
        shape = (setup.series.places, geometry.block_bytes)
        poison = setup.torch.full(shape, POISON, dtype=setup.torch.int8, device=setup.where)
        for rows in self._of(Direction.STORE):
            rows.copy_(poison, non_blocking=True)
        setup.synchronize()

    def wrong(self) -> int:
        setup = self.setup
        found = setup.torch.stack([rows.to(setup.where, non_blocking=True) for rows in self._of(Direction.STORE)])
        return setup.differing(found, setup.by_slot(Direction.STORE))


class WorkerMethod:
    """vLLM's `CPUOffloadingWorker`, with one group and one block a chunk. It polls `get_finished`, as vLLM does."""

    def __init__(self, classes: TransferClasses, setup: TensorSetup, undo: ExitStack) -> None:
        self.setup, self._classes, base = setup, classes, classes.base
        size = setup.geometry.block_bytes
        caches = base.CanonicalKVCaches(
            tensors=[base.CanonicalKVCacheTensor(plane, size) for plane in setup.cache],
            group_data_refs=[[base.CanonicalKVCacheRef(number, size) for number in range(setup.geometry.planes)]],
        )
        self.worker = classes.worker.CPUOffloadingWorker(caches, blocks_per_chunk=1, num_cpu_chunks=setup.num_slots)
        self.host = PinnedTensors(setup, list(self.worker._store_handler.dst_tensors))
        undo.callback(self.worker.shutdown)
        self._next, self._running = 0, set[int]()
        self._failed: list[Any] = []

    def take(self) -> None:
        setup, base, common = self.setup, self._classes.base, self._classes.common
        self._specs = {
            direction: [
                (
                    base.GPULoadStoreSpec(setup.blocks[direction][places].tolist(), [setup.series.blocks], [0]),
                    common.CPULoadStoreSpec(setup.slots[direction][places].tolist()),
                )
                for places in map(setup.series.of, range(setup.series.transfers))
            ]
            for direction in Direction
        }
        self.host.prepare()

    def submit(self, direction: Direction, index: int) -> None:
        device, host = self._specs[direction][index]
        self._next += 1
        if direction is Direction.STORE:
            self.worker.submit_store(self._next, device, host)
        else:
            self.worker.submit_load(self._next, host, device)
        self._running.add(self._next)

    def done(self) -> bool:
        for result in self.worker.get_finished():
            self._running.discard(result.job_id)
            if not result.success:
                self._failed.append(result)
        return not self._running

    def finish(self) -> None:
        if self._failed:
            raise RuntimeError(f"transfers of vLLM's worker failed: {self._failed}")

    def poison_slots(self) -> None:
        self.host.poison()

    def wrong_slots(self) -> int:
        return self.host.wrong()


class BackendMethod:
    """vLLM's `DmaCopyBackend`: a thread submits the copies; the end is seen as vLLM's own worker sees it, by events."""

    def __init__(self, classes: TransferClasses, setup: TensorSetup, host: PinnedTensors, undo: ExitStack) -> None:
        self.setup, self.host, torch = setup, host, setup.torch
        lowest = max(torch.cuda.Stream.priority_range())
        load, store = (torch.cuda.Stream(setup.where, priority=lowest) for _ in range(2))
        self.backend = classes.backend.DmaCopyBackend()
        undo.callback(self.backend.shutdown)
        names = [f"plane {number}" for number in range(setup.geometry.planes)]
        device, pinned = dict(zip(names, setup.cache, strict=True)), dict(zip(names, host.tensors, strict=True))
        self.backend.init(device, pinned, setup.where, load, store)
        self._computed = torch.Event()
        self._events: dict[bool, list[tuple[int, Any]]] = {True: [], False: []}  # by whether it is a store
        self._submitted = self._seen = 0

    def take(self) -> None:
        setup = self.setup
        self._ids = {
            direction: [
                (setup.blocks[direction][places].tolist(), setup.slots[direction][places].tolist())
                for places in map(setup.series.of, range(setup.series.transfers))
            ]
            for direction in Direction
        }
        self.host.prepare()

    def submit(self, direction: Direction, index: int) -> None:
        blocks, slots = self._ids[direction][index]
        self._submitted += 1
        launch = partial(self.backend.launch_copy, event_idx=self._submitted)
        if direction is Direction.STORE:
            self._computed.record(self.setup.torch.cuda.current_stream())
            launch(blocks, slots, is_store=True, events_list=self._events[True], wait_event=self._computed)
        else:
            launch(slots, blocks, is_store=False, events_list=self._events[False])

    def done(self) -> bool:
        for events in self._events.values():
            while events and events[0][1].query():
                events.pop(0)
                self._seen += 1
        return self._seen == self._submitted

    def finish(self) -> None:
        """Its thread dies of an error; then `done` is never true."""

    def poison_slots(self) -> None:
        self.host.poison()

    def wrong_slots(self) -> int:
        return self.host.wrong()


class VllmMethods:
    """All methods by name. A context manager, which ends what they have started.

    Args:
        setup: of vLLM's.
        ours: of this library's; the same one, or one of its own.
    """

    def __init__(self, lab: Lab, classes: TransferClasses, setup: TensorSetup, ours: TensorSetup) -> None:
        with ExitStack() as undo:
            worker = WorkerMethod(classes, setup, undo)
            self.by_name: dict[str, VllmMethod] = {
                ENGINE: EngineMethod(lab, ours, undo),
                ENGINE_COPIES: EngineMethod(lab, ours, undo, sm_limit=0),
                WORKER: worker,
                BACKEND: BackendMethod(classes, setup, worker.host, undo),
            }
            self._undo = undo.pop_all()

    def __enter__(self) -> VllmMethods:
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()
