"""Encodes blocks into a ring in device memory, and decodes them out of it: `kvoffload.layout.coding` has the format.

Tables are as for `pack`; a fragment is a chunk. `outcomes`, int64, (num_blocks,), is pinned memory, where a block
gets a 1 if one of its chunks does not fit, or was stored as one that does not. Such a chunk is not decoded. Each
program codes CHUNKS chunks of VALUES values; beyond the last one it codes that again, which writes the same bytes.

A program takes two values as one word, and computes with the exponents of both at once: in bits 0 to 7 and 16 to 23 of
a word, whose bits 15 and 31 (-0x7FFF8000, the "tops") are free for the results of comparisons. It is small, since it
has to find room beside the programs of long kernels of others: one warp, no shared memory. So each thread takes four
words at a time in all areas, which needs no exchange between threads, although it could store more at once; and
escapes, of which there are few, are taken one by one, by their places in the chunk.

Reductions name their combining functions, since Triton's interpreter calls no jitted ones, such as `tl.max`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inside_of(exponents, base):
    """The tops of the exponents from base + 1 to base + 14, and each exponent less base + 1 in the bits below."""
    above = exponents + (0x7FFF - base)[:, None] * 0x10001
    return above & ~(above - 0xE000E) & -0x7FFF8000, above


@triton.jit
def escapes_of(exponents, base):
    """The tops of the exponents that are neither 0 nor inside."""
    inside, _ = inside_of(exponents, base)
    return (exponents + 0x7FFF7FFF) & ~inside & -0x7FFF8000


@triton.jit
def count_of(escapes):
    both = tl.reduce((escapes >> 15) & 0x10001, 1, tl.standard._sum_combine)
    return (both & 0xFFFF) + (both >> 16)


@triton.jit
def top_of(exponents):
    return tl.reduce(tl.maximum(exponents & 0xFF, exponents >> 16), 1, tl.standard._elementwise_max)


@triton.jit
def window_of(source, exponents, MOST_ESCAPES: tl.constexpr):
    """The base of each chunk, and how many escapes it then has."""
    top = top_of(exponents)
    base = tl.maximum(top - 14, 0)
    count = count_of(escapes_of(exponents, base))
    most = tl.reduce(count, 0, tl.standard._elementwise_max)
    if most > MOST_ESCAPES:
        exponents = (tl.load(source) >> 7) & 0xFF00FF
        tries = 0
        while (most > MOST_ESCAPES) & (tries < 8):  # layout.coding.TRIES
            larger = ((exponents + (0x8000 - top)[:, None] * 0x10001) >> 15) & 0x10001  # or as large as the top
            top = tl.where(count > MOST_ESCAPES, top_of(exponents & ~(larger * 0xFF)), top)
            base = tl.maximum(top - 14, 0)
            count = count_of(escapes_of(exponents, base))
            most = tl.reduce(count, 0, tl.standard._elementwise_max)
            tries += 1
    return base, count


@triton.jit
def store_escapes(rest, exponents, escapes, left):
    """One by one, by their places, behind the base at `rest`."""
    word = tl.arange(0, exponents.shape[1])[None, :]
    done = 0
    while done < left:
        found = tl.where(escapes == 0, 1 << 20, word)  # beyond every place
        here = found == tl.reduce(found, 1, tl.standard._elementwise_min)[:, None]
        exponent, escaped = of_word(exponents, here), of_word(escapes, here)
        even = (escaped & 0x8000) != 0
        done += 1
        exponent = tl.where(even, exponent, exponent >> 16)
        tl.store(rest + done, exponent.to(tl.int8), mask=escaped != 0)
        escapes = tl.where(here, escapes & tl.where(even, -0x80000000, 0)[:, None], escapes)


@triton.jit
def of_word(words, here):
    """Of each chunk the one word that is here."""
    return tl.reduce(tl.where(here, words, 0), 1, tl.standard._sum_combine)


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
    """Of each chunk of this program: the position of its block, its address, and that of its record."""
    fragments = fragment_table.to(tl.pointer_type(tl.int64))
    blocks = block_table.to(tl.pointer_type(tl.int64))
    item = tl.minimum(tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS), num_fragments * num_blocks - 1)
    block = item // num_fragments
    block_id = tl.load(blocks + block)
    slot = tl.load(blocks + num_blocks + block)
    fragment = item - block * num_fragments
    address = tl.load(fragments + fragment)
    block_stride = tl.load(fragments + row_fragments + fragment)
    offset = tl.load(fragments + 2 * row_fragments + fragment)
    sub_block_stride = tl.load(fragments + 3 * row_fragments + fragment)
    chunk = address + (block_id & ((1 << SUB_BLOCK_SHIFT) - 1)) * block_stride
    record = slot + offset + (block_id >> SUB_BLOCK_SHIFT) * sub_block_stride
    return block, chunk, record


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
    SUB_BLOCK_SHIFT: tl.constexpr,
):
    most_escapes: tl.constexpr = VALUES // 32 - 1
    block, chunk, record = places(
        fragment_table, block_table, row_fragments, num_fragments, num_blocks, CHUNKS, SUB_BLOCK_SHIFT
    )
    word = tl.arange(0, VALUES // 2)
    source = tl.multiple_of(chunk.to(tl.pointer_type(tl.int32)), ALIGNMENT)[:, None] + word[None, :]
    # 1. Signs and mantissas; the window. The words are loaded again for each step: kept, they would take registers that
    # make room for half as many programs.
    words = tl.load(source)
    mantissas = (words & 0x7F007F) | ((words >> 8) & 0x800080)  # in bytes 0 and 2
    target = tl.multiple_of(record.to(tl.pointer_type(tl.int16)), 8)[:, None] + word[None, :]
    tl.store(target, (mantissas | (mantissas >> 8)).to(tl.int16))
    exponents = (words >> 7) & 0xFF00FF
    base, count = window_of(source, exponents, most_escapes)
    # 2. Codes.
    exponents = (tl.load(source) >> 7) & 0xFF00FF
    inside, above = inside_of(exponents, base)
    escapes = (exponents + 0x7FFF7FFF) & ~inside & -0x7FFF8000
    coded = ((above + 0x10001) & (((inside >> 15) & 0x10001) * 15)) | (((escapes >> 15) & 0x10001) * 15)
    codes = tl.multiple_of(record.to(tl.pointer_type(tl.int8)), 4)[:, None] + (VALUES + word)[None, :]
    tl.store(codes, (coded | (coded >> 12)).to(tl.int8))
    # 3. The base, and zeros behind the last escape: no byte is stored twice.
    rest = (record + VALUES // 2 * 3).to(tl.pointer_type(tl.int8))
    place = tl.arange(0, VALUES // 32)[None, :]
    fits = count <= most_escapes
    kept = tl.where(fits, count, 0)
    first_byte = tl.where(fits, base, 255)[:, None]
    unused = (place == 0) | (place > kept[:, None])
    tl.store(rest[:, None] + place, tl.where(place == 0, first_byte, 0).to(tl.int8), mask=unused)
    # 4. Escapes.
    left = tl.reduce(kept, 0, tl.standard._elementwise_max)
    if left > 0:
        exponents = (tl.load(source) >> 7) & 0xFF00FF
        escapes = tl.where(fits[:, None], escapes_of(exponents, base), 0)
        store_escapes(rest, exponents, escapes, left)
    outcome = outcomes.to(tl.pointer_type(tl.int64)) + block
    tl.store(outcome, (count > most_escapes).to(tl.int64), mask=count > most_escapes)


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
    SUB_BLOCK_SHIFT: tl.constexpr,
):
    most_escapes: tl.constexpr = VALUES // 32 - 1
    block, chunk, record = places(
        fragment_table, block_table, row_fragments, num_fragments, num_blocks, CHUNKS, SUB_BLOCK_SHIFT
    )
    word = tl.arange(0, VALUES // 2)
    rest = (record + VALUES // 2 * 3).to(tl.pointer_type(tl.int8))
    base = tl.load(rest).to(tl.int32) & 0xFF
    source = tl.multiple_of(record.to(tl.pointer_type(tl.int16)), 8)[:, None] + word[None, :]
    mantissas = tl.load(source).to(tl.int32) & 0xFFFF
    codes = tl.multiple_of(record.to(tl.pointer_type(tl.int8)), 4)[:, None] + (VALUES + word)[None, :]
    both = tl.load(codes).to(tl.int32)
    both = (both & 15) | ((both & 0xF0) << 12)
    used = ((both + 0x7FFF7FFF) >> 15) & 0x10001
    exponents = (both + base[:, None] * 0x10001) & (used * 0xFF)
    done = 1
    escape = tl.load(rest + 1).to(tl.int32) & 0xFF  # never 0; behind the last is one
    escapes = (both + 0x7FF17FF1) & -0x7FFF8000
    while (tl.reduce(escape, 0, tl.standard._elementwise_max) > 0) & (done <= most_escapes):
        found = tl.where(escapes == 0, 1 << 20, word[None, :])
        here = found == tl.reduce(found, 1, tl.standard._elementwise_min)[:, None]
        even = (of_word(escapes, here) & 0x8000) != 0
        bits = tl.where(escape > 0, tl.where(even, 0xFF, 0xFF0000), 0)
        exponents = tl.where(here, exponents ^ ((exponents ^ (escape * 0x10001)[:, None]) & bits[:, None]), exponents)
        escapes = tl.where(here, escapes & tl.where(even, -0x80000000, 0)[:, None], escapes)
        done += 1
        escape = tl.load(rest + tl.minimum(done, most_escapes)).to(tl.int32) & 0xFF
    spread = mantissas | (mantissas << 8)  # in bytes 0 and 2
    signed = (spread & 0x7F007F) | ((spread & 0x800080) << 8)
    fits = base != 255
    target = tl.multiple_of(chunk.to(tl.pointer_type(tl.int32)), ALIGNMENT)[:, None] + word[None, :]
    tl.store(target, signed | (exponents << 7), mask=fits[:, None])
    outcome = outcomes.to(tl.pointer_type(tl.int64)) + block
    tl.store(outcome, (base == 255).to(tl.int64), mask=base == 255)
