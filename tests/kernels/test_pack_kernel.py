"""How groups are cut into fragments and tiles, and what the compiler makes of the kernel for them."""

from __future__ import annotations

import math
import re
import struct
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_moves import BLOCK_BYTES, Chance, Drawn, pick

from kvoffload import Direction, KVLayout, Plane
from kvoffload.copiers.pack_kernels import FragmentShape, fragment_shape_of, fragment_table, kernel_spec
from kvoffload.kernels import Compiled, compile_kernel

PAGE = 4096
MAX_IDLE = 1 / 8


def drawn_layout(chance: Chance) -> KVLayout:
    """One group; sizes, strides and addresses are multiples of some number, up to 160 KiB a block."""
    multiple = pick(chance, tuple(BLOCK_BYTES))
    planes, address = [], 1 << 20
    for _ in range(chance.number(1, 6)):
        usual = chance.number(0, 1)
        size = pick(chance, BLOCK_BYTES[multiple]) if usual else multiple * chance.number(1, 10_000)
        stride = size + multiple * pick(chance, (0, 0, 1, 7))
        address += multiple * chance.number(0, 9)
        planes.append(Plane(address, block_bytes=size, num_blocks=3, block_stride=stride))
        address += 3 * stride
    return KVLayout([planes], blocks_per_slot=chance.number(1, 4))


# fragments and tiles


@given(data=st.data())
def test_fragments_cover_every_byte_of_a_plane_once_and_no_other(data: st.DataObject) -> None:
    layout = drawn_layout(Drawn(data.draw))
    (group,) = layout.groups
    shape = fragment_shape_of(group)
    address, block_stride, offset, sub_block_stride, words = fragment_table(group, shape)
    fragments = 0
    for plane, host_offset, step in zip(group.planes, group.host_offsets, group.host_steps, strict=True):
        inside = (address >= plane.address) & (address < plane.address + plane.block_bytes)
        starts = address[inside] - plane.address
        times_copied = np.zeros(plane.block_bytes, dtype=int)
        for start, nbytes in zip(starts.tolist(), (words[inside] * shape.word_bytes).tolist(), strict=True):
            assert 0 < nbytes <= shape.fragment_bytes
            assert start + nbytes <= plane.block_bytes
            times_copied[start : start + nbytes] += 1
        assert (times_copied == 1).all()
        assert (offset[inside] == host_offset + starts).all()
        assert (block_stride[inside] == plane.block_stride).all()
        assert (sub_block_stride[inside] == step).all()
        fragments += len(starts)
    assert fragments == len(address)
    assert shape.uniform == (words == shape.fragment_bytes // shape.word_bytes).all()
    assert group.bytes_per_block >= (1 - MAX_IDLE) * fragments * shape.fragment_bytes, "few idle threads"


@given(data=st.data())
def test_words_are_as_wide_as_every_address_allows(data: st.DataObject) -> None:
    layout = drawn_layout(Drawn(data.draw))
    (group,) = layout.groups
    shape = fragment_shape_of(group)
    *addresses_and_steps, words = fragment_table(group, shape)
    sizes = (words * shape.word_bytes).tolist()
    common = math.gcd(group.bytes_per_block, *np.concatenate(addresses_and_steps).tolist(), *sizes)
    assert common % shape.alignment == 0
    everything = math.gcd(*(math.gcd(p.address, p.block_bytes, p.block_stride) for p in group.planes))
    assert shape.alignment == next(width for width in (16, 8, 4, 1) if everything % width == 0)
    assert shape.word_bytes == min(8, shape.alignment)


@given(data=st.data(), direction=st.sampled_from(Direction))
def test_tiles_have_shapes_that_triton_takes(data: st.DataObject, direction: Direction) -> None:
    layout = drawn_layout(Drawn(data.draw))
    shape = fragment_shape_of(layout.groups[0])
    spec = kernel_spec(shape, direction)
    fragments, words = spec.constant("FRAGMENTS"), spec.constant("WORDS")
    for number in (shape.fragment_bytes, shape.word_bytes, fragments, words, spec.warps):
        assert number > 0
        assert number & (number - 1) == 0
    assert shape.alignment <= shape.fragment_bytes <= 2048
    assert fragments <= 1024
    assert words * shape.word_bytes == shape.fragment_bytes
    assert words * fragments <= words_per_thread(shape.alignment) * spec.threads, "words in registers"
    assert spec.constant("WORD_BITS") == 8 * shape.word_bytes
    assert spec.constant("STORE") == (direction is Direction.STORE)
    assert spec.constant("UNIFORM") == shape.uniform


def words_per_thread(alignment: int) -> int:
    return 8 if alignment == 16 else 4


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([64 * 1024], FragmentShape(2048, 8, 16)),
        ([4096], FragmentShape(2048, 8, 16)),
        ([18 * 1024], FragmentShape(2048, 8, 16)),  # of a latent attention, no power of two
        ([656], FragmentShape(64, 8, 16, uniform=False)),  # 48 of 704 bytes idle; of 128: 112 of 768
        ([16 * 1024, 16], FragmentShape(2048, 8, 16, uniform=False)),  # one small plane: no small fragments
        ([16], FragmentShape(16, 8, 16)),
        ([24], FragmentShape(8, 8, 8)),
        ([20], FragmentShape(4, 4, 4)),
        ([6], FragmentShape(2, 1, 1)),  # 2 divides all: not worth a kernel of its own
        ([1], FragmentShape(1, 1, 1)),
    ],
)
def test_fragments_of_usual_and_unusual_blocks(sizes: list[int], expected: FragmentShape) -> None:
    planes = [Plane((1 + index) << 20, block_bytes=size, num_blocks=4) for index, size in enumerate(sizes)]
    layout = KVLayout([planes])
    assert fragment_shape_of(layout.groups[0]) == expected


# machine code

CAPABILITIES = [(8, 0), (9, 0), (10, 0), (12, 0)]
WIDE = FragmentShape(2048, 8, 16)
REGISTERS_OF_A_MULTIPROCESSOR = 65_536
ACCESS = re.compile(r"\b(ld|st)\.global((?:\.(?!v\d|[bus]\d)[\w:]+)*)(?:\.v(\d))?\.[bus](\d+)\b")
REGCOUNT, FRAME_SIZE = (re.compile(each + rb"\x08\x00(.{4})(.{4})", re.DOTALL) for each in (b"\x04\x2f", b"\x04\x11"))


class Access(NamedTuple):
    """A load or store of global memory in PTX."""

    kind: str
    nbytes: int
    at: int


@cache
def compiled(shape: FragmentShape, direction: Direction, capability: tuple[int, int]) -> Compiled:
    return compile_kernel(kernel_spec(shape, direction), capability)


def accesses(made: Compiled, kind: str) -> list[Access]:
    """All of a kind, "ld" or "st", in the order of the text."""
    found = [
        Access(match[1], int(match[3] or 1) * int(match[4]) // 8, match.start()) for match in ACCESS.finditer(made.ptx)
    ]
    assert len(found) == len(re.findall(r"\b(?:ld|st)\.global", made.ptx)), "every one is understood"
    return [each for each in found if each.kind == kind]


def resources(made: Compiled) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack: what `cuobjdump -elf` shows in .nv.info, for the only kernel."""
    registers, frames = ({match.groups() for match in each.finditer(made.cubin)} for each in (REGCOUNT, FRAME_SIZE))
    (found,) = {(count, size) for of, count in registers for kernel, size in frames if of == kernel}
    return struct.unpack("<I", found[0])[0], struct.unpack("<I", found[1])[0]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernel_moves_16_bytes_at_a_time_and_loads_a_tile_before_it_stores(
    direction: Direction, capability: tuple[int, int]
) -> None:
    made = compiled(WIDE, direction, capability)
    check_accesses(made, WIDE, 16)
    registers, stack_bytes = resources(made)
    assert 0 < registers <= min(255, REGISTERS_OF_A_MULTIPROCESSOR // made.threads)
    assert stack_bytes == 0, "nothing is spilled"
    assert not re.search(r"\.local\b", made.ptx)
    assert made.shared_bytes <= 48 * 1024, "without asking for more"
    assert made.threads == kernel_spec(WIDE, direction).threads
    assert f".target sm_{capability[0]}{capability[1]}" in made.ptx


def check_accesses(made: Compiled, shape: FragmentShape, nbytes: int) -> None:
    """All payload goes in accesses of `nbytes`, and all of a tile is loaded before the first of it is stored."""
    loads, stores = accesses(made, "ld"), accesses(made, "st")
    count = words_per_thread(shape.alignment) * shape.word_bytes // nbytes
    assert [each.nbytes for each in stores] == [nbytes] * count
    assert [each.nbytes for each in loads[-count:]] == [nbytes] * count
    assert max(each.at for each in loads) < min(each.at for each in stores)
    assert {each.nbytes for each in loads} == {8, nbytes}, "words of the tables, and payload"
    assert sum(each.nbytes == nbytes for each in loads) == count or nbytes == 8


@pytest.mark.parametrize("direction", Direction)
def test_rows_that_are_not_all_alike_are_moved_as_wide(direction: Direction) -> None:
    shape = FragmentShape(1024, 8, 16, uniform=False)
    made = compiled(shape, direction, (9, 0))
    check_accesses(made, shape, 16)
    assert resources(made)[0] <= REGISTERS_OF_A_MULTIPROCESSOR // made.threads


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("alignment", [8, 4, 1])
def test_narrower_blocks_are_moved_in_narrower_words(alignment: int, uniform: bool) -> None:
    shape = FragmentShape(512, alignment, alignment, uniform)
    made = compiled(shape, Direction.LOAD, (9, 0))
    check_accesses(made, shape, alignment)
    registers, stack_bytes = resources(made)
    assert registers <= REGISTERS_OF_A_MULTIPROCESSOR // made.threads
    assert stack_bytes == 0, "nothing is spilled"


def test_the_smallest_rows_are_moved_in_one_access_each() -> None:
    made = compiled(FragmentShape(16, 8, 16), Direction.STORE, (9, 0))
    assert [each.nbytes for each in accesses(made, "ld") if each.nbytes == 16] == [16] * 4, "512 fragments, 128 threads"
    assert [each.nbytes for each in accesses(made, "st")] == [16] * 4
