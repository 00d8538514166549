# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Encodes blocks into a ring in device memory, and decodes them out of it: `kvoffload.layout.coding` has the format.

The tables are those of `pack`; a fragment is a chunk. `outcomes`, int64, (num_blocks,), is pinned memory, where a block
gets a 1 if one of its chunks does not fit, or was stored as one that does not. Such a chunk is not decoded. Each
program codes CHUNKS chunks of VALUES values. It takes two values as one word.

Reductions name their combining functions, since Triton's interpreter calls no jitted ones, such as `tl.max`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def code_of(exponent, base):
    code = exponent - base[:, None]
    return tl.where(exponent == 0, 0, tl.where((code < 1) | (code > 14), 15, code))


@triton.jit
def places(
    fragment_table,
    block_table,
    row_fragments,
    num_fragments,
    num_blocks,
    CHUNKS: tl.constexpr,
    SUB_BLOCK_SHIFT: tl.constexpr,
):
    """Of each chunk of this program: whether it exists, the position of its block, where it is, and its record."""
    fragments = fragment_table.to(tl.pointer_type(tl.int64))
    blocks = block_table.to(tl.pointer_type(tl.int64))
    item = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    inside = item < num_fragments * num_blocks
    block = item // num_fragments
    block_id = tl.load(blocks + block, mask=inside, other=0)
    slot = tl.load(blocks + num_blocks + block, mask=inside, other=0)
    fragment = item % num_fragments
    address = tl.load(fragments + fragment, mask=inside, other=0)
    block_stride = tl.load(fragments + row_fragments + fragment, mask=inside, other=0)
    offset = tl.load(fragments + 2 * row_fragments + fragment, mask=inside, other=0)
    sub_block_stride = tl.load(fragments + 3 * row_fragments + fragment, mask=inside, other=0)
    chunk = address + (block_id & ((1 << SUB_BLOCK_SHIFT) - 1)) * block_stride
    record = slot + offset + (block_id >> SUB_BLOCK_SHIFT) * sub_block_stride
    return inside, block, chunk, record


@triton.jit
def encode(
    fragment_table,
    block_table,
    outcomes,
    row_fragments,
    num_fragments,
    num_blocks,
    VALUES: tl.constexpr,
    CHUNKS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    RECORD_ALIGNMENT: tl.constexpr,
    SUB_BLOCK_SHIFT: tl.constexpr,
):
    most_escapes: tl.constexpr = VALUES // 32 - 1
    inside, block, chunk, record = places(
        fragment_table, block_table, row_fragments, num_fragments, num_blocks, CHUNKS, SUB_BLOCK_SHIFT
    )
    word = tl.arange(0, VALUES // 2)
    mask = inside[:, None]
    source = tl.multiple_of(chunk.to(tl.pointer_type(tl.int32)), ALIGNMENT)[:, None] + word[None, :]
    words = tl.load(source, mask=mask, other=0)
    even, odd = (words >> 7) & 0xFF, (words >> 23) & 0xFF
    top = tl.reduce(tl.maximum(even, odd), 1, tl.standard._elementwise_max)
    even_code, odd_code = code_of(even, tl.maximum(top - 14, 0)), code_of(odd, tl.maximum(top - 14, 0))
    escapes = (even_code == 15).to(tl.int32) + (odd_code == 15).to(tl.int32)
    count = tl.reduce(escapes, 1, tl.standard._sum_combine)
    most = tl.reduce(count, 0, tl.standard._elementwise_max)
    tries = 0
    while (most > most_escapes) & (tries < 15):
        below = tl.maximum(tl.where(even < top[:, None], even, 0), tl.where(odd < top[:, None], odd, 0))
        top = tl.where(count > most_escapes, tl.reduce(below, 1, tl.standard._elementwise_max), top)
        even_code, odd_code = code_of(even, tl.maximum(top - 14, 0)), code_of(odd, tl.maximum(top - 14, 0))
        escapes = (even_code == 15).to(tl.int32) + (odd_code == 15).to(tl.int32)
        count = tl.reduce(escapes, 1, tl.standard._sum_combine)
        most = tl.reduce(count, 0, tl.standard._elementwise_max)
        tries += 1
    mantissas = ((words >> 8) & 0x80) | (words & 0x7F) | ((words >> 16) & 0x8000) | ((words >> 8) & 0x7F00)
    target = tl.multiple_of(record.to(tl.pointer_type(tl.int16)), RECORD_ALIGNMENT)[:, None] + word[None, :]
    tl.store(target, mantissas.to(tl.int16), mask=mask)
    codes = tl.multiple_of((record + VALUES).to(tl.pointer_type(tl.int8)), RECORD_ALIGNMENT)[:, None] + word[None, :]
    tl.store(codes, (even_code | (odd_code << 4)).to(tl.int8), mask=mask)
    # The base, and zeros behind the last escape: no byte is stored twice.
    rest = (record + VALUES // 2 * 3).to(tl.pointer_type(tl.int8))
    place = tl.arange(0, VALUES // 32)[None, :]
    base = tl.where(count > most_escapes, 255, tl.maximum(top - 14, 0))
    unused = (place == 0) | (place > count[:, None])
    tl.store(rest[:, None] + place, tl.where(place == 0, base[:, None], 0).to(tl.int8), mask=mask & unused)
    if most > 0:
        last = tl.associative_scan(escapes, 1, tl.standard._sum_combine)  # of this word's
        first = last - escapes + 1
        kept = mask & (even_code == 15) & (first <= most_escapes)
        tl.store(rest[:, None] + first, even.to(tl.int8), mask=kept)
        kept = mask & (odd_code == 15) & (last <= most_escapes)
        tl.store(rest[:, None] + last, odd.to(tl.int8), mask=kept)
    outcome = outcomes.to(tl.pointer_type(tl.int64)) + block
    tl.store(outcome, (count > most_escapes).to(tl.int64), mask=inside & (count > most_escapes))


@triton.jit
def decode(
    fragment_table,
    block_table,
    outcomes,
    row_fragments,
    num_fragments,
    num_blocks,
    VALUES: tl.constexpr,
    CHUNKS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    RECORD_ALIGNMENT: tl.constexpr,
    SUB_BLOCK_SHIFT: tl.constexpr,
):
    most_escapes: tl.constexpr = VALUES // 32 - 1
    inside, block, chunk, record = places(
        fragment_table, block_table, row_fragments, num_fragments, num_blocks, CHUNKS, SUB_BLOCK_SHIFT
    )
    word = tl.arange(0, VALUES // 2)
    mask = inside[:, None]
    source = tl.multiple_of(record.to(tl.pointer_type(tl.int16)), RECORD_ALIGNMENT)[:, None] + word[None, :]
    mantissas = tl.load(source, mask=mask, other=0).to(tl.int32)
    codes = tl.multiple_of((record + VALUES).to(tl.pointer_type(tl.int8)), RECORD_ALIGNMENT)[:, None] + word[None, :]
    both = tl.load(codes, mask=mask, other=0).to(tl.int32)
    rest = (record + VALUES // 2 * 3).to(tl.pointer_type(tl.int8))
    base = tl.load(rest, mask=inside, other=0).to(tl.int32) & 0xFF
    even_code, odd_code = both & 15, (both >> 4) & 15
    even = tl.where(even_code == 0, 0, base[:, None] + even_code)
    odd = tl.where(odd_code == 0, 0, base[:, None] + odd_code)
    escapes = (even_code == 15).to(tl.int32) + (odd_code == 15).to(tl.int32)
    most = tl.reduce(tl.reduce(escapes, 1, tl.standard._elementwise_max), 0, tl.standard._elementwise_max)
    if most > 0:
        last = tl.associative_scan(escapes, 1, tl.standard._sum_combine)  # of this word's
        first = tl.minimum(last - escapes + 1, most_escapes)
        last = tl.minimum(last, most_escapes)
        escaped = even_code == 15
        even = tl.where(escaped, tl.load(rest[:, None] + first, mask=mask & escaped, other=0).to(tl.int32) & 0xFF, even)
        escaped = odd_code == 15
        odd = tl.where(escaped, tl.load(rest[:, None] + last, mask=mask & escaped, other=0).to(tl.int32) & 0xFF, odd)
    low = ((mantissas & 0x80) << 8) | (even << 7) | (mantissas & 0x7F)
    high = ((mantissas & 0x8000) << 16) | (odd << 23) | ((mantissas & 0x7F00) << 8)
    fits = base != 255
    target = tl.multiple_of(chunk.to(tl.pointer_type(tl.int32)), ALIGNMENT)[:, None] + word[None, :]
    tl.store(target, low | high, mask=mask & fits[:, None])
    outcome = outcomes.to(tl.pointer_type(tl.int64)) + block
    tl.store(outcome, (base == 255).to(tl.int64), mask=inside & (base == 255))
