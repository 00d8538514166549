# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The gather kernel: blocks between planes and slots, in either direction, without an address for every copy.

    fragment_table  int64, (5, num_fragments), device memory: address of a fragment in block 0, bytes from block to
                    block, offset in a slot, bytes from one block of a slot to the next, words
    block_table     int64, (2, num_blocks), pinned memory: block id, and above SUB_BLOCK_SHIFT bits the position of the
                    block in its slot; address of the slot

A fragment is up to 2 KiB of a block of one plane. An item is one fragment of one block; items are numbered by fragment,
then by block, so that neighbours are adjacent in a slot. A program moves tiles of FRAGMENTS items, each of up to WORDS
words (UNIFORM: all of WORDS), and the programs of the grid take tiles in turn.

All words of a tile are loaded before the first is stored, and the block table of a program's next tile is read
meanwhile, since a read over the link takes as long for it as for the words. With tiles of 64 KiB in the registers of
1024 threads, two programs of an H200 fill PCIe Gen5 x16: 4 KiB blocks 50.4 GB/s in, 51.4 out, of 55.5. A ring of
asynchronous copies through shared memory, three stages of 32 KiB, reached 37.9 in both directions with two programs and
needed four to fill the link.
"""

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
def gather(
    fragment_table,
    block_table,
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
    items = num_fragments * num_blocks
    lane = tl.arange(0, FRAGMENTS)
    word = tl.arange(0, WORDS)
    begin = tl.program_id(0) * FRAGMENTS
    step = tl.num_programs(0) * FRAGMENTS
    block = (begin + lane) // num_fragments
    block_id = tl.load(blocks + block, mask=begin + lane < items, other=0)
    slot = tl.load(blocks + num_blocks + block, mask=begin + lane < items, other=0)
    for first in tl.range(begin, items, step, num_stages=1):
        item = first + lane
        inside = item < items
        fragment = item % num_fragments
        address = tl.load(fragments + fragment, mask=inside, other=0)
        block_stride = tl.load(fragments + num_fragments + fragment, mask=inside, other=0)
        offset = tl.load(fragments + 2 * num_fragments + fragment, mask=inside, other=0)
        sub_block_stride = tl.load(fragments + 3 * num_fragments + fragment, mask=inside, other=0)
        device = address + (block_id & ((1 << SUB_BLOCK_SHIFT) - 1)) * block_stride
        host = slot + offset + (block_id >> SUB_BLOCK_SHIFT) * sub_block_stride

        following = item + step
        block = following // num_fragments
        block_id = tl.load(blocks + block, mask=following < items, other=0)
        slot = tl.load(blocks + num_blocks + block, mask=following < items, other=0)

        source = device if STORE else host
        target = host if STORE else device
        # The hint must follow the cast to a pointer: before it, Triton forgets it and accesses are narrow.
        source_words = tl.multiple_of(source.to(tl.pointer_type(word_type)), ALIGNMENT)[:, None] + word[None, :]
        target_words = tl.multiple_of(target.to(tl.pointer_type(word_type)), ALIGNMENT)[:, None] + word[None, :]
        mask = inside[:, None]
        if not UNIFORM:
            words = tl.load(fragments + 4 * num_fragments + fragment, mask=inside, other=0)
            mask = mask & (word[None, :] < tl.multiple_of(words, ALIGNMENT * 8 // WORD_BITS)[:, None])
        tl.store(target_words, tl.load(source_words, mask=mask), mask=mask)
