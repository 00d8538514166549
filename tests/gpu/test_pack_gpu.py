"""Packed transfers on a GPU: bytes, tables, compiled kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import STAGING, rig
from pack_moves import (
    expect,
    load,
    record_launches,
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


# the cache


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
