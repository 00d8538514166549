"""The coding kernels write and read the bytes of the reference in numpy, program by program in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coded import chunks
from compile_kernels import codes_are_wide
from numpy.typing import NDArray
from seeds import rest_long, seeds

from kvoffload import Direction, KVLayout, Plane
from kvoffload.copiers.pack_kernels import fragment_shape_of, fragment_table, kernel_spec
from kvoffload.driver import address_of
from kvoffload.kernels import KernelSpec, compile_kernel
from kvoffload.layout.coding import Coding
from kvoffload.simulator import interpreter

POISON = 0xA5


def anywhere(addresses: NDArray[np.int64], nbytes: int, writes: bool) -> None: ...


class Bench:
    """Planes in host memory, of whole chunks, and a ring; the kernels run over both."""

    def __init__(self, values: int, planes: int, blocks: int, seed: int) -> None:
        self.coding = Coding(values)
        self.random = np.random.default_rng(seed)
        chunk_values, self.fit = chunks(seed, planes * blocks * 3, self.coding)
        self.values = chunk_values.reshape(planes, blocks, -1)
        self.memory = np.full((planes, blocks, self.values.shape[2] + 8), 0x5A5A, np.uint16)  # with padding
        self.memory[:, :, :-8] = self.values
        of = [
            Plane(address_of(plane), block_bytes=6 * values, num_blocks=blocks, block_stride=6 * values + 16)
            for plane in self.memory
        ]
        (self.group,) = KVLayout([of], codec="bf16-12").groups
        assert self.group.coding == self.coding
        self.shape = fragment_shape_of(self.group)
        self.fragments = fragment_table(self.group, self.shape)
        self.order = self.random.permutation(blocks)  # of the blocks in the ring
        self.ring = np.full((blocks, self.group.slot_block_bytes + 16), POISON, np.uint8)

    def run(self, direction: Direction, spec: KernelSpec | None = None) -> list[bool]:
        """Which of `order` do not fit."""
        spec = spec or kernel_spec(self.shape, direction)
        count, fragments = len(self.order), self.fragments.shape[1]
        slots = address_of(self.ring) + np.arange(count) * self.ring.shape[1]
        table = np.stack([self.order, slots]).astype(np.int64)
        outcomes = np.zeros(count + 1, np.int64)
        given: tuple[Any, ...] = (address_of(self.fragments), address_of(table), address_of(outcomes))
        given += (fragments, fragments, count)
        arguments = [(*parameter, value) for parameter, value in zip(spec.parameters, given, strict=True)]
        grid = -(-count * fragments // spec.constant("CHUNKS"))
        kernel = interpreter.load(spec.module, spec.function)
        kernel.run(grid, self.random.permutation(grid).tolist(), arguments, dict(spec.constants), anywhere)
        assert outcomes[-1] == 0
        return [outcome == 1 for outcome in outcomes[:-1].tolist()]


@pytest.mark.parametrize("values", rest_long([1024, 256, 512], 2))
@pytest.mark.parametrize("seed", rest_long(seeds(2), 1))
def test_kernels_write_and_read_what_numpy_does(values: int, seed: int) -> None:
    bench = Bench(values, planes=2, blocks=6, seed=seed)
    unfit = bench.run(Direction.STORE)
    fit = bench.fit.reshape(2, 6, 3)
    assert unfit == [not fit[:, block].all() for block in bench.order.tolist()]
    expected = bench.coding.encode(bench.values)[0].reshape(2, 6, -1)
    for place, block in enumerate(bench.order):
        assert (bench.ring[place, :-16] == expected[:, block].reshape(-1)).all()
    assert (bench.ring[:, -16:] == POISON).all()
    bench.memory[:, :, :-8] = 0x1234
    assert bench.run(Direction.LOAD) == unfit
    loaded = bench.memory[:, :, :-8].reshape(2, 6, 3, -1)
    assert (loaded[fit] == bench.values.reshape(2, 6, 3, -1)[fit]).all()
    assert (loaded[~fit] == 0x1234).all(), "chunks that do not fit are left alone"
    assert (bench.memory[:, :, -8:] == 0x5A5A).all()


@pytest.mark.parametrize("direction", Direction)
def test_any_number_of_chunks_a_program(direction: Direction) -> None:
    bench = Bench(256, planes=1, blocks=7, seed=5)
    for chunks_of_program in (1, 2, 8):
        spec = kernel_spec(bench.shape, direction)
        constants = dict(spec.constants) | {"CHUNKS": chunks_of_program}
        spec = spec._replace(constants=tuple(constants.items()))
        if direction is Direction.LOAD:
            bench.run(Direction.STORE)
        bench.run(direction, spec)
        expected = bench.coding.encode(bench.values)[0].reshape(7, -1)
        assert (bench.ring[:, :-16] == expected[bench.order]).all()


def test_any_bytes_can_be_decoded() -> None:
    """The values mean nothing; nothing else is touched."""
    bench = Bench(256, planes=2, blocks=4, seed=1)
    bench.ring[:, :-16] = bench.random.integers(0, 256, (4, bench.ring.shape[1] - 16))
    before = bench.ring.copy()
    bench.run(Direction.LOAD)
    assert (bench.ring == before).all()
    assert (bench.memory[:, :, -8:] == 0x5A5A).all()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("values", [256, 1024])
def test_compiled_kernels_use_wide_accesses(direction: Direction, values: int) -> None:
    bench = Bench(values, planes=1, blocks=1, seed=0)
    shape = bench.shape._replace(alignment=16)
    compiled = compile_kernel(kernel_spec(shape, direction), (9, 0))
    access = "ld.global" if direction is Direction.STORE else "st.global"
    assert f"{access}.v4.b32" in compiled.ptx
    assert codes_are_wide(compiled)
    assert compiled.threads == 32
    assert compiled.shared_bytes <= 1024, "what long kernels leave"
