# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The gather kernel: blocks between planes and slots, in either direction, without an address for every copy.

    row_table    int64, (5, num_rows), device memory: address of a row in block 0, bytes from block to block, offset in
                 a slot, bytes from one block of a slot to the next, words
    block_table  int64, (2, num_blocks), pinned memory: block id, above SUB_BLOCK_SHIFT bits its place in the slot;
                 address of the slot

An item is a row of a block; items are numbered row by row, then block by block, so that neighbours are adjacent in a
slot. A program moves tiles of ROWS items, each of up to WORDS words (UNIFORM: all of WORDS), in turn with the other
programs of the grid.

All words of a tile are loaded before the first is stored, and the block table of a program's next tile is read
meanwhile: its way over the link is as long as that of the words. With tiles of 64 KiB in the registers of 1024 threads,
two programs of an H200 fill PCIe Gen5 x16: 4 KiB blocks 50.4 GB/s in, 51.4 out, of 55.5. A ring of asynchronous copies
through shared memory, three stages of 32 KiB, made it 37.9 both ways with two programs and took four to fill the link.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather(
    row_table,
    block_table,
    num_rows,
    num_blocks,
    STORE: tl.constexpr,
    WORD_BITS: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    UNIFORM: tl.constexpr,
    SUB_BLOCK_SHIFT: tl.constexpr,
):
    word_type: tl.constexpr = tl.int64 if WORD_BITS == 64 else tl.int32 if WORD_BITS == 32 else tl.int8
    rows = row_table.to(tl.pointer_type(tl.int64))
    blocks = block_table.to(tl.pointer_type(tl.int64))
    items = num_rows * num_blocks
    lane = tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)
    begin = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    block = (begin + lane) // num_rows
    block_id = tl.load(blocks + block, mask=begin + lane < items, other=0)
    slot = tl.load(blocks + num_blocks + block, mask=begin + lane < items, other=0)
    for first in tl.range(begin, items, step, num_stages=1):
        item = first + lane
        inside = item < items
        row = item % num_rows
        address = tl.load(rows + row, mask=inside, other=0)
        block_stride = tl.load(rows + num_rows + row, mask=inside, other=0)
        offset = tl.load(rows + 2 * num_rows + row, mask=inside, other=0)
        sub_block_stride = tl.load(rows + 3 * num_rows + row, mask=inside, other=0)
        device = address + (block_id & ((1 << SUB_BLOCK_SHIFT) - 1)) * block_stride
        host = slot + offset + (block_id >> SUB_BLOCK_SHIFT) * sub_block_stride

        following = item + step
        block = following // num_rows
        block_id = tl.load(blocks + block, mask=following < items, other=0)
        slot = tl.load(blocks + num_blocks + block, mask=following < items, other=0)

        source = device if STORE else host
        target = host if STORE else device
        # The hint must follow the cast to a pointer: before it, Triton forgets it and accesses are narrow.
        source_words = tl.multiple_of(source.to(tl.pointer_type(word_type)), ALIGNMENT)[:, None] + word[None, :]
        target_words = tl.multiple_of(target.to(tl.pointer_type(word_type)), ALIGNMENT)[:, None] + word[None, :]
        mask = inside[:, None]
        if not UNIFORM:
            words = tl.load(rows + 4 * num_rows + row, mask=inside, other=0)
            mask = mask & (word[None, :] < tl.multiple_of(words, ALIGNMENT * 8 // WORD_BITS)[:, None])
        tl.store(target_words, tl.load(source_words, mask=mask), mask=mask)
