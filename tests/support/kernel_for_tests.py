"""Triton kernels for the tests of modules, launches and compilation."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803 (Triton's constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def doubled(value):
    return value + value


@triton.jit
def copy_rows(table, result, num_rows, WORDS: tl.constexpr, ROWS: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Copies rows of `WORDS` 8-byte words, `ROWS` at a time, and leaves `num_rows` (4 bytes) at `result`.

    `table` holds the addresses of the sources, and behind them those of the targets.
    """
    addresses = table.to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS, num_stages=3):
        row = first + lane
        inside = row < num_rows
        source = tl.load(addresses + row, mask=inside, other=0).to(tl.pointer_type(tl.int64))
        target = tl.load(addresses + num_rows + row, mask=inside, other=0).to(tl.pointer_type(tl.int64))
        sources = tl.multiple_of(source, ALIGNMENT)[:, None] + word[None, :]
        targets = tl.multiple_of(target, ALIGNMENT)[:, None] + word[None, :]
        tl.store(targets, tl.load(sources, mask=inside[:, None]), mask=inside[:, None])
    if tl.program_id(0) == 0:
        tl.store(result.to(tl.pointer_type(tl.int32)), num_rows)


@triton.jit
def write_word(target, value, BYTES: tl.constexpr):
    """Program 0 writes twice `value`, as `BYTES` bytes, to `target`."""
    if tl.program_id(0) == 0:
        pointer = target.to(tl.pointer_type(tl.int64 if BYTES == 8 else tl.int32))
        tl.store(pointer, doubled(value))


@triton.jit
def read_word(source, target):
    tl.store(target.to(tl.pointer_type(tl.int64)), tl.load(source.to(tl.pointer_type(tl.int64))))


@triton.jit
def broken(target):
    """Triton cannot compile this, nor interpret it."""
    tl.store(target.to(tl.pointer_type(tl.int64)), tl.there_is_no_such_function(target))


not_a_kernel = 5
