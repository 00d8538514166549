"""CuPy on a GPU: its arrays, its streams, and our memory as its arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_programs import BLOCKS, ELEMENTS, PLANES, SHAPE, SLOTS, run_random_program

import kvoffload
from kvoffload import NO_WAIT, KVLayout, OffloadEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


class CupyProgram:
    """On a stream of CuPy's that the legacy stream does not order.

    Args:
        ordered: False leaves out every call that orders something.
    """

    def __init__(self, cupy: Any, device: kvoffload.Device, *, ordered: bool) -> None:
        self._cupy, self._ordered = cupy, ordered
        self._stream = cupy.cuda.Stream(non_blocking=True)
        with self._stream:
            self._cache = cupy.zeros(SHAPE, dtype=cupy.float32)
            self._burn = cupy.ones((2048, 2048), dtype=cupy.float32)
        self._stream.synchronize()
        self._seen: list[Any] = []
        self._engine = OffloadEngine(
            KVLayout.from_stacked(self._cache, plane_axis=0, block_axis=1), device=device, num_slots=SLOTS
        )

    def _slowly(self) -> None:
        for _ in range(3):
            self._burn = self._burn @ self._burn * 1e-4

    def write(self, block: int, value: int) -> None:
        with self._stream:
            self._slowly()
            self._cache[:, block] = value

    def read(self, block: int) -> None:
        with self._stream:
            self._slowly()
            self._seen.append(self._cache[:, block].copy())

    def _submit(self, submit: Any, first: list[int], second: list[int]) -> None:
        job = submit(first, second, after=self._stream if self._ordered else NO_WAIT)
        if self._ordered:
            job.order_before(self._stream)

    def store(self, blocks: list[int], slots: list[int]) -> None:
        self._submit(self._engine.store, blocks, slots)

    def load(self, slots: list[int], blocks: list[int]) -> None:
        self._submit(self._engine.load, slots, blocks)

    def finish(self) -> list[np.ndarray[Any, Any]]:
        self._stream.synchronize()
        self._engine.close()
        return [seen.get() for seen in self._seen]


def test_two_thousand_random_steps_on_cupys_stream(cupy: Any, gpu_device: kvoffload.Device, seed: int) -> None:
    assert run_random_program(CupyProgram(cupy, gpu_device, ordered=True), 2000, seed) == 0


def test_without_the_ordering_calls_these_steps_go_wrong(cupy: Any, gpu_device: kvoffload.Device, seed: int) -> None:
    programs = (
        run_random_program(CupyProgram(cupy, gpu_device, ordered=False), 2000, seed + more) for more in range(8)
    )
    assert any(programs)  # now and then one happens to read the right bytes


# arrays in


def round_trip(device: kvoffload.Device, layout: KVLayout, after: Any) -> None:
    """Blocks 1 and 2 to slots and on to blocks 3 and 4."""
    with OffloadEngine(layout, device=device, num_slots=2) as engine:
        engine.store([1, 2], [0, 1], after=after).wait(30)
        engine.load([0, 1], [3, 4], after=after).wait(30)


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_a_stacked_array_of_cupys(cupy: Any, gpu_device: kvoffload.Device, axes: tuple[int, int]) -> None:
    cache = cupy.random.random(SHAPE, dtype=cupy.float32)
    if axes == (1, 0):
        cache = cupy.ascontiguousarray(cache.swapaxes(0, 1))
    layout = KVLayout.from_stacked(cache, plane_axis=axes[0], block_axis=axes[1])
    assert (layout.dtype, layout.on_default_stream) == ("float32", True)
    round_trip(gpu_device, layout, None)
    seen = cache if axes == (0, 1) else cache.swapaxes(0, 1)
    assert bool((seen[:, 1:3] == seen[:, 3:5]).all())


def test_a_list_of_arrays_of_cupys_is_kept_alive(cupy: Any, gpu_device: kvoffload.Device) -> None:
    arrays = [cupy.random.random((BLOCKS, ELEMENTS), dtype=cupy.float32) for _ in range(PLANES)]
    layout = KVLayout.from_arrays(arrays)
    assert [plane.owner for plane in layout.groups[0].planes] == arrays or all(
        plane.owner is array for plane, array in zip(layout.groups[0].planes, arrays, strict=True)
    )
    round_trip(gpu_device, layout, cupy.cuda.get_current_stream())
    assert all(bool((array[1:3] == array[3:5]).all()) for array in arrays)


def test_an_array_stands_for_cupys_current_stream(cupy: Any, gpu_device: kvoffload.Device) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cache, burn = cupy.zeros(SHAPE, dtype=cupy.float32), cupy.ones((8192, 8192), dtype=cupy.float32)
        cache += 7  # compiled at its first use
        burn = burn @ burn * 1e-4
        with OffloadEngine(
            KVLayout.from_stacked(cache, plane_axis=0, block_axis=1), device=gpu_device, num_slots=1
        ) as engine:
            for after in (cache, [cache, 1], (stream, cache)):
                for _ in range(8):
                    burn = burn @ burn * 1e-4  # 20 ms each
                cache += 7
                job = engine.store([5], [0], after=after)
                assert not stream.done, "the computation was over before the store was submitted"
                job.wait(30)
                stored = engine.slots[0].view(np.float32)[: PLANES * ELEMENTS]
                assert (stored == float(cache[0, 5, 0])).all()


def test_tensors_of_pytorch_as_strangers(gpu_device: kvoffload.Device) -> None:
    torch = pytest.importorskip("torch")
    cache = torch.rand(SHAPE, device=f"cuda:{gpu_device.index}").to(torch.bfloat16)
    layout = KVLayout.from_stacked(cache, plane_axis=0, block_axis=1)
    assert layout.dtype == "bfloat16"
    round_trip(gpu_device, layout, cache)
    assert bool((cache[:, 1:3] == cache[:, 3:5]).all())


def check_transposed(array: Any, stored: Any, device: kvoffload.Device) -> None:
    """`array`: `(blocks, tokens, heads, dim)` over memory `(blocks, heads, tokens, dim)`. `stored`: its block 3."""
    axes = ("blocks", "tokens", "heads", "dim")
    layout = KVLayout.from_tree(array, axes=axes)
    assert layout.block_axes == ("heads", "tokens", "dim")
    with OffloadEngine(layout, device=device, num_slots=1) as engine:
        engine.store([3], [0], after=NO_WAIT).wait(30)
        slot = engine.slots[0, : layout.groups[0].bytes_per_block].view(np.float32).reshape(2, 4, 8)
        assert (slot.transpose(1, 0, 2) == stored).all()
    with pytest.raises(kvoffload.LayoutError, match=r"use KVLayout\.from_tree\("):
        KVLayout.from_arrays([array], tokens_per_block=4, block_axes=axes[1:])


def test_a_transposed_view_of_cupys_has_the_keys_of_its_memory(cupy: Any, gpu_device: kvoffload.Device) -> None:
    view = cupy.random.random((8, 2, 4, 8), dtype=cupy.float32).transpose(0, 2, 1, 3)
    stored = cupy.asnumpy(view[3])
    check_transposed(view, stored, gpu_device)


def test_a_transposed_view_of_pytorchs_has_the_keys_of_its_memory(gpu_device: kvoffload.Device) -> None:
    torch = pytest.importorskip("torch")
    view = torch.rand((8, 2, 4, 8), device=f"cuda:{gpu_device.index}").permute(0, 2, 1, 3)
    stored = view[3].cpu().numpy()
    check_transposed(view, stored, gpu_device)


def test_arrays_of_numba(gpu_device: kvoffload.Device) -> None:
    cuda = pytest.importorskip("numba.cuda")
    content = np.random.default_rng(0).random(SHAPE, dtype=np.float32)
    with cuda.gpus[gpu_device.index]:
        cache = cuda.to_device(content)
        round_trip(gpu_device, KVLayout.from_stacked(cache, plane_axis=0, block_axis=1), NO_WAIT)
        found = cache.copy_to_host()
    assert (found[:, 3:5] == content[:, 1:3]).all()


def test_arrays_in_host_memory_and_read_only_ones_are_refused(cupy: Any) -> None:
    pinned = cupy.cuda.alloc_pinned_memory(4096)
    with pytest.raises(kvoffload.LayoutError, match=r"arrays\[0\] is not in GPU memory"):
        KVLayout.from_arrays([np.frombuffer(pinned, np.uint8).reshape(4, -1)])


# our memory as arrays of others


@pytest.mark.parametrize("method", ["from_dlpack", "asarray"])
def test_importing_waits_for_the_load_in_flight(cupy: Any, gpu_device: kvoffload.Device, method: str) -> None:
    cache = gpu_device.empty((64, 64, 65536), np.uint8)
    layout = KVLayout.from_stacked(cache, plane_axis=0, block_axis=1)
    stream = cupy.cuda.Stream(non_blocking=True)
    with OffloadEngine(layout, device=gpu_device, num_slots=64) as engine:
        engine.slots[:] = 1
        engine.load(range(64), range(64), after=NO_WAIT).wait(30)
        engine.slots[:] = 2
        with stream:
            job = engine.load(range(64), range(64), after=NO_WAIT)  # 256 MiB: 5 ms
            seen = getattr(cupy, method)(cache)
            assert seen.data.ptr == cache.address
            low = seen.min()  # on CuPy's stream, behind the load
            assert int(low) == 2
            job.wait(30)
            del seen


def test_an_import_keeps_the_memory(cupy: Any, gpu_device: kvoffload.Device) -> None:
    array = cupy.from_dlpack(gpu_device.empty((1000,), np.float16))
    owned = gpu_device.owned
    gpu_device.reclaim()
    array[:] = 3
    assert float(array.sum()) == 3000
    assert gpu_device.owned == owned
    del array
    gpu_device.reclaim()
    assert gpu_device.owned == owned - 1


def test_types_that_dlpack_does_not_carry_from_here(cupy: Any, gpu_device: kvoffload.Device) -> None:
    narrow = gpu_device.empty((8, 8), "bfloat16")
    with pytest.raises(BufferError, match=r"bfloat16 is not exported; view\('uint16'\) is"):
        cupy.from_dlpack(narrow)
    assert cupy.from_dlpack(narrow.view("uint16")).dtype == np.uint16


def test_cupy_takes_a_stream_of_the_devices(cupy: Any, gpu_device: kvoffload.Device) -> None:
    with gpu_device.stream() as stream:
        adopt = getattr(cupy.cuda.Stream, "from_external", None)  # older CuPy: ExternalStream
        with adopt(stream) if adopt else cupy.cuda.ExternalStream(stream.handle):
            array = cupy.full(1 << 20, 3, dtype=cupy.uint8) + 4
        stream.synchronize(30)
        assert bool((array == 7).all())
