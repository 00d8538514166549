"""Programs whose bytes are wrong if one of the two parts of a split transfer does not wait, or is not waited for."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import Rig, all_are, release

from kvoffload import NO_WAIT, Direction, Job
from kvoffload.kernels import LoadedKernel
from kvoffload.tuning import CopyMethod

HALF = CopyMethod("split", 2, 0.5)
OPTIONS: dict[str, Any] = {"num_blocks": 40, "num_slots": 40, "sm_limit": 4}  # of a rig for these programs


def store(bench: Rig, blocks: Any, slots: Any, after: Any = NO_WAIT, method: CopyMethod = HALF) -> Job:
    return bench.engine.submit(Direction.STORE, blocks, slots, after=after, copier=method)


def load(bench: Rig, slots: Any, blocks: Any, after: Any = NO_WAIT, method: CopyMethod = HALF) -> Job:
    return bench.engine.submit(Direction.LOAD, blocks, slots, after=after, copier=method)


def block_bytes(bench: Rig) -> int:
    """Bytes of a block over all planes."""
    return sum(plane.block_bytes for plane in bench.planes)


def hold_the_kernel(monkeypatch: pytest.MonkeyPatch, gate: Any) -> None:
    """Between a transfer's start and its kernel."""
    queue = LoadedKernel.queue

    def held(kernel: LoadedKernel, stream: int, grid: int) -> None:
        gate.hold(stream)
        queue(kernel, stream, grid)

    monkeypatch.setattr(LoadedKernel, "queue", held)


def a_store_behind_a_writer(bench: Rig, _: pytest.MonkeyPatch) -> bool:
    """The caller's stream still has to write what is stored: whether the store has it."""
    held = bench.stream()
    bench.gate(held)
    bench.fill(held, 77)
    store(bench, range(20), range(20), after=held)
    release(bench)
    return all_are(bench.engine.slots[:20, : block_bytes(bench)], 77)


def a_load_behind_a_reader(bench: Rig, _: pytest.MonkeyPatch) -> bool:
    """The caller's stream still has to read what a load overwrites: whether it read the old bytes."""
    held, scratch = bench.stream(), bench.device.allocate(block_bytes(bench))
    bench.gate(held)
    bench.copy_block(held, scratch.address, 5)
    load(bench, range(20), range(20), after=held)
    release(bench)
    bench.synchronize(held)
    return all_are(scratch.to_numpy(), 6)


def a_load_behind_its_store(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The load's slots are written by the store's kernel, which is late."""
    hold_the_kernel(monkeypatch, bench.gate())
    store(bench, range(20), range(20))
    load(bench, range(19, 9, -1), range(20, 30), method=CopyMethod("strided"))
    release(bench)
    return [int(bench.block(block)[0]) for block in range(20, 30)] == list(range(20, 10, -1))


def a_store_behind_a_store(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Two stores to the same slots: the second one wins, even when the first one's kernel is late."""
    hold_the_kernel(monkeypatch, bench.gate())
    store(bench, range(20), range(20))
    store(bench, range(20, 40), range(20), method=CopyMethod("strided"))
    release(bench)
    return all(all_are(bench.slot(slot), slot + 21) for slot in range(20))


def a_writer_behind_order_before(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The caller overwrites, on its stream, what the store's late kernel still has to read."""
    hold_the_kernel(monkeypatch, bench.gate())
    writer = bench.stream()
    store(bench, range(20), range(20)).order_before(writer)
    bench.fill(writer, 88)
    release(bench)
    return all(all_are(bench.slot(slot), slot + 1) for slot in range(20))


def a_reader_behind_order_before(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The caller reads, on its stream, what the load's late kernel still has to write."""
    hold_the_kernel(monkeypatch, bench.gate())
    reader, scratch = bench.stream(), bench.device.allocate(block_bytes(bench))
    load(bench, range(20), range(20)).order_before(reader)
    bench.copy_block(reader, scratch.address, 15)
    release(bench)
    bench.synchronize(reader)
    return all_are(scratch.to_numpy(), 115)


PROGRAMS = {  # by what must wait for what: the second part for the start, or the end for the first part
    a_store_behind_a_writer: "start",
    a_load_behind_a_reader: "start",
    a_load_behind_its_store: "join",
    a_store_behind_a_store: "join",
    a_writer_behind_order_before: "join",
    a_reader_behind_order_before: "join",
}
