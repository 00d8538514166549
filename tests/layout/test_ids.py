"""Ids of blocks and slots: what is accepted, what is refused, and that the result is a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from counting import python_calls

from kvoffload import LayoutError
from kvoffload.layout.ids import as_ids


@pytest.mark.parametrize(
    "given", [[3, 0], (3, 0), np.array([3, 0]), np.array([3, 0], np.uint8), np.array([3, 9, 0])[::2], range(3, -1, -3)]
)
def test_ids_are_whatever_numpy_turns_into_integers(given: Any) -> None:
    ids = as_ids("blocks", given, 4)
    assert ids.tolist() == [3, 0]
    assert ids.dtype == np.int64


@pytest.mark.parametrize("given", [[], (), np.empty(0), np.empty(0, np.int32), range(0)])
def test_no_ids_are_legal(given: Any) -> None:
    assert as_ids("blocks", given, 4).shape == (0,)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([0, 4], r"blocks\[1\] is 4, outside \[0, 4\)"),
        ([0, 1, -1, 9], r"blocks\[2\] is -1, outside \[0, 4\)"),
        (np.array([1 << 63], np.uint64), r"blocks\[0\] is 9223372036854775808"),
        ([1.0], "blocks must hold integers, got dtype float64"),
        ([True], "blocks must hold integers, got dtype bool"),
        (["a"], "blocks must hold integers"),
        ([None], "blocks must hold integers"),
        (3, r"blocks must be one-dimensional, got shape \(\)"),
        ([[1]], r"blocks must be one-dimensional, got shape \(1, 1\)"),
        (np.empty((0, 2), np.int64), "one-dimensional"),
        ([[1], [1, 2]], "blocks must be something numpy turns into"),
        ([1 << 70], rf"blocks\[0\] is {1 << 70}, outside \[0, 4\)"),
        (None, "blocks must be one-dimensional"),
    ],
)
def test_other_ids_are_refused_by_name_and_position(given: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        as_ids("blocks", given, 4)


# copies


@pytest.mark.parametrize(
    "given",
    [
        np.arange(4),
        np.arange(8)[::2],
        np.arange(4)[::-1],
        np.arange(4, dtype=np.uint64),
        np.arange(4, dtype=np.int32),
        np.arange(4, dtype=">i8"),
        np.arange(4).view(np.recarray),
    ],
    ids=lambda given: f"{given.dtype.str}, strides {given.strides}",
)
def test_ids_are_copied_whatever_they_are(given: Any) -> None:
    """int64 arrays were returned as they were: a transfer that waits read what the caller wrote into them later."""
    before = given.tolist()
    ids = as_ids("blocks", given, 8)
    assert not np.shares_memory(ids, given)
    given[:] = 7
    assert ids.tolist() == before
    assert (type(ids), ids.dtype) == (np.ndarray, np.dtype(np.int64))
    assert ids.flags.c_contiguous
    assert ids.flags.owndata


def test_ids_of_an_object_that_exports_its_memory_are_copied() -> None:
    class Exporter:
        def __init__(self) -> None:
            self.values = np.arange(4)

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            return self.values

    exporter = Exporter()
    ids = as_ids("blocks", exporter, 8)
    exporter.values[:] = 7
    assert ids.tolist() == [0, 1, 2, 3]
    assert as_ids("blocks", memoryview(bytes(range(3))), 8).tolist() == [0, 1, 2]


# what is refused, with the remedy


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([True, 2], r"^blocks\[0\] is True, a boolean among integers; pass integers"),
        ((2, False), r"^blocks\[1\] is False, a boolean among integers; pass integers"),
        ([np.int64(2), np.bool_(True)], r"^blocks\[1\] is True, a boolean among integers; pass integers"),
        ([2, np.array(True)], r"^blocks\[1\] is True, a boolean among integers"),
        ([True, True], r"^blocks must hold integers, got dtype bool; .* pass numpy.flatnonzero\(blocks\)"),
        (np.array([True, False]), r"^blocks must hold integers, got dtype bool; .* pass numpy.flatnonzero\(blocks\)"),
        (np.ma.array([1, 2], mask=[False, True]), r"^blocks is a masked array.* such as blocks.compressed\(\)"),
        (np.ma.array([1, 2]), r"^blocks is a masked array"),
        (np.array([1, 2], dtype=object), r"^blocks must hold integers, got dtype object; .*numpy.array\(blocks,"),
        (np.array([1.0, 2.0]), r"^blocks must hold integers, got dtype float64; .*numpy.array\(blocks, dtype="),
        (np.array(["1"]), r"^blocks must hold integers, got dtype <U1; pass a list of ints or an integer array"),
        (range(-1, 3), r"^blocks\[0\] is -1, outside \[0, 4\)"),
        (range(10**12), r"^blocks\[4\] is 4, outside \[0, 4\)"),
        (range(3, -2, -1), r"^blocks\[4\] is -1, outside \[0, 4\)"),
        (range(3, -6, -2), r"^blocks\[2\] is -1, outside \[0, 4\)"),
        (range(1, 10**18, 2), r"^blocks\[2\] is 5, outside \[0, 4\)"),
        (range(9, -2, -1), r"^blocks\[0\] is 9, outside \[0, 4\)"),
        ([1 << 200], r"^blocks\[0\] is an integer of 201 bits, outside \[0, 4\)"),
        ([0, -(1 << 63) - 1], r"^blocks\[1\] is -9223372036854775809, outside \[0, 4\)"),
    ],
)
def test_ids_that_numpy_would_convert_wrongly_are_refused(given: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        as_ids("blocks", given, 4)


def test_an_array_that_cannot_be_converted_is_refused_by_name() -> None:
    class Lost:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            raise RuntimeError("the array was deleted")

    with pytest.raises(LayoutError, match=r"^blocks must be something numpy turns into .*: the array was deleted"):
        as_ids("blocks", Lost(), 4)


# cost


@pytest.mark.parametrize("given", [[1, 2], (1, 2), range(2), np.arange(2), np.arange(2, dtype=np.int32)], ids=repr)
def test_ids_take_two_python_calls(given: Any) -> None:
    as_ids("blocks", given, 4)
    assert len(python_calls(lambda: as_ids("blocks", given, 4))) <= 2
