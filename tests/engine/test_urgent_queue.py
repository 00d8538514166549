"""Urgent loads among many stores and loads that wait on the host: what is queued when, what ends when, every byte.

The order is that of the driver's calls and of the engine's records. A gate holds the first transfer of each direction
back on the device, so that what is submitted meanwhile waits on the host, however fast the device is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from helpers import COPY_ENGINE_ONLY, STAGING, Rig, all_are, number_blocks, release, rig, warm_up, whole
from transfers import COPY_CALLS, intercepted, queueing, transfer_of

import kvoffload
from kvoffload import NO_WAIT, GroupTransfer, Job, KVLayout, OffloadEngine
from kvoffload.calibration.compute import MEDIUM, SMALL, Computation
from kvoffload.testing import Mirror
from kvoffload.tuning import CopierName

pytestmark = pytest.mark.timeout(300)

PLANES, BLOCKS = 8, 64
MANY = 20  # transfers of each direction, of one block each, that an urgent load is submitted behind


def block_bytes(device: kvoffload.Device) -> int:
    """Of a plane: on a GPU so many that copies take longer than their calls."""
    return 256 if device.simulated else 64 << 10


@contextmanager
def bounded(device: kvoffload.Device, blocks: int = 1, **options: Any) -> Iterator[Rig]:
    """A rig whose driver is given so many blocks of each direction at a time; 0: one operation."""
    nbytes = block_bytes(device)
    bound = max(1, blocks * PLANES * nbytes)
    sizes = {"planes": PLANES, "block_bytes": nbytes, "num_blocks": BLOCKS, "num_slots": BLOCKS}
    with rig(device, **sizes, most_queued_bytes=bound, **options) as made:
        warm_up(made)
        yield made


@pytest.fixture
def bench(each_device: kvoffload.Device) -> Iterator[Rig]:
    """The driver is given one operation of each direction at a time."""
    with bounded(each_device, blocks=0) as made:
        yield made
        made.engine.drain(30)
        whole(made.engine)


@dataclass
class Calls:
    """Which transfer each copy call of the driver was for, and which loads had ended by then.

    Attributes:
        of: numbers of the jobs, in the order of the calls.
        ended: with each call, those of the loads `watched` that were known to have ended.
    """

    engine: OffloadEngine
    watched: list[Job] = field(default_factory=list)
    of: list[int] = field(default_factory=list)
    ended: list[set[int]] = field(default_factory=list)

    def note(self, function: Callable[..., Any], *arguments: Any) -> Any:
        transfer = queueing(self.engine)
        if transfer is not None:
            self.of.append(transfer.id)
            self.ended.append({job.id for job in self.watched if transfer_of(job).finished})
        return function(*arguments)

    def order(self, *jobs: Job) -> list[int]:
        """Indices of these jobs in the order in which their first copies were queued."""
        ids = [job.id for job in jobs]
        return list(dict.fromkeys(ids.index(each) for each in self.of if each in ids))

    def ended_before(self, job: Job) -> set[int]:
        """Numbers of the loads that had ended when the first copy of a job was queued."""
        return self.ended[self.of.index(job.id)]


@contextmanager
def watched(bench: Rig) -> Iterator[Calls]:
    calls = Calls(bench.engine)
    with intercepted(bench.device.driver, COPY_CALLS, calls.note):
        yield calls


@dataclass
class Queue:
    """Transfers of one block each, of both directions: store `n` of block `n` to slot `n`; load `n` of slot `32 + n` to
    block `32 + n`. The first of each direction is held back by a gate, the others on the host.
    """

    stores: list[Job]
    loads: list[Job]

    @classmethod
    def of(cls, bench: Rig, copier: CopierName | None = None) -> Queue:
        stream = bench.stream()
        bench.gate(stream)
        stores, loads = [], []
        for number in range(MANY):
            after = NO_WAIT if number else stream
            stores.append(bench.engine.store([number], [number], after=after, copier=copier))
            loads.append(bench.engine.load([32 + number], [32 + number], after=after, copier=copier))
        assert [bool(transfer_of(job).segments) for job in loads] == [True] + [False] * (MANY - 1)
        return cls(stores, loads)

    def check(self, bench: Rig) -> None:
        for number in range(MANY):
            assert all_are(bench.slot(number), number + 1)
            assert all_are(bench.block(32 + number), 132 + number)


def order_of_ends(bench: Rig, *jobs: Job) -> list[int]:
    """Indices of these jobs in the order in which the engine has found their ends."""
    ids = [job.id for job in jobs]
    return [ids.index(result.job_id) for result in bench.engine.poll() if result.job_id in ids]


BEHIND_THE_FIRST = [0, MANY, *range(1, MANY)]


@pytest.mark.parametrize("copier", ["strided", "batch", "loop", "pack"])
def test_an_urgent_load_has_ended_when_those_that_wait_are_queued(
    each_device: kvoffload.Device, copier: CopierName
) -> None:
    with bounded(each_device, blocks=0, staging_bytes=STAGING if copier == "pack" else 0) as bench:
        with watched(bench) as calls:
            queue = Queue.of(bench, copier)
            urgent = bench.engine.load([60], [60], after=NO_WAIT, copier=copier, urgent=True)
            calls.watched.append(urgent)
            release(bench, queue.stores[0], queue.loads[0], urgent)
        jobs = (*queue.loads, urgent)
        assert calls.order(*jobs) == BEHIND_THE_FIRST
        assert calls.order(*queue.stores) == list(range(MANY))
        assert all(calls.ended_before(job) == {urgent.id} for job in queue.loads[1:])
        assert order_of_ends(bench, *jobs) == BEHIND_THE_FIRST
        queue.check(bench)
        assert all_are(bench.block(60), 160)


def test_who_waits_for_an_urgent_load_waits_for_no_other(bench: Rig) -> None:
    with watched(bench) as calls:
        queue = Queue.of(bench)
        urgent = [bench.engine.load([slot], [slot], after=NO_WAIT, urgent=True) for slot in (60, 61)]
        calls.watched += urgent
        for gate in bench.gates:
            gate.open()
        urgent[1].wait(30)
        assert all_are(bench.block(60), 160)
        assert all_are(bench.block(61), 161)
        bench.engine.drain(30)
    assert calls.order(*queue.loads, *urgent) == [0, MANY, MANY + 1, *range(1, MANY)]
    assert all(calls.ended_before(job) == {each.id for each in urgent} for job in queue.loads[1:])
    queue.check(bench)


def test_an_urgent_load_brings_what_the_last_of_many_stores_has_stored(bench: Rig) -> None:
    """It goes ahead of the loads, and waits for the store that it must follow."""
    with watched(bench) as calls:
        queue = Queue.of(bench)
        last = MANY - 1
        urgent = bench.engine.load([last], [60], after=NO_WAIT, urgent=True)
        release(bench, queue.stores[0], queue.loads[0], urgent)
    assert calls.order(*queue.loads, urgent) == BEHIND_THE_FIRST
    assert calls.order(queue.stores[last], urgent) == [0, 1]
    queue.check(bench)
    assert all_are(bench.block(60), last + 1)


def test_a_load_that_has_begun_stays_ahead_and_the_rest_of_it_is_queued_first(each_device: kvoffload.Device) -> None:
    """Loads of 8 blocks, of which the driver is given 4: the first has begun, so nothing goes in between."""
    with bounded(each_device, blocks=4) as bench:
        stream = bench.stream()
        bench.gate(stream)
        with watched(bench) as calls:
            loads = [
                bench.engine.load(range(at, at + 8), range(at, at + 8), after=stream, copier="loop")
                for at in (0, 8, 16, 24)
            ]
            urgent = bench.engine.load([60], [60], after=NO_WAIT, urgent=True)
            release(bench, *loads, urgent)
        assert calls.order(*loads, urgent) == [0, 4, 1, 2, 3]
        assert order_of_ends(bench, *loads, urgent) == [0, 4, 1, 2, 3]
        begun = calls.of.index(urgent.id)
        assert loads[0].id not in calls.of[begun:]
        for block in range(32):
            assert all_are(bench.block(block), 100 + block)
        assert all_are(bench.block(60), 160)


def test_concurrent_with_a_product_it_waits_for_what_reads_its_block(bench: Rig) -> None:
    """The reader is queued behind products on one stream. The urgent load follows that stream, the others do not."""
    device, products = bench.device, 2 if bench.device.simulated else 200
    scratch = device.allocate(PLANES * bench.planes[0].block_bytes)
    with Computation(device, SMALL if device.simulated else MEDIUM) as computation:
        with device.current():
            computation.queue(1)
        bench.synchronize(computation.stream)
        expected = computation.result.to_numpy()
        computation.result.copy_from(np.zeros_like(expected))
        with watched(bench) as calls:
            queue = Queue.of(bench)
            bench.gates[-1].hold(computation.stream)
            with device.current():
                computation.queue(products)
            bench.copy_block(computation.stream, scratch.address, 60)
            urgent = bench.engine.load([60], [60], after=computation.stream, urgent=True)
            release(bench, queue.loads[0], urgent)
        bench.synchronize(computation.stream)
        assert calls.order(*queue.loads, urgent) == BEHIND_THE_FIRST
        assert np.array_equal(computation.result.to_numpy(), expected)
    assert all_are(scratch.to_numpy(), 61), "the product's stream has read the block after the load"
    assert all_are(bench.block(60), 160)
    queue.check(bench)


# several groups -------------------------------------------------------------------------------------------------------


@dataclass
class TwoGroups:
    """An engine over two groups in memory of their own; block `b` of them holds `b + 1` and `b + 101`."""

    bench: Rig
    mirror: Mirror

    def load(self, first: int, **options: Any) -> Job:
        """Load two blocks of each group from slots `first` to `first + 3`, into blocks of the same numbers."""
        transfers = []
        for group in (0, 1):
            ids = [first + 2 * group, first + 2 * group + 1]
            transfers.append(GroupTransfer(group, ids, ids))
            self.mirror.expect("load", ids, ids, group=group)
        return self.bench.engine.load_groups(transfers, **options)


@pytest.fixture
def two_groups(each_device: kvoffload.Device) -> Iterator[TwoGroups]:
    nbytes = block_bytes(each_device)
    groups = [each_device.allocate_planes(PLANES, block_bytes=nbytes, num_blocks=BLOCKS) for _ in range(2)]
    number_blocks(groups[0], 1)
    number_blocks(groups[1], 101)
    buffers = [planes[0].owner for planes in groups]
    assert isinstance(buffers[0], kvoffload.DeviceBuffer)
    options: dict[str, Any] = {"most_queued_bytes": 2 * PLANES * nbytes, **COPY_ENGINE_ONLY}
    engine = OffloadEngine(KVLayout(groups), device=each_device, num_slots=BLOCKS, **options)
    bench = Rig(each_device, engine, buffers[0], groups[0])
    try:
        warm_up(bench)
        number_blocks(groups[0], 1)
        yield TwoGroups(bench, Mirror(engine, buffers))  # type: ignore[arg-type]
        engine.drain(30)
        whole(engine)
    finally:
        bench.close()


def test_two_groups_in_one_urgent_load(two_groups: TwoGroups) -> None:
    bench = two_groups.bench
    stream = bench.stream()
    bench.gate(stream)
    with watched(bench) as calls:
        loads = [two_groups.load(4 * number, after=NO_WAIT if number else stream) for number in range(8)]
        assert not transfer_of(loads[1]).segments
        urgent = two_groups.load(48, after=NO_WAIT, urgent=True)
        release(bench, loads[0], urgent)
    expected = [0, 8, *range(1, 8)]
    assert calls.order(*loads, urgent) == expected
    assert order_of_ends(bench, *loads, urgent) == expected
    two_groups.mirror.check()


# random, and the end --------------------------------------------------------------------------------------------------


def random_transfers(bench: Rig, mirror: Mirror, rng: np.random.Generator, count: int) -> None:
    """Transfers of 1 to 5 random blocks, by random copiers; half of the loads are urgent."""
    copiers: list[CopierName | None] = ["strided", "batch", "loop", None]
    for _ in range(count):
        size = int(rng.integers(1, 6))
        blocks, slots = rng.permutation(BLOCKS)[:size].tolist(), rng.permutation(BLOCKS)[:size].tolist()
        copier = copiers[int(rng.integers(len(copiers)))]
        if rng.random() < 0.4:
            bench.engine.store(blocks, slots, after=NO_WAIT, copier=copier)
            mirror.expect("store", blocks, slots)
        else:
            bench.engine.load(slots, blocks, after=NO_WAIT, copier=copier, urgent=bool(rng.random() < 0.5))
            mirror.expect("load", blocks, slots)


@pytest.mark.parametrize("bound", [1, 4, 64])
def test_random_transfers_of_both_directions_give_the_bytes_of_program_order(
    each_device: kvoffload.Device, bound: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    with bounded(each_device, blocks=bound) as bench:
        mirror = Mirror(bench.engine, [bench.slab])
        for _ in range(2 if each_device.simulated else 10):
            stream = bench.stream()
            gate = bench.gate(stream)
            held = bench.engine.load([0], [0], after=stream)
            mirror.expect("load", [0], [0])
            random_transfers(bench, mirror, rng, 40)
            gate.open()
            held.wait(30)
            random_transfers(bench, mirror, rng, 40)
            bench.engine.drain(60)
            mirror.check()


def test_close_waits_for_all_that_is_held_and_keeps_the_order(each_device: kvoffload.Device) -> None:
    """A close that runs out of time changes nothing: an urgent load submitted after it goes ahead of the others."""
    with bounded(each_device) as bench:
        with watched(bench) as calls:
            queue = Queue.of(bench)
            with pytest.raises(TimeoutError):
                bench.engine.close(timeout=0)
            urgent = bench.engine.load([60], [60], after=NO_WAIT, urgent=True)
            for gate in bench.gates:
                gate.open()
            bench.engine.close(timeout=60)
        jobs = [*queue.loads, urgent]
        assert calls.order(*jobs) == BEHIND_THE_FIRST
        assert calls.order(*queue.stores) == list(range(MANY))
        assert all(job.outcome().error is None for job in (*jobs, *queue.stores))
        queue.check(bench)
        assert all_are(bench.block(60), 160)
        with pytest.raises(kvoffload.ClosedError):
            bench.engine.load([60], [60], urgent=True)
