"""What frameworks do on arrays of their own, as `bench transfer` compares it: timed and verified like the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

import kvoffload
from kvoffload.internal.models import MODELS
from kvoffload.planning.transfer_plan import Direction
from kvoffload_bench import frameworks
from kvoffload_bench.lab import Lab
from kvoffload_bench.latency import geometry_of
from kvoffload_bench.rounds import Scenario
from kvoffload_bench.setup import TransferSetup
from kvoffload_bench.tools import SMALL


class FakeArrays:
    """Writes what a framework would, or nothing."""

    copies = True

    def __init__(self, setup: TransferSetup) -> None:
        self._setup = setup
        self.right = frameworks._right(setup)
        self.found = self.right.copy()

    def scenario(self, direction: Direction) -> Scenario:  # noqa: ARG002
        return Scenario(self._run, self._poison, lambda: frameworks._wrong(self._setup, self.found, self.right), 1)

    def _run(self) -> float:
        if self.copies:
            self.found[...] = self.right
        return 1.0

    def _poison(self) -> None:
        self.found[...] = 0xA5A5

    def close(self) -> None:
        pass


class IdleArrays(FakeArrays):
    copies = False


def test_frameworks_are_measured_beside_the_engine_and_verified(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[str, Callable[[TransferSetup], frameworks.Arrays]] = {"CuPy": FakeArrays, "JAX, wall clock": IdleArrays}
    monkeypatch.setattr(frameworks, "_importable", lambda: (kinds, {}))
    models = [MODELS["qwen2.5-0.5b"].scaled(1 / 64), MODELS["gpt-oss-20b"].scaled(1 / 64)]
    rows, missing = frameworks.measure_frameworks(lab, models, lambda *_: None)
    assert missing == {}
    assert [(row.model, row.direction) for row in rows] == [("qwen2.5-0.5b", direction) for direction in Direction]
    for row in rows:
        every_row = 2 * row.blocks * row.planes
        assert row.wrong == {"choice, overlap": 0, "CuPy": 0, "JAX, wall clock": every_row, "contiguous copy": 0}


def test_what_a_framework_must_find_is_plane_by_plane(lab: Lab) -> None:
    with TransferSetup(lab, geometry_of(3, 64, 1.0), count=4) as setup:
        right = frameworks._right(setup)
        assert right.shape == (3, 4, 32)
        for block, run in enumerate(setup.expected()):
            assert (right[:, block].reshape(-1) == run.view(np.uint16)).all()


def test_frameworks_that_are_not_installed_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupy", "jax"):
        monkeypatch.setitem(sys.modules, name, None)
    kinds, missing = frameworks._importable()
    assert kinds == {}
    assert "pip install 'kvoffload[cupy]'" in missing["CuPy"]
    assert "pip install 'kvoffload[jax]'" in missing["JAX, wall clock"]


@pytest.mark.gpu
def test_frameworks_move_the_right_bytes_on_a_gpu(gpu_device: kvoffload.Device) -> None:
    size = SMALL._replace(payload_bytes=1 << 20, plane_bytes=1 << 18, scale=1.0)
    with Lab(gpu_device, size, repeats=2, seed=3) as lab:
        rows, missing = frameworks.measure_frameworks(lab, [MODELS["qwen2.5-7b"]], lambda *_: None)
    if len(missing) == 2:
        pytest.skip(str(missing))
    assert len(rows) == 2
    for row in rows:
        assert set(row.wrong.values()) == {0}
        assert all(rate > 0 for rate in row.gb_per_s.values())
