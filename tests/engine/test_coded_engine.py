"""Engines whose slots hold their blocks coded: bytes against the reference, blocks that do not fit, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coded import BLOCK_BYTES, OF_LAYOUT, Values, coded, normal, read_blocks, unfit, write_blocks
from helpers import simulated
from packing import pieces_of_one_block, poison_places
from seeds import rest_long, seeds

import kvoffload
import kvoffload.testing
from kvoffload import (
    NO_WAIT,
    CapabilityError,
    GroupTransfer,
    KVLayout,
    LayoutError,
    OffloadEngine,
    ShardedEngine,
    ShardedLayout,
    TransferError,
)
from kvoffload.layout.planes import Group


def expected(group: Group, blocks: Values) -> np.ndarray[Any, Any]:
    """The bytes of a slot of these blocks, (blocks, planes, values)."""
    assert group.coding is not None
    return group.coding.encode(blocks)[0].reshape(-1)


@pytest.mark.parametrize("block_major", [False, True])
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("seed", rest_long(seeds(3), 1))
def test_random_transfers_hold_and_return_the_bytes_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, factor: int, block_major: bool, seed: int
) -> None:
    """Nothing but the payload of a slot is written; each block comes back where it is loaded to."""
    pieces_of_one_block(monkeypatch, None)
    poison_places(monkeypatch)
    random = np.random.default_rng(seed)
    blocks = normal(random, 12 * 3 * 256).reshape(12, 3, 256)
    with simulated(seed) as device:
        if block_major:
            planes = device.allocate_blocks(12, planes=3, block_bytes=512)
        else:
            planes = device.allocate_planes(3, block_bytes=512, num_blocks=12, block_stride=528)
        write_blocks(device, planes, blocks)
        layout = KVLayout([planes], blocks_per_slot=factor, codec="bf16-12")
        (group,) = layout.groups
        with OffloadEngine(layout, device=device, num_slots=6) as engine:
            engine.slots[:] = 0xB7
            held: dict[int, Values] = {}
            for _ in range(6):
                chosen = random.permutation(12)[: 2 * factor]
                slots = random.permutation(6)[:2]
                engine.store(chosen, slots, after=NO_WAIT)
                for place, slot in enumerate(slots.tolist()):
                    held[slot] = blocks[chosen[place * factor :][:factor]].copy()
                slot = int(random.choice(list(held)))
                into = random.permutation(12)[:factor]
                engine.load([slot], into, after=NO_WAIT)
                blocks[into] = held[slot]
            engine.drain(60)
            assert all(result.error is None and not result.unfit for result in engine.poll())
            for slot, contents in held.items():
                assert (engine.slots[slot, : group.payload_bytes] == expected(group, contents)).all()
            assert (engine.slots[:, group.payload_bytes :] == 0xB7).all()
            assert (read_blocks(device, planes, range(12)) == blocks).all()


@pytest.mark.parametrize("parts", [3, [[1], [2, 0]]])
def test_loads_in_parts(monkeypatch: pytest.MonkeyPatch, parts: Any) -> None:
    poison_places(monkeypatch)
    with coded(planes=3) as (engine, planes, blocks):
        engine.store([0, 1], [3, 2], after=NO_WAIT)
        if isinstance(parts, list):
            with pytest.raises(ValueError, match=r"copies parts whose planes follow each other.*; give other parts$"):
                engine.load([3, 2], [5, 4], after=NO_WAIT, parts=[[1], [0, 2]])
            parts = [[0], [2, 1]]
        job = engine.load([3, 2], [5, 4], after=NO_WAIT, parts=parts)
        assert job.wait(30).copier == "pack"
        assert (read_blocks(engine.device, planes, [5, 4]) == blocks[[0, 1]]).all()


def test_blocks_that_do_not_fit_are_named_and_not_loaded() -> None:
    """A load of them fails, also if it was submitted before the store had ended; the others of its blocks come."""
    with coded() as (engine, planes, blocks):
        blocks[2, 1] = unfit(blocks[2, 1])
        write_blocks(engine.device, planes, blocks)
        stored = engine.store([1, 2, 3], [5, 6, 7], after=NO_WAIT)
        early = engine.load([6, 5], [0, 4], after=NO_WAIT)
        assert stored.wait(30).unfit == stored.unfit == {6}
        assert stored.error is None
        with pytest.raises(TransferError, match=r"slots \[6\] hold blocks that did not fit the codec"):
            early.wait(30)
        assert early.unfit == {6}
        assert engine.load([5, 7], [6, 7], after=NO_WAIT).wait(30).unfit == frozenset()
        found = read_blocks(engine.device, planes, range(8))
        assert (found[[4, 6, 7]] == blocks[[1, 1, 3]]).all()
        assert (found[0, 1] == blocks[0, 1]).all(), "a chunk that does not fit is left alone"
        late = engine.load([6], [0], after=NO_WAIT)
        late_again = engine.load([6], [0], after=NO_WAIT, parts=2)
        for job in (late, late_again):
            with pytest.raises(TransferError, match="did not fit"):
                job.wait(30)
        blocks[2] = blocks[3]
        write_blocks(engine.device, planes, blocks)
        assert engine.store([2], [6], after=NO_WAIT).wait(30).unfit == frozenset()
        engine.load([6], [0], after=NO_WAIT).wait(30)


def test_unfit_blocks_of_slots_with_several() -> None:
    with coded(blocks_per_slot=2, num_slots=4) as (engine, planes, blocks):
        blocks[[1, 6]] = unfit(blocks[[1, 6]])
        write_blocks(engine.device, planes, blocks)
        assert engine.store(range(8), [3, 2, 1, 0], after=NO_WAIT).wait(30).unfit == {3, 0}


def test_naive_transfers_refuse_a_codec() -> None:
    with simulated() as device:
        layout = KVLayout([device.allocate_planes(1, block_bytes=512, num_blocks=1)], codec="bf16-12")
        pool = np.zeros((1, layout.slot_bytes), np.uint8)
        with pytest.raises(LayoutError, match='codec="raw"'):
            kvoffload.testing.naive_transfer(layout, "store", blocks=[0], slots=[0], memory={}, pool=pool)
        engine = OffloadEngine(layout, device=device, num_slots=1)
        with engine, pytest.raises(LayoutError, match='codec="raw"'):
            kvoffload.testing.Mirror(engine, []).expect("store", [0], [0])


@pytest.mark.parametrize("codec", ["bf16-12", ["bf16-12", "raw"], ["raw", "bf16-12"]])
def test_groups_with_and_without_a_codec(codec: Any) -> None:
    random = np.random.default_rng(3)
    with simulated(1) as device:
        groups = [device.allocate_planes(count, block_bytes=512, num_blocks=6) for count in (2, 3)]
        blocks = [normal(random, 6 * len(planes) * 256).reshape(6, -1, 256) for planes in groups]
        for planes, values in zip(groups, blocks, strict=True):
            write_blocks(device, planes, values)
        with OffloadEngine(KVLayout(groups, codec=codec), device=device, num_slots=8) as engine:
            out = [GroupTransfer(number, [0, 1], [2 * number, 2 * number + 1]) for number in (0, 1)]
            back = [GroupTransfer(number, [4, 5], [2 * number, 2 * number + 1]) for number in (0, 1)]
            engine.store_groups(out, after=NO_WAIT)
            engine.load_groups(back, after=NO_WAIT)
            engine.drain(30)
            assert all(result.error is None for result in engine.poll())
            for number, (group, values) in enumerate(zip(engine.layout.groups, blocks, strict=True)):
                raw = values[[0, 1]].reshape(-1).view(np.uint8)
                coding = expected(group, values[[0, 1]]) if group.coding else raw
                assert (engine.slots[2 * number : 2 * number + 2, : group.payload_bytes].reshape(-1) == coding).all()
                assert (read_blocks(device, groups[number], [4, 5]) == values[[0, 1]]).all()


def test_several_devices_and_a_block_that_fits_on_one_only() -> None:
    random = np.random.default_rng(4)
    devices = [simulated(seed) for seed in (1, 2)]
    layouts, of, blocks = [], [], []
    for number, device in enumerate(devices):
        planes = device.allocate_planes(2, block_bytes=512, num_blocks=6)
        values = normal(random, 6 * 2 * 256).reshape(6, 2, 256)
        if number:
            values[1] = unfit(values[1])
        write_blocks(device, planes, values)
        layouts.append(KVLayout([planes], codec="bf16-12"))
        of.append(planes)
        blocks.append(values)
    with ShardedEngine(ShardedLayout(layouts), devices=devices, num_slots=4) as engine:
        job = engine.store([0, 1], [2, 3], after=[NO_WAIT, NO_WAIT])
        assert job.wait(30).unfit == job.unfit == {3}
        engine.load([2], [5], after=[NO_WAIT, NO_WAIT]).wait(30)
        for device, planes, values in zip(devices, of, blocks, strict=True):
            assert (read_blocks(device, planes, [5])[0] == values[0]).all()
        with pytest.raises(TransferError, match=r"did not fit"):
            engine.load([3], [5], after=[NO_WAIT, NO_WAIT]).wait(30)
    for device in devices:
        device.close()


# what is refused


@pytest.mark.parametrize("copier", ["strided", "batch", "loop"])
def test_other_copiers_are_refused(copier: Any) -> None:
    with coded() as (engine, _, _):
        for submit in (engine.store, engine.load):
            with pytest.raises(ValueError, match=f"copier='{copier}' cannot code, and group 0 has a codec"):
                submit([0], [0], after=NO_WAIT, copier=copier)
        assert engine.in_flight == 0
        report = engine.plan("store", [0], [0])
        assert (report.copier, report.alternatives) == ("pack", ())


@pytest.mark.parametrize("options", [{"staging_bytes": 0}, {"staging_bytes": 1 << 40}])
def test_an_engine_that_cannot_code_is_refused(options: Any) -> None:
    with simulated(memory_bytes=64 << 20) as device:
        planes = device.allocate_planes(2, block_bytes=BLOCK_BYTES, num_blocks=8)
        layout = KVLayout([planes], codec="bf16-12", **OF_LAYOUT)
        with pytest.raises(CapabilityError, match=r"codec=.* needs the copier 'pack'"):
            OffloadEngine(layout, device=device, num_slots=1 << 12, **options)
        assert isinstance(device, kvoffload.Device)


@pytest.mark.parametrize("name", ["cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyBatchAsync"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_driver_errors_fail_jobs_and_nothing_else(name: str, nth: int) -> None:
    """A job that has not failed has its bytes; of a store that has not failed, it is known which blocks do not fit."""
    with coded(planes=1) as (engine, planes, blocks):
        device = engine.device
        blocks[3] = unfit(blocks[3])
        write_blocks(device, planes, blocks)
        engine.store([0, 1], [0, 1], after=NO_WAIT).wait(30)
        assert device.simulator is not None
        device.simulator.faults.fail_call(name, nth=nth)
        stored = engine.store([2, 3], [2, 3], after=NO_WAIT)
        loaded = engine.load([1, 0], [5, 4], after=NO_WAIT)
        engine.drain(30)
        device.simulator.faults.clear()
        assert stored.error is not None or stored.unfit == {3}
        if loaded.error is None:
            assert (read_blocks(device, planes, [4, 5]) == blocks[[0, 1]]).all()
        assert engine.store([2, 3], [2, 3], after=NO_WAIT).wait(30).unfit == {3}
        engine.load([2], [6], after=NO_WAIT).wait(30)
        assert (read_blocks(device, planes, [6]) == blocks[[2]]).all()
