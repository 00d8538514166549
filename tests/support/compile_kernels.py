"""Compile every kernel with the installed Triton, for each compute capability that its ptxas knows, and write the row
of this release into docs/limits.md. `nox -s triton` does so for every minor release.
"""

from __future__ import annotations

import itertools
import re

from versions import PAGE, numbers, table_of, version_of, with_table

from kvoffload import CapabilityError, Direction
from kvoffload.calibration import compute
from kvoffload.copiers.pack_kernels import TABLE_SPEC, FragmentShape, kernel_spec
from kvoffload.kernels import Compiled, KernelSpec, compile_kernel
from kvoffload.layout.coding import Coding

CAPABILITIES = [(8, 0), (9, 0), (10, 0), (12, 0)]
SHAPES = [
    *(FragmentShape(nbytes, 8, 16, uniform) for nbytes, uniform in itertools.product((2048, 64), (True, False))),
    *(FragmentShape(nbytes, word, word) for nbytes, word in ((1024, 8), (1024, 4), (512, 1), (8, 8), (4, 4), (2, 1))),
    *(FragmentShape(2 * values, 4, 16, coding=Coding(values)) for values in (256, 512, 1024)),
]


def every_kernel() -> list[KernelSpec]:
    moves = [kernel_spec(shape, direction) for shape in SHAPES for direction in Direction]
    products = [
        compute.kernel_spec(product, tile, half=False)
        for product in (compute.LARGE, compute.SMALL)
        for tile in product.tiles
    ]
    return [TABLE_SPEC, *moves, *products]


def codes_are_wide(made: Compiled) -> bool:
    """Whether the codes of a tile, 512 of a byte, are stored or loaded four at a time by each of 32 threads. (Triton
    3.8 forgot a hint on the sum of an address and a constant; there were 16 accesses of a byte.)
    """
    access = {"encode": "st", "decode": "ld"}[made.name]
    return made.ptx.count(f"{access}.global.b32 ") == 4


def ptx_version(made: Compiled) -> str:
    """It tells which ptxas there is: 8.4 that of CUDA 12.4, 8.7 and 8.8 of 12.8 and 12.9, 9.1 of 13.1, and so on."""
    (version,) = re.findall(r"^\.version (\S+)$", made.ptx, re.MULTILINE)
    return str(version)


def cell(capability: tuple[int, int]) -> str:
    """The PTX of the kernels for this compute capability; with a driver of CUDA 12, if that gets another."""
    try:
        older, newer = (ptx_version(compile_kernel(TABLE_SPEC, capability, cuda=cuda)) for cuda in (12, 13))
    except CapabilityError as error:
        if not re.search(r"ptxas.* fatal .*sm_", str(error)):
            raise
        return "none"  # the GPU is newer than this ptxas
    for spec in every_kernel():
        made = compile_kernel(spec, capability)
        assert made.name not in ("encode", "decode") or codes_are_wide(made), f"{spec} has narrow accesses"
        assert not re.search(r"\.local\b", made.ptx), f"{spec} spills"
    assert older.startswith("8."), "a driver of CUDA 12 need not load what a newer ptxas makes"
    return newer if newer.startswith("8.") else f"{newer}, CUDA 12: {older}"


if __name__ == "__main__":
    row = [version_of("Triton"), *map(cell, CAPABILITIES)]
    print(*row, sep=" | ")
    page = PAGE.read_text()
    others = [each for each in table_of(page, "triton") if numbers(each[:1])[0][:2] != numbers(row[:1])[0][:2]]
    PAGE.write_text(with_table(page, "triton", sorted([*others, row], key=lambda each: numbers(each[:1]))))
