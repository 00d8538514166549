"""Rigs for the tests of order: simulated devices by seed, each at a capability level of its own, and the GPU.

KVOFFLOAD_ORDERING_SEEDS says how many seeds to run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers import (
    COPIERS,
    EACH_SEED,
    LEVELS,
    ORDERING_SEEDS,
    STAGING,
    Rig,
    change_streams,
    no_leaks,
    settled,
    simulated,
)
from seeds import rest_long

import kvoffload
from kvoffload.tuning import CopierName

ON_GPU = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(params=EACH_SEED, ids=lambda seed: f"seed{seed}")
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def _levelled(seed: int) -> Iterator[kvoffload.Device]:
    with simulated(seed, list(LEVELS)[seed % len(LEVELS)]) as opened:
        yield opened
    no_leaks(opened.simulator)


@pytest.fixture
def device(seed: int) -> Iterator[kvoffload.Device]:
    """A simulated device whose capability level changes with the seed; nothing may be left of it."""
    yield from _levelled(seed)


@pytest.fixture
def rig_options() -> dict[str, Any]:
    """Of `bench`; files have others."""
    return {}


@pytest.fixture
def bench(device: kvoffload.Device, rig_options: dict[str, Any]) -> Iterator[Rig]:
    """A rig whose gates are open and whose pools are whole at the end."""
    yield from settled(device, **rig_options)


Carried = tuple[Rig, CopierName | None]


def _carried(seed: int | None, copier: CopierName | None, request: pytest.FixtureRequest) -> Iterator[Carried]:
    if seed is None:
        sizes = {"planes": 16, "block_bytes": 64 << 10, "num_blocks": 32, "num_slots": 32, "staging_bytes": STAGING}
        for made in settled(request.getfixturevalue("gpu_device"), **sizes):
            yield made, copier
    else:
        for device in _levelled(seed):
            for made in settled(device):
                yield made, copier


@pytest.fixture(params=[*EACH_SEED, pytest.param(None, marks=ON_GPU, id="gpu")], ids=lambda seed: f"seed{seed}")
def each_bench(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """`bench`, and one on the GPU with blocks of 1 MiB: long enough to be overtaken."""
    for made, _ in _carried(request.param, None, request):
        yield made


@pytest.fixture(
    params=[
        *rest_long((((seed, None),) for seed in ORDERING_SEEDS), 4),
        *(pytest.param((None, copier), marks=ON_GPU) for copier in COPIERS),
    ],
    ids=lambda carrier: f"gpu-{carrier[1]}" if carrier[0] is None else f"seed{carrier[0]}",
)
def carried(request: pytest.FixtureRequest) -> Iterator[Carried]:
    """`bench`, for what the engine chooses; and a rig on the GPU, for each copier."""
    yield from _carried(*request.param, request)


@pytest.fixture
def changing_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers and their segments change streams."""
    change_streams(monkeypatch)
