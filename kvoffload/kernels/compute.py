"""The computation that runs concurrently with measured transfers: a product of bf16 matrices, large or skinny."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(
    left,
    right,
    result,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    HALF: tl.constexpr,
):
    """`result = left @ right`: bf16, row-major, (M, K) @ (K, N), at addresses that are multiples of 16.

    One program per tile of the result; the sizes are multiples of the tile's. With HALF: fp16, since Triton's
    interpreter multiplies bf16 as if it were integers.
    """
    number: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    element: tl.constexpr = tl.pointer_type(number)
    tile_m = tl.program_id(0) % (M // TILE_M)
    tile_n = tl.program_id(0) // (M // TILE_M)
    row = tile_m * TILE_M + tl.arange(0, TILE_M)
    column = tile_n * TILE_N + tl.arange(0, TILE_N)
    inner = tl.arange(0, TILE_K)
    left_tile = tl.multiple_of(left.to(element), 16) + row[:, None] * K + inner[None, :]
    right_tile = tl.multiple_of(right.to(element), 16) + inner[:, None] * N + column[None, :]
    total = tl.full((TILE_M, TILE_N), 0.0, tl.float32)
    for first in tl.range(0, K, TILE_K, num_stages=STAGES):
        total = tl.dot(tl.load(left_tile + first), tl.load(right_tile + first * N), total)
    result_tile = tl.multiple_of(result.to(element), 16) + row[:, None] * N + column[None, :]
    tl.store(result_tile, total.to(number))
