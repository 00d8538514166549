"""What `bench vllm` compares: this library's engine, vLLM's `CPUOffloadingWorker` and its `DmaCopyBackend`.

All copy the same blocks of one int8 PyTorch tensor (planes, blocks, block_bytes), as vLLM allocates it. The engine's
slots are its own; the two classes of vLLM share pinned tensors, one for each plane, which the worker has allocated.
Every transfer is ordered after PyTorch's current stream, as vLLM's worker does it; that stream is idle.

Of each direction the first places are used: `blocks[direction]` and `slots[direction]` are random, and no two blocks
are adjacent. All bytes are written and compared by the GPU, plainly: `right[:, i]` is what place `i` holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvoffload.engine.engine import OffloadEngine
from kvoffload.internal.types import Int64Array
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Plane
from kvoffload.planning.transfer_plan import Direction
from kvoffload_bench.harness import Lab, Undoing
from kvoffload_bench.series import EngineSubmitter, SeriesMethod
from kvoffload_bench.vllm_classes import TransferClasses

ENGINE, ENGINE_COPIES = "kvoffload", "kvoffload, staging_bytes=0"
WORKER, BACKEND = "CPUOffloadingWorker", "DmaCopyBackend"
OURS, THEIRS = (ENGINE, ENGINE_COPIES), (WORKER, BACKEND)
POISON = 0x25
_KIB = 1024
_SERIES_BYTES = 128 << 20
_MOST_TRANSFERS = 32


class Geometry(NamedTuple):
    """Planes, and bytes of a block in each."""

    planes: int
    block_bytes: int

    @property
    def name(self) -> str:
        return f"{self.planes}x{self.block_bytes // _KIB}K"


class Series(NamedTuple):
    """A series of one direction: `transfers` transfers of `blocks` blocks, each of blocks and slots of its own."""

    blocks: int
    transfers: int

    @property
    def places(self) -> int:
        return self.blocks * self.transfers

    def of(self, index: int) -> slice:
        """The places of a transfer."""
        return slice(index * self.blocks, (index + 1) * self.blocks)


def series_of(geometry: Geometry, blocks: int) -> Series:
    """As many transfers as make 128 MiB, but at most 32."""
    wanted = _SERIES_BYTES // (blocks * geometry.planes * geometry.block_bytes)
    return Series(blocks, min(max(wanted, 1), _MOST_TRANSFERS))


class Ids(NamedTuple):
    """Of a transfer: int64, (blocks,) each."""

    blocks: Int64Array
    slots: Int64Array


class TensorSetup:
    """The tensor, and which of its blocks are copied.

    Args:
        torch: PyTorch.
        where: the PyTorch device.
        geometry: of a block.
        most: places of a direction, at most.
        seed: of blocks, slots and bytes.

    Attributes:
        cache: int8, (planes, 4 * most, block_bytes).
        right: by direction, int8, (planes, most, block_bytes): what the blocks hold.
        blocks, slots: by direction, int64, (places,); of the series that `take` was called with.
        num_slots: that a method's host memory must have.
        series: of the last `take`.
    """

    def __init__(self, torch: Any, where: Any, geometry: Geometry, most: int, seed: int) -> None:
        self.torch, self.where, self.geometry, self._most = torch, where, geometry, most
        self.num_slots = 2 * most
        self._random = np.random.default_rng(seed)
        shape = (geometry.planes, 4 * most, geometry.block_bytes)
        self.cache = torch.full(shape, POISON, dtype=torch.int8, device=where)
        generator = torch.Generator(device=where)
        generator.manual_seed(seed)
        bits: dict[str, Any] = {"dtype": torch.int8, "device": where, "generator": generator}
        rows = (geometry.planes, most, geometry.block_bytes)
        self.right = {direction: torch.randint(-128, 128, rows, **bits) for direction in Direction}
        even = self._random.permutation(np.arange(0, 4 * most, 2, dtype=np.int64))
        self._all = {Direction.STORE: even[:most], Direction.LOAD: even[most:]}
        self.blocks: dict[Direction, Int64Array] = {}
        self.slots: dict[Direction, Int64Array] = {}

    def take(self, series: Series) -> None:
        """Choose blocks and slots of both directions, and write the right bytes into the blocks to be stored.

        Slots of stores are the first `series.places`, those of loads follow slot `most`, both in a random order.
        """
        self.series, places = series, series.places
        for number, direction in enumerate((Direction.STORE, Direction.LOAD)):
            self.blocks[direction] = self._all[direction][:places]
            self.slots[direction] = self._random.permutation(np.arange(places, dtype=np.int64)) + number * self._most
        stored = self.tensor(self.blocks[Direction.STORE])
        self.cache[:, stored] = self.right[Direction.STORE][:, :places]
        self.synchronize()

    def first_slot(self, direction: Direction) -> int:
        """The lowest slot of a direction."""
        return 0 if direction is Direction.STORE else self._most

    def by_slot(self, direction: Direction) -> Any:
        """What the slots of a direction hold, lowest slot first: int8, (planes, places, block_bytes)."""
        order = np.argsort(self.slots[direction])
        return self.right[direction][:, self.tensor(order)]

    def poison_blocks(self) -> None:
        """Overwrite the blocks that loads write."""
        self.cache[:, self.tensor(self.blocks[Direction.LOAD])] = POISON
        self.synchronize()

    def wrong_blocks(self) -> int:
        """Rows of the blocks that loads write that are wrong."""
        found = self.cache[:, self.tensor(self.blocks[Direction.LOAD])]
        return self.differing(found, self.right[Direction.LOAD][:, : self.series.places])

    def differing(self, found: Any, right: Any) -> int:
        """How many rows, each the bytes of a block in a plane, differ."""
        words = self.torch.int64
        return int((found.contiguous().view(words) != right.contiguous().view(words)).any(dim=-1).sum().item())

    def by_transfer(self, direction: Direction) -> list[Ids]:
        """Blocks and slots of each transfer of the series."""
        return [
            Ids(self.blocks[direction][places].copy(), self.slots[direction][places].copy())
            for places in map(self.series.of, range(self.series.transfers))
        ]

    def tensor(self, values: Int64Array) -> Any:
        return self.torch.from_numpy(np.ascontiguousarray(values)).to(self.where)

    def synchronize(self) -> None:
        self.torch.cuda.synchronize(self.where)

    def expandable(self) -> bool:
        """Whether PyTorch's allocator has taken the tensor from an expandable segment."""
        address = self.cache.data_ptr()
        return any(
            segment.get("is_expandable", False)
            for segment in self.torch.cuda.memory_snapshot()
            if segment["address"] <= address < segment["address"] + segment["total_size"]
        )

    def close(self) -> None:
        """Give the memory back to the driver."""
        del self.cache, self.right
        self.torch.cuda.empty_cache()


# the host's side ------------------------------------------------------------------------------------------------------


class TensorTargets:
    """What the series of a method write: blocks of the tensor, and slots.

    Args:
        memory: the method's host memory: tensors of a row for each slot.
        planes: its parts by plane, (slots, block_bytes) each.
    """

    def __init__(self, setup: TensorSetup, memory: Sequence[Any], planes: Sequence[Any]) -> None:
        self._setup, self._memory, self.planes = setup, memory, planes

    def _rows(self, tensors: Sequence[Any], direction: Direction) -> list[Any]:
        first = self._setup.first_slot(direction)
        return [tensor[first : first + self._setup.series.places] for tensor in tensors]

    def prepare(self) -> None:
        """Write what loads read into the slots."""
        right = self._setup.by_slot(Direction.LOAD)
        for rows, of_plane in zip(self._rows(self.planes, Direction.LOAD), right, strict=True):
            rows.copy_(of_plane, non_blocking=True)
        self._setup.synchronize()

    def poison(self, directions: Sequence[Direction]) -> None:
        setup = self._setup
        if Direction.STORE in directions:
            for rows in self._rows(self._memory, Direction.STORE):
                poison = setup.torch.full(rows.shape, POISON, dtype=setup.torch.int8, device=setup.where)
                rows.copy_(poison, non_blocking=True)
            setup.synchronize()
        if Direction.LOAD in directions:
            setup.poison_blocks()

    def wrong(self, directions: Sequence[Direction]) -> int:
        setup, wrong = self._setup, 0
        if Direction.STORE in directions:
            rows = self._rows(self.planes, Direction.STORE)
            found = setup.torch.stack([each.to(setup.where, non_blocking=True) for each in rows])
            wrong = setup.differing(found, setup.by_slot(Direction.STORE))
        return wrong + (setup.wrong_blocks() if Direction.LOAD in directions else 0)


# submitters -----------------------------------------------------------------------------------------------------------


class WorkerSubmitter:
    """vLLM's `CPUOffloadingWorker`, with one group and one block a chunk. It polls `get_finished`, as vLLM does."""

    def __init__(self, classes: TransferClasses, setup: TensorSetup, undo: ExitStack) -> None:
        self.setup, self._classes, base = setup, classes, classes.base
        size = setup.geometry.block_bytes
        caches = base.CanonicalKVCaches(
            tensors=[base.CanonicalKVCacheTensor(plane, size) for plane in setup.cache],
            group_data_refs=[[base.CanonicalKVCacheRef(number, size) for number in range(setup.geometry.planes)]],
        )
        self.worker = classes.worker.CPUOffloadingWorker(caches, blocks_per_chunk=1, num_cpu_chunks=setup.num_slots)
        planes = list(self.worker._store_handler.dst_tensors)
        self.host = TensorTargets(setup, planes, planes)
        undo.callback(self.worker.shutdown)
        self._next, self._running = 0, set[int]()
        self._failed: list[Any] = []

    def take(self) -> None:
        """Prepare the transfers of the series that the setup has taken."""
        setup, base, common = self.setup, self._classes.base, self._classes.common
        self._specs = {
            direction: [
                (
                    base.GPULoadStoreSpec(ids.blocks.tolist(), [setup.series.blocks], [0]),
                    common.CPULoadStoreSpec(ids.slots.tolist()),
                )
                for ids in setup.by_transfer(direction)
            ]
            for direction in Direction
        }

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


class BackendSubmitter:
    """vLLM's `DmaCopyBackend`: a thread submits the copies; the end is seen as vLLM's own worker sees it, by events."""

    def __init__(self, classes: TransferClasses, setup: TensorSetup, host: TensorTargets, undo: ExitStack) -> None:
        self.setup, self.host, torch = setup, host, setup.torch
        lowest = max(torch.cuda.Stream.priority_range())
        load, store = (torch.cuda.Stream(setup.where, priority=lowest) for _ in range(2))
        self.backend = classes.backend.DmaCopyBackend()
        undo.callback(self.backend.shutdown)
        names = [f"plane {number}" for number in range(setup.geometry.planes)]
        device, pinned = dict(zip(names, setup.cache, strict=True)), dict(zip(names, host.planes, strict=True))
        self.backend.init(device, pinned, setup.where, load, store)
        self._computed = torch.Event()
        self._events: dict[bool, list[tuple[int, Any]]] = {True: [], False: []}  # by whether it is a store
        self._submitted = self._seen = 0

    def take(self) -> None:
        """Prepare the transfers of the series that the setup has taken."""
        self._ids = {
            direction: [(ids.blocks.tolist(), ids.slots.tolist()) for ids in self.setup.by_transfer(direction)]
            for direction in Direction
        }

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


class VllmMethods(Undoing):
    """All methods. A context manager, which ends what they have started."""

    def __init__(self, lab: Lab, classes: TransferClasses, setup: TensorSetup) -> None:
        self._setup, size = setup, setup.geometry.block_bytes
        planes = [
            Plane(plane.data_ptr(), block_bytes=size, num_blocks=plane.shape[0], owner=setup.cache)
            for plane in setup.cache
        ]
        self._engines: dict[str, OffloadEngine] = {}
        self._targets: dict[str, TensorTargets] = {}
        with ExitStack() as undo:
            self._worker = WorkerSubmitter(classes, setup, undo)
            self._backend = BackendSubmitter(classes, setup, self._worker.host, undo)
            options: dict[str, dict[str, Any]] = {ENGINE: {}, ENGINE_COPIES: {"staging_bytes": 0}}
            for name, given in options.items():
                engine = OffloadEngine(KVLayout([planes]), device=lab.device, num_slots=setup.num_slots, **given)
                self._engines[name] = undo.enter_context(engine)
                slots = setup.torch.from_numpy(engine.slots.view("int8"))
                parts = [slots[:, first : first + size] for first in range(0, len(planes) * size, size)]
                self._targets[name] = TensorTargets(setup, [slots], parts)
            self._undo = undo.pop_all()

    @property
    def profile(self) -> str:
        return self._engines[ENGINE].profile.source

    def take(self, series: Series) -> None:
        """Prepare the transfers of a series, and write what loads read."""
        self._setup.take(series)
        for targets in (*self._targets.values(), self._worker.host):
            targets.prepare()
        for submitter in (self._worker, self._backend):
            submitter.take()

    def of(self, directions: Sequence[Direction]) -> dict[str, SeriesMethod]:
        """By name; of these directions at once."""
        setup = self._setup
        series, nbytes = setup.series, setup.series.blocks * setup.geometry.planes * setup.geometry.block_bytes
        after = setup.torch.cuda.current_stream().cuda_stream
        transfers = {direction: [[ids] for ids in setup.by_transfer(direction)] for direction in directions}
        found = {}
        for name, engine in self._engines.items():
            copiers = dict.fromkeys(directions)
            submitter = EngineSubmitter(engine, transfers, copiers, after=after, series=series.transfers)
            found[name] = SeriesMethod(submitter, self._targets[name], nbytes, submitter.methods)
        found[WORKER] = SeriesMethod(self._worker, self._worker.host, nbytes)
        return found | {BACKEND: SeriesMethod(self._backend, self._worker.host, nbytes)}
