"""bf16-12: bf16 values in 12 bits each, without loss. The format, and its reference in numpy.

A *chunk* is up to 1,024 consecutive values of one block of one plane. Its *record* has three areas:

    | sign and mantissa, a byte a value | codes, 4 bits a value | base | escapes, 0 where unused |
    0                                   V                       3V/2                    49V/32

The code stands for the exponent. 0: exponent 0, as zeros and denormals have it. 1 to 14: exponent base + code. 15: an
escape, whose exponent is the next byte behind the base, in the order of the values. The code of an even value is the
low half of its byte.

The encoder takes the largest exponent of a chunk for the top of the window, so base is that less 14, or 0. If more
values lie below the window than there are bytes for escapes, it takes the next smaller exponent that occurs, and so on,
`TRIES` times at most: a few large values, infinities and NaN then are the escapes. If none is enough, the chunk does
not fit: its base is 255, and there are no escapes. The record of a chunk depends on nothing else.

A block with a chunk that does not fit is not stored. It has no place where it lies raw, since pools, tiers and loads
would then have records of two sizes, and real KV has shown no such block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvoffload.errors import LayoutError
from kvoffload.internal.types import UInt8Array

CodecName: TypeAlias = Literal["raw", "bf16-12"]
CODECS: tuple[CodecName, ...] = ("raw", "bf16-12")

WINDOW = 14  # exponents, without 0
ESCAPE = 15
UNFIT = 255  # above every base
TRIES = 8  # smaller tops
RECORD_PART, CHUNK_PARTS = 49, 64  # a record has so many parts of its chunk's bytes
_MOST_VALUES, _LEAST_VALUES = 1024, 256


class Coding(NamedTuple):
    """How a group's blocks are cut into chunks.

    Attributes:
        values: of a chunk: 1,024, 512 or 256.
    """

    values: int

    @property
    def chunk_bytes(self) -> int:
        """Of its values, not coded."""
        return 2 * self.values

    @property
    def most_escapes(self) -> int:
        return self.values // 32 - 1

    @property
    def record_bytes(self) -> int:
        return self.chunk_bytes * RECORD_PART // CHUNK_PARTS

    def coded(self, nbytes: int) -> int:
        """Return the bytes that so many bytes of whole chunks take."""
        return nbytes // self.chunk_bytes * self.record_bytes

    def encode(self, blocks: NDArray[np.uint16]) -> tuple[UInt8Array, NDArray[np.bool_]]:
        """Return the records of whole chunks, uint8, (chunks, record_bytes), and whether each fits: bool, (chunks,)."""
        values = np.ascontiguousarray(blocks).reshape(-1, self.values)
        exponents = (values >> 7 & 0xFF).astype(np.int16)
        top = exponents.max(axis=1)
        codes = _codes(exponents, top)
        for _ in range(TRIES):
            tight = (codes == ESCAPE).sum(axis=1) > self.most_escapes
            if not tight.any():
                break
            smaller = np.where(exponents < top[:, np.newaxis], exponents, 0).max(axis=1)
            top = np.where(tight, smaller, top)
            codes = _codes(exponents, top)
        escaped = codes == ESCAPE
        fits = escaped.sum(axis=1) <= self.most_escapes
        records = np.zeros((len(values), self.record_bytes), dtype=np.uint8)
        mantissas, halves, rest = np.split(records, self._ends, axis=1)
        mantissas[:] = values >> 8 & 0x80 | values & 0x7F
        halves[:] = codes[:, ::2] | codes[:, 1::2] << 4
        rest[:, 0] = np.where(fits, np.maximum(top - WINDOW, 0), UNFIT)
        chunk, value = escaped.nonzero()
        place = escaped.cumsum(axis=1)[chunk, value]
        kept = fits[chunk]
        rest[chunk[kept], place[kept]] = exponents[chunk, value][kept]
        return records, fits

    def decode(self, records: UInt8Array) -> tuple[NDArray[np.uint16], NDArray[np.bool_]]:
        """Return the values of records, uint16, (chunks, values), and whether each was one that fits. (The values of
        one that did not are meaningless.)
        """
        records = np.ascontiguousarray(records).reshape(-1, self.record_bytes)
        mantissas, halves, rest = np.split(records.astype(np.uint16), self._ends, axis=1)
        codes = np.stack([halves & 15, halves >> 4], axis=2).reshape(mantissas.shape)
        exponents = np.where(codes == 0, 0, rest[:, :1] + codes)
        chunk, value = (codes == ESCAPE).nonzero()
        place = (codes == ESCAPE).cumsum(axis=1)[chunk, value]
        exponents[chunk, value] = rest[chunk, np.minimum(place, self.most_escapes)]
        values = (mantissas & 0x80) << 8 | exponents << 7 | mantissas & 0x7F
        return values.astype(np.uint16), rest[:, 0] != UNFIT

    @property
    def _ends(self) -> list[int]:
        return [self.values, self.values * 3 // 2]


def _codes(exponents: NDArray[np.int16], top: NDArray[np.int16]) -> NDArray[np.uint8]:
    code = exponents - np.maximum(top - WINDOW, 0)[:, np.newaxis]
    outside = (code < 1) | (code > WINDOW)
    return np.where(exponents == 0, 0, np.where(outside, ESCAPE, code)).astype(np.uint8)


def coding_of(widths: Sequence[int], name: str) -> Coding:
    """Return the coding of blocks of so many bytes in each plane.

    Raises:
        LayoutError: they are not whole chunks.
    """
    chunk_bytes = math.gcd(2 * _MOST_VALUES, *widths)
    if chunk_bytes < 2 * _LEAST_VALUES:
        wrong = next(width for width in widths if width % (2 * _LEAST_VALUES))
        raise LayoutError(
            f"codec='bf16-12' codes blocks of a multiple of {2 * _LEAST_VALUES} bytes in each plane, and {name} has a "
            f"plane with {wrong}: give it codec='raw', or more tokens a block"
        )
    return Coding(chunk_bytes // 2)
