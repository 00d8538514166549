"""A grid-stride copy kernel as other projects use it, for comparison: one copy at a time, with addresses for each."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grid_stride(sources, targets, sizes, count, WORDS: tl.constexpr):
    """Three device arrays of int64: source, target and bytes (a multiple of 8) of each copy."""
    word_pointer: tl.constexpr = tl.pointer_type(tl.int64)
    source_array = sources.to(word_pointer)
    target_array = targets.to(word_pointer)
    size_array = sizes.to(word_pointer)
    lane = tl.arange(0, WORDS)
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=1):
        source = tl.load(source_array + index).to(word_pointer)
        target = tl.load(target_array + index).to(word_pointer)
        words = tl.load(size_array + index) // 8
        for first in tl.range(0, words, WORDS, num_stages=1):
            word = first + lane
            inside = word < words
            tl.store(target + word, tl.load(source + word, mask=inside), mask=inside)
