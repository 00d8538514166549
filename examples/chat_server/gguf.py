"""Reads GGUF, llama.cpp's file format: metadata, and tensors as float32.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes the file. The formats here are those of
SmolLM2's file. Quantized weights come in groups of 32: Q4_1 has a scale, a minimum and 4 bits a weight, Q8_0 a scale
and 8 bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Groups = npt.NDArray[np.uint8]  # (groups, bytes of a group)

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


def _half(groups: Groups, start: int) -> Float32Array:
    """A float16 of each group: (groups, 1)."""
    return np.ascontiguousarray(groups[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Groups) -> Float32Array:
    """32 weights of 4 bits: first the low halves of 16 bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


# How a tensor is stored: weights and bytes of a group, and what decodes groups.
FORMATS: dict[int, tuple[int, int, Callable[[Groups], Float32Array]]] = {
    0: (1, 4, lambda groups: groups.view("<f4")),
    3: (32, 20, lambda groups: _nibbles(groups[:, 4:]) * _half(groups, 0) + _half(groups, 2)),  # Q4_1
    8: (32, 34, lambda groups: groups[:, 2:].view(np.int8) * _half(groups, 0)),  # Q8_0
}


class GgufFile:
    """A GGUF file. `metadata` has its keys and values; `tensor` reads one tensor."""

    def __init__(self, path: str | Path) -> None:
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        self._position = 0
        if self._bytes(4) != b"GGUF" or self._scalar("<I") not in (2, 3):
            raise ValueError(f"{path} is no GGUF file of version 2 or 3")
        num_tensors, num_values = self._scalar("<Q"), self._scalar("<Q")
        self.metadata: dict[str, Any] = {self._text(): self._value(self._scalar("<I")) for _ in range(num_values)}
        self._tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}  # shape, format, offset
        for _ in range(num_tensors):
            name = self._text()
            extents = [self._scalar("<Q") for _ in range(self._scalar("<I"))]  # the fastest first
            self._tensors[name] = tuple(reversed(extents)), self._scalar("<I"), self._scalar("<Q")
        alignment = self.metadata.get("general.alignment", 32)
        self._start = -(-self._position // alignment) * alignment

    def tensor(self, name: str) -> Float32Array:
        """A matrix is (outputs, inputs)."""
        shape, kind, offset = self._tensors[name]
        if kind not in FORMATS:
            raise ValueError(f"tensor {name} has the format {kind}; known are {sorted(FORMATS)}")
        weights, nbytes, decode = FORMATS[kind]
        num_groups, start = math.prod(shape) // weights, self._start + offset
        groups = np.asarray(self._data[start : start + num_groups * nbytes]).reshape(num_groups, nbytes)
        return decode(groups).reshape(shape)

    def _bytes(self, count: int) -> bytes:
        self._position += count
        return self._data[self._position - count : self._position].tobytes()

    def _scalar(self, code: str) -> Any:
        return struct.unpack(code, self._bytes(struct.calcsize(code)))[0]

    def _text(self) -> str:
        return self._bytes(self._scalar("<Q")).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            item, count = self._scalar("<I"), self._scalar("<Q")
            return [self._value(item) for _ in range(count)]
        return self._scalar(_SCALARS[kind])
