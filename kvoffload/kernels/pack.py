"""Moves blocks between planes and a ring in device memory, in either direction, without an address for every copy.

    fragment_table  int64, (5, ...), device memory: address of a fragment in block 0, bytes from block to block, offset
                    in a slot, bytes from one block of a slot to the next, words. A row is as long as row_fragments; the
                    fragments to move are the num_fragments from the first one on
    block_table     int64, (2, num_blocks), device memory: block id, and above SUB_BLOCK_SHIFT bits the position of the
                    block in its slot; where the slot would begin in the ring

A fragment is up to 2 KiB of a block of one plane. An item is one fragment of one block; items are numbered by fragment,
then by block, so that neighbours are adjacent in the ring. Each program moves one tile of FRAGMENTS items, each of up
to WORDS words (UNIFORM: all of WORDS): all of them are loaded before the first is stored.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_table(source, target, num_words, WORDS: tl.constexpr):
    """`num_words` int64 words, by one program: a table in pinned memory that thousands of programs will read."""
    word = tl.arange(0, WORDS)
    for first in tl.range(0, num_words, WORDS, num_stages=1):
        inside = first + word < num_words
        words = tl.load(source.to(tl.pointer_type(tl.int64)) + first + word, mask=inside)
        tl.store(target.to(tl.pointer_type(tl.int64)) + first + word, words, mask=inside)


@triton.jit
def pack(
    fragment_table,
    block_table,
    row_fragments,
    num_fragments,
    num_blocks,
    STORE: tl.constexpr,
    WORD_BITS: tl.constexpr,
    WORDS: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    UNIFORM: tl.constexpr,
    SUB_BLOCK_SHIFT: tl.constexpr,
):
    word_type: tl.constexpr = tl.int64 if WORD_BITS == 64 else tl.int32 if WORD_BITS == 32 else tl.int8
    fragments = fragment_table.to(tl.pointer_type(tl.int64))
    blocks = block_table.to(tl.pointer_type(tl.int64))
    item = tl.program_id(0) * FRAGMENTS + tl.arange(0, FRAGMENTS)
    word = tl.arange(0, WORDS)
    inside = item < num_fragments * num_blocks
    block = item // num_fragments
    block_id = tl.load(blocks + block, mask=inside, other=0)
    slot = tl.load(blocks + num_blocks + block, mask=inside, other=0)
    fragment = item % num_fragments
    address = tl.load(fragments + fragment, mask=inside, other=0)
    block_stride = tl.load(fragments + row_fragments + fragment, mask=inside, other=0)
    offset = tl.load(fragments + 2 * row_fragments + fragment, mask=inside, other=0)
    sub_block_stride = tl.load(fragments + 3 * row_fragments + fragment, mask=inside, other=0)
    plane = address + (block_id & ((1 << SUB_BLOCK_SHIFT) - 1)) * block_stride
    ring = slot + offset + (block_id >> SUB_BLOCK_SHIFT) * sub_block_stride
    source = plane if STORE else ring
    target = ring if STORE else plane
    # The hint must follow the cast to a pointer: before it, Triton forgets it and accesses are narrow.
    source_words = tl.multiple_of(source.to(tl.pointer_type(word_type)), ALIGNMENT)[:, None] + word[None, :]
    target_words = tl.multiple_of(target.to(tl.pointer_type(word_type)), ALIGNMENT)[:, None] + word[None, :]
    mask = inside[:, None]
    if not UNIFORM:
        words = tl.load(fragments + 4 * row_fragments + fragment, mask=inside, other=0)
        mask = mask & (word[None, :] < tl.multiple_of(words, ALIGNMENT * 8 // WORD_BITS)[:, None])
    tl.store(target_words, tl.load(source_words, mask=mask), mask=mask)
