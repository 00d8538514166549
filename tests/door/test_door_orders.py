"""`open_cache` over views whose memory has another order than their shape: no hit has another array's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvoffload
from kvoffload import KVLayout, LayoutError, ShardedLayout
from kvoffload.pool import PoolOwner, SharedPool
from kvoffload.testing import SimulatedDriver

SECONDS = 20.0
AXES = ("planes", "blocks", "tokens", "heads", "dim")
MEMORY = ("planes", "blocks", "heads", "tokens", "dim")
EXTENTS = {"planes": 2, "blocks": 16, "tokens": 4, "heads": 2, "dim": 8}
CONTENT = np.arange(2 * 4 * 2 * 8, dtype=np.float16).reshape(2, 4, 2, 8)  # planes, tokens, heads, dim of a block


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members wait for answers: on a busy machine a late one would be a miss."""
    monkeypatch.setattr(SharedPool, "attach", partial(SharedPool.attach, answer_seconds=10.0))


class View:
    """A transposed view, as CuPy or PyTorch would export one."""

    def __init__(self, seen: np.ndarray[Any, Any], address: int) -> None:
        self.dtype = seen.dtype
        self.__cuda_array_interface__ = {
            "shape": seen.shape,
            "strides": seen.strides,
            "data": (address, False),
            "typestr": "<f2",
            "version": 3,
            "stream": None,
        }


class Engine:
    """An inference engine with an array on each device, whose memory has the axes in the order `memory`, and whose
    shape has them in the order `axes`.
    """

    def __init__(self, devices: list[kvoffload.Device], memory: tuple[str, ...], axes: tuple[str, ...]) -> None:
        self.devices, self.axes = devices, axes
        self.arrays, self.by_name = list[Any](), list[np.ndarray[Any, Any]]()
        for device in devices:
            base = device.empty([EXTENTS[name] for name in memory], "float16")
            seen = np.from_dlpack(base)
            self.by_name.append(seen.transpose([memory.index(name) for name in AXES]))
            view = seen.transpose([memory.index(name) for name in axes])
            self.arrays.append(base if memory == axes else View(view, base.address))

    def open(self, **options: Any) -> Any:
        if len(self.devices) == 1:
            [array], [device] = self.arrays, self.devices
            return kvoffload.open_cache(array, axes=self.axes, device=device, identity="m", **options)
        layout = ShardedLayout([KVLayout.from_tree(array, axes=self.axes) for array in self.arrays])
        return kvoffload.open_cache(layout, device=self.devices, identity="m", **options)

    def turn(self, **options: Any) -> int:
        """Fetch a block, and keep it if it was missing. Returns the hits, whose bytes are right."""
        with self.open(**options) as cache:
            keys = cache.keys(range(4), salt="")
            for array in self.by_name:
                array[:, 1] = -1
            hits = int(cache.fetch(keys, [1]).wait(SECONDS))
            for number, array in enumerate(self.by_name):
                for plane, token, head, element in np.ndindex(CONTENT.shape):
                    expected = CONTENT[plane, token, head, element] + 128 * number if hits else -1
                    assert array[plane, 1, token, head, element] == expected
            if not hits:
                for number, array in enumerate(self.by_name):
                    array[:, 1] = CONTENT + 128 * number
                cache.keep(keys, [1]).wait(SECONDS)
                assert cache.lookup(keys) == 1
            return hits


@contextmanager
def engine(memory: tuple[str, ...], axes: tuple[str, ...], *, count: int = 1) -> Iterator[Engine]:
    driver = SimulatedDriver(device_count=count)
    with ExitStack() as stack:
        devices = [stack.enter_context(kvoffload.open_device(index, backend=driver)) for index in range(count)]
        yield Engine(devices, memory, axes)


@pytest.mark.parametrize("count", [1, 2])
def test_a_disk_is_refused_to_a_view_of_other_memory(count: int, tmp_path: Path) -> None:
    on_disk: dict[str, Any] = {"pool_bytes": 1 << 20, "disk": tmp_path / "kv", "disk_bytes": 8 << 20}
    with engine(MEMORY, MEMORY, count=count) as contiguous:
        assert contiguous.turn(**on_disk) == 0
        assert contiguous.turn(**on_disk) == 1
    with engine(AXES, AXES, count=count) as other, pytest.raises(LayoutError, match="digest of the layout"):
        other.turn(**on_disk)
    with engine(AXES, MEMORY, count=count) as other, pytest.raises(LayoutError, match="digest of the layout"):
        other.turn(**on_disk)
    with engine(MEMORY, AXES, count=count) as view:
        assert view.turn(**on_disk) == 1, "the same memory, seen in another order"


def test_a_shared_pool_has_no_hit_for_a_view_of_other_memory(tmp_path: Path) -> None:
    pool: dict[str, Any] = {"pool": str(tmp_path / "pool")}
    with (
        PoolOwner(tmp_path / "pool", nbytes=1 << 20, region_bytes=1 << 18),
        engine(AXES, AXES) as contiguous,
        engine(MEMORY, AXES) as view,
        engine(MEMORY, MEMORY) as base,
        engine(AXES, MEMORY) as other_view,
    ):
        assert contiguous.turn(**pool) == 0
        assert view.turn(**pool) == 0, "each has a key of its own"
        assert [each.turn(**pool) for each in (contiguous, view, base, other_view)] == [1, 1, 1, 1]
