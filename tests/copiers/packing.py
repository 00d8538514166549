"""Engines with small rings, staging memory that is poisoned, and programs whose bytes are wrong if one of the waits of
packed transfers is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from helpers import STAGING, Rig, all_are, change_streams, release
from transfers import intercepted

from kvoffload import NO_WAIT, Direction, Job
from kvoffload.copiers import PackCopier, StagingRing, copier_set, pack
from kvoffload.copiers.pack import PartOfBlocks
from kvoffload.kernels import LoadedKernel
from kvoffload.planning.transfer_plan import BlockPlan
from kvoffload.tuning import CopierName

PACK: CopierName = "pack"
OPTIONS: dict[str, Any] = {"num_blocks": 40, "num_slots": 40, "staging_bytes": STAGING}  # of a rig for these programs
POISON = 0xEE
COPIES = ("cuMemcpyBatchAsync", "cuMemcpyAsync", "memcpy_batch_async", "memcpy_batch_async_v2")


def pieces_of_one_block(monkeypatch: pytest.MonkeyPatch, places: int | None, block_bytes: int = 0) -> None:
    """Pieces of one block, in engines that are made later; rings of so many places for blocks of that size."""
    monkeypatch.setattr(pack, "PIECE_BYTES", 1)
    if places is not None:
        monkeypatch.setattr(copier_set, "ring_bytes", lambda *_: places * (256 - block_bytes // -256 * 256))


def carry_by_group(monkeypatch: pytest.MonkeyPatch, *copiers: CopierName) -> None:
    """From now on each group is carried by the copier at its place here, unless the caller names one."""
    select = copier_set.CopierSet.select

    def by_group(made: copier_set.CopierSet, plan: BlockPlan, wanted: Any, *rest: bool) -> Any:
        return select(made, plan, wanted or copiers[plan.group_index], *rest)

    monkeypatch.setattr(copier_set.CopierSet, "select", by_group)


def poison_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that a piece leaves in its place are overwritten on its second stream before the place is free."""
    sizes: dict[int, int] = {}
    stage, take = PackCopier.stage, StagingRing.take

    def taking(ring: StagingRing, nbytes: int) -> pack.Place:
        place = take(ring, nbytes)
        sizes[place.address] = nbytes
        return place

    def poisoning(copier: PackCopier, work: BlockPlan | PartOfBlocks, order: Any) -> pack.Piece | None:
        piece = stage(copier, work, order)
        if piece is None:
            return None
        blocks = work.blocks if isinstance(work, PartOfBlocks) else work
        name = "copies" if blocks.direction is Direction.STORE else "kernel"
        submit, address, table = getattr(piece, name), piece.place.address, -(-16 * len(blocks) // 256) * 256

        def second(stream: int) -> None:
            submit(stream)
            piece.place.ring._driver.fill(address + table, POISON, sizes[address] - table, stream)

        return replace(piece, copies=second) if name == "copies" else replace(piece, kernel=second)

    monkeypatch.setattr(StagingRing, "take", taking)
    monkeypatch.setattr(PackCopier, "stage", poisoning)


def rings(bench: Rig) -> tuple[StagingRing, ...]:
    return bench.engine._parts.copiers._rings


def in_use(bench: Rig) -> list[int]:
    """Of the rings of stores and of loads, the places of which something has not ended."""
    return [sum(bool(place.halves) for place in (*ring._places, *ring._left)) for ring in rings(bench)]


def store(bench: Rig, blocks: Any, slots: Any, after: Any = NO_WAIT, method: CopierName = PACK) -> Job:
    return bench.engine.submit(Direction.STORE, blocks, slots, after=after, copier=method)


def load(bench: Rig, slots: Any, blocks: Any, after: Any = NO_WAIT, method: CopierName = PACK) -> Job:
    return bench.engine.submit(Direction.LOAD, blocks, slots, after=after, copier=method)


def hold_the_kernels(monkeypatch: pytest.MonkeyPatch, gate: Any) -> None:
    """Hold the streams of kernels that are launched from now on."""
    queue = LoadedKernel.queue

    def held(kernel: LoadedKernel, stream: int, grid: int) -> None:
        gate.hold(stream)
        queue(kernel, stream, grid)

    monkeypatch.setattr(LoadedKernel, "queue", held)


@contextmanager
def copies_held(bench: Rig, gate: Any) -> Iterator[None]:
    """Hold the streams of contiguous copies that are queued inside."""

    def held(function: Any, *arguments: Any) -> Any:
        gate.hold(int(arguments[-1]))
        return function(*arguments)

    with intercepted(bench.device.driver, COPIES, held):
        yield


def slots_hold(bench: Rig, slots: Any, values: Any) -> bool:
    return all(all_are(bench.slot(slot), value) for slot, value in zip(slots, values, strict=True))


def blocks_hold(bench: Rig, blocks: Any, values: Any) -> bool:
    return all(all_are(bench.block(block), value) for block, value in zip(blocks, values, strict=True))


# programs: whether the bytes are right; each for the wait that it is named after ------------------------------------


def the_kernel_behind_the_caller(bench: Rig, _: pytest.MonkeyPatch) -> bool:
    """A store's kernel reads what the caller's stream still has to write."""
    held = bench.stream()
    bench.gate(held)
    bench.fill(held, 77)
    store(bench, range(4), range(4), after=held)
    release(bench)
    return slots_hold(bench, range(4), [77] * 4)


def the_kernel_behind_a_conflict(bench: Rig, _: pytest.MonkeyPatch) -> bool:
    """A store's kernel reads blocks that a load still has to write."""
    held = bench.stream()
    bench.gate(held)
    load(bench, range(10, 14), range(4), after=held, method="strided")
    store(bench, range(4), range(4))
    release(bench)
    return slots_hold(bench, range(4), range(110, 114))


def the_copies_behind_their_kernel(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> bool:
    hold_the_kernels(monkeypatch, bench.gate())
    store(bench, range(4), range(4))
    release(bench)
    return slots_hold(bench, range(4), range(1, 5))


def the_kernel_behind_its_copies(bench: Rig, _: pytest.MonkeyPatch) -> bool:
    with copies_held(bench, bench.gate()):
        load(bench, range(4), range(4))
    release(bench)
    return blocks_hold(bench, range(4), range(100, 104))


def copies_of_later_pieces_behind_a_conflict(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> bool:
    """They are on other streams than those of the first piece, which waits for the store into their slots."""
    change_streams(monkeypatch)
    held = bench.stream()
    bench.gate(held)
    store(bench, range(4), range(4), after=held, method="strided")
    load(bench, range(4), range(10, 14))
    release(bench)
    return blocks_hold(bench, range(10, 14), range(1, 5))


def a_writer_behind_all_pieces(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The caller overwrites blocks once the last piece, on another stream than the first, has read them."""
    change_streams(monkeypatch)
    reader, scratch = bench.stream(), bench.device.allocate(len(bench.slot(0)))
    with copies_held(bench, bench.gate()):
        store(bench, [0], [0])
    store(bench, [0, 1], [1, 2]).order_before(reader)
    with bench.device.current():
        bench.device.driver.copy(scratch.address, bench.slot(0).ctypes.data, scratch.nbytes, reader)
    release(bench)
    bench.synchronize(reader)
    return all_are(scratch.to_numpy(), 1)


def a_load_behind_a_load(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Two loads of one block; the second wins, though the copies of the first are late."""
    change_streams(monkeypatch)
    with copies_held(bench, bench.gate()):
        load(bench, [1], [5])
    load(bench, [2], [5], method="strided")
    release(bench)
    return blocks_hold(bench, [5], [102])


PROGRAMS = (
    the_kernel_behind_the_caller,
    the_kernel_behind_a_conflict,
    the_copies_behind_their_kernel,
    the_kernel_behind_its_copies,
    copies_of_later_pieces_behind_a_conflict,
    a_writer_behind_all_pieces,
    a_load_behind_a_load,
)


def a_place_that_is_read(bench: Rig, _: pytest.MonkeyPatch) -> bool:
    """The ring has one place. The second store's kernel is ready, while the first one's copies wait."""
    with copies_held(bench, bench.gate()):
        store(bench, [0], [0])
    store(bench, [1], [1])
    release(bench)
    return slots_hold(bench, range(2), range(1, 3))


def a_place_that_is_unpacked(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The ring has one place. The second load's copies are ready, while the first one's kernel waits."""
    with monkeypatch.context() as patch:
        hold_the_kernels(patch, bench.gate())
        load(bench, [0], [10])
    load(bench, [1], [11])
    release(bench)
    return blocks_hold(bench, [10, 11], [100, 101])


PROGRAMS_OF_ONE_PLACE = (a_place_that_is_read, a_place_that_is_unpacked)
