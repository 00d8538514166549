"""Packed transfers on a GPU: bytes, tables, leaks, compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import STAGING, Rig, held_by_process, paint, rig, warm_up, whole
from leaks import leaked
from pack_moves import (
    expect,
    load,
    record_launches,
    separate,
    small_tables,
    store,
    submit,
)

import kvoffload
from kvoffload import Direction, KVLayout, OffloadEngine
from kvoffload.kernels import loader as kernel_loader
from kvoffload.testing import Mirror, check_copier_conformance

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

KIB = 1024
Ids = np.ndarray[Any, np.dtype[np.int64]]


@pytest.fixture
def bench(gpu_device: kvoffload.Device) -> Iterator[Rig]:
    """Blocks of 16 planes of 64 KiB: 1 MiB each, long enough to be overtaken. Every kernel has run."""
    with rig(gpu_device, planes=16, block_bytes=64 * KIB, num_blocks=40, num_slots=40, staging_bytes=STAGING) as made:
        warm_up(made)
        run_every_kernel(made)
        yield made
        for gate in made.gates:
            gate.open()
        made.engine.drain(30)
        whole(made.engine)


def run_every_kernel(bench: Rig) -> None:
    """Both ways: loading one for the first time may wait for the GPU to be idle."""
    submit(bench.engine, store(range(4), range(4))).wait(30)
    submit(bench.engine, load(range(4), range(4))).wait(30)
    bench.engine.poll()
    paint(bench)


# bytes


def test_conformance(gpu_device: kvoffload.Device) -> None:
    cases = check_copier_conformance(gpu_device, ["pack"])
    print(f"{len(cases)} cases")
    assert {case.copier for case in cases} == {"pack"}


# tables


def test_long_transfers_in_many_tables(gpu_device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tables(monkeypatch, blocks=32)
    launches = record_launches(monkeypatch)
    with rig(
        gpu_device, planes=8, block_bytes=4 * KIB, num_blocks=1000, num_slots=1000, staging_bytes=STAGING
    ) as bench:
        rng = np.random.default_rng(6)
        mirror = Mirror(bench.engine, [bench.slab])
        for call in (store, load):
            each = call(rng.permutation(1000), rng.permutation(1000))
            submit(bench.engine, each)
            expect(mirror, each)
        bench.engine.drain(60)
        assert all(result.error is None for result in bench.engine.poll())
        mirror.check()
    assert len(launches) == 2 * 2 * 32


# leaks, the cache


def test_pitfall_30_ten_thousand_transfers_leak_nothing(gpu_device: kvoffload.Device) -> None:
    planes, buffers = separate(gpu_device, 4, 4 * KIB, 64)
    rng = np.random.default_rng(5)
    with OffloadEngine(KVLayout([planes]), device=gpu_device, num_slots=64, staging_bytes=STAGING) as engine:

        def transfers(count: int) -> None:
            for number in range(count):
                ids = rng.choice(64, 3, replace=False)
                submit(engine, (load if number % 2 else store)(ids, ids))
                if number % 100 == 0:
                    engine.drain(30)
                    engine.poll()
            engine.drain(30)
            engine.poll()

        transfers(1000)
        files, threads = held_by_process()
        assert leaked(gpu_device, lambda: transfers(1500), rounds=6) == set()
        files_after, threads_after = held_by_process()
        assert (files_after - files <= 4, threads_after) == (True, threads)
        whole(engine)
        assert engine._parts.copiers._kernels is not None
        assert [arena.in_use for arena in engine._parts.copiers._kernels.arenas] == [0, 0]
    for buffer in buffers:
        buffer.close()


def test_a_second_engine_takes_its_kernels_from_the_cache(
    gpu_device: kvoffload.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOFFLOAD_CACHE", str(tmp_path))
    layout = KVLayout([gpu_device.allocate_planes(4, block_bytes=4 * KIB, num_blocks=16)])
    for number in range(2):
        with OffloadEngine(layout, device=gpu_device, num_slots=16, staging_bytes=STAGING) as engine:
            assert engine.missing_copiers == {}
            engine.slots[:] = 7 + number
            for direction in (Direction.LOAD, Direction.STORE):
                engine.submit(direction, range(16), range(16), copier="pack").wait(30)
            assert (engine.slots[:, : 16 * KIB] == 7 + number).all()
        files = {path.name for path in (tmp_path / "kernels").iterdir()}
        assert len(files) >= 2
        monkeypatch.setattr(kernel_loader, "compile_kernel", None)  # the second engine compiles nothing
