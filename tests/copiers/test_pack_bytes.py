"""The pack copier on the simulated device: the bytes of a naive loop, and what it costs the host."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers import STAGING, rig, whole
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pack_moves import (
    Drawn,
    Move,
    Seeded,
    check_moves,
    expect,
    fill_slots,
    layout_spec,
    load,
    move,
    record_launches,
    separate,
    small_tables,
    store,
    submit,
)
from seeds import rest_long

import kvoffload
from kvoffload import NO_WAIT, Direction, KVLayout, OffloadEngine
from kvoffload.simulator.kernels import LaunchOperation
from kvoffload.testing import Mirror, SimulatedDriver, check_clean_close, scramble

KIB = 1024
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # it takes minutes: kernels are interpreted


def open_simulated(seed: int) -> kvoffload.Device:
    return kvoffload.open_device(backend=SimulatedDriver(seed=seed))


# bytes


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow], phases=NO_SHRINKING)
@given(data=st.data(), seed=st.integers(0, 1 << 16))
def test_any_transfers_move_the_bytes_of_a_naive_loop_and_no_others(data: st.DataObject, seed: int) -> None:
    chance = Drawn(data.draw)
    spec = layout_spec(chance)
    moves = [move(chance, spec) for _ in range(chance.number(1, 4))]
    blocks = chance.number(1, 9)  # nothing is drawn behind this: a draw may end the example, and the device stays open
    device = open_simulated(seed)
    check_moves(device, spec, moves, seed, blocks)
    check_clean_close(device)


@pytest.mark.parametrize("number", rest_long(range(12), 4))
def test_transfers_longer_than_a_table_move_the_same_bytes(
    number: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tables(monkeypatch, blocks=1 + number % 4)
    launches = record_launches(monkeypatch)
    chance = Seeded(seed + number)
    device = open_simulated(number)
    spec = layout_spec(chance)
    moves = [move(chance, spec) for _ in range(6)]
    check_moves(device, spec, moves, seed, blocks=12)
    moving = [launch for launch in launches if len(launch.arguments) > 3]
    assert all(launch.arguments[-1] <= 1 + number % 4 for launch in moving)
    assert (
        len(moving)
        == len(launches) / 2
        == sum(len(each.parts or [0]) * -(-len(each.blocks) // (1 + number % 4)) for each in moves)
    )
    check_clean_close(device)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(12))
def test_any_transfers_on_a_gpu_move_the_bytes_of_a_naive_loop(
    gpu_device: kvoffload.Device, number: int, seed: int
) -> None:
    """Blocks of all alignments, planes apart or padded in one allocation, partial slots."""
    chance = Seeded(seed)
    spec = layout_spec(chance)
    moves = [move(chance, spec) for _ in range(8)]
    check_moves(gpu_device, spec, moves, seed + number, chance.number(1, 9))


ALIGNMENTS = [
    *((18 * KIB, 0), (656, 0), (656, 16), (24, 0), (24, 8), (20, 4)),
    *((4096, 16), (4096, 8), (4096, 1), (5, 0), (5, 3), (3, 1), (1, 0)),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("factor", rest_long([1, 3, 4], 1))
@pytest.mark.parametrize(("block_bytes", "offset"), rest_long(ALIGNMENTS, 12))
def test_pitfall_33_any_alignment_gives_the_right_bytes(
    each_device: kvoffload.Device, block_bytes: int, offset: int, factor: int
) -> None:
    """Block bytes that are a multiple of 16 or not, at addresses that are or not."""
    count, blocks_of_planes = (4, 11) if each_device.simulated else (8, 200)
    most = blocks_of_planes * 3 // 4 if count == 8 else 10
    planes, buffers = separate(each_device, count, block_bytes, blocks_of_planes, offset)
    for index, buffer in enumerate(buffers):
        scramble(buffer, index)
    layout = KVLayout([planes], blocks_per_slot=factor, slot_order="block-major")
    rng = np.random.default_rng(block_bytes)
    with OffloadEngine(layout, device=each_device, num_slots=most + 2, staging_bytes=STAGING) as engine:
        fill_slots(engine, 3)
        mirror = Mirror(engine, buffers)
        for first in range(factor):
            used = layout.slots_for(most, first_sub_block=first)
            for direction in Direction:
                blocks = rng.permutation(blocks_of_planes)[:most].tolist()
                if direction is Direction.STORE:
                    blocks[-1] = blocks[0]  # a source may repeat
                each = Move(direction, 0, blocks, rng.permutation(used).tolist(), first, "pack")
                submit(engine, each).wait(30)
                expect(mirror, each)
                mirror.check()
    for buffer in buffers:
        buffer.close()


# what it costs the host


@pytest.fixture
def kernels_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured here is the host's share, and the interpreter is slow under tracemalloc."""
    monkeypatch.setattr(LaunchOperation, "run", lambda operation: 1.0 + operation.grid)


def _peak_bytes(device: kvoffload.Device, planes: int) -> int:
    """Python memory that the second of two stores of 4096 blocks takes at its peak, while it is submitted."""
    made = device.allocate_planes(planes, block_bytes=16, num_blocks=4096)
    with OffloadEngine(KVLayout([made]), device=device, num_slots=4096, staging_bytes=STAGING) as engine:
        blocks, slots = np.arange(4096)[::-1].copy(), np.arange(4096)
        for _ in range(2):
            tracemalloc.start()
            job = engine.submit(Direction.STORE, blocks, slots, after=NO_WAIT, copier="pack")
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            job.wait(10)
    return peak


@pytest.mark.usefixtures("kernels_do_nothing")
def test_the_host_touches_every_block_once_whatever_the_planes(device: kvoffload.Device) -> None:
    one, many = (_peak_bytes(device, planes) for planes in (1, 128))
    assert many < 1.1 * one + 4096
    assert many < 12 * 8 * 4096, "a few words a block"


@pytest.mark.usefixtures("kernels_do_nothing")
def test_nothing_grows_with_transfers(device: kvoffload.Device) -> None:
    ours = tracemalloc.Filter(True, f"{Path(kvoffload.__file__).parent}/*")
    simulators = tracemalloc.Filter(False, "*/driver/simulator/*")
    with rig(device, planes=2, block_bytes=16, staging_bytes=STAGING) as bench:

        def bytes_after(count: int) -> int:
            for _ in range(count):
                submit(bench.engine, store([1, 2], [3, 4]))
                submit(bench.engine, load([3], [5])).wait(10)
                bench.engine.poll()
            bench.engine.drain(10)
            bench.engine.poll()
            gc.collect()
            held = tracemalloc.take_snapshot().filter_traces((ours, simulators)).statistics("filename")
            return sum(each.size for each in held)

        tracemalloc.start()
        bytes_after(20)
        before = bytes_after(20)
        after = bytes_after(100)
        tracemalloc.stop()
        assert after - before < 100 * 8, "in 200 transfers: not a word for each"
        whole(bench.engine)
