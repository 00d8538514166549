"""Descriptor tables: numpy rows that the bindings' own structures read, field by field."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from kvoffload.driver import FlatTable, SourceOrder, StridedTable
from kvoffload.driver.tables import DTYPE_2D, DTYPE_3D, Column, Columns


def columns(count: int) -> dict[str, Column]:
    """Six columns whose every number is different, with bits beyond 32."""
    names = ["source", "target", "source_pitch", "target_pitch", "width", "height"]
    return {
        name: (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x1_0000_0101) + np.uint64(index << 50)
        for index, name in enumerate(names)
    }


def in_order(given: dict[str, Column]) -> Columns:
    """As `fill` takes them."""
    return tuple(given.values())  # type: ignore[return-value]


def test_source_orders_are_cudas() -> None:
    kinds = cuda.CUmemcpySrcAccessOrder
    assert int(kinds.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) == SourceOrder.STREAM
    assert int(kinds.CU_MEMCPY_SRC_ACCESS_ORDER_ANY) == SourceOrder.ANY


@pytest.mark.parametrize("order", SourceOrder)
def test_a_3d_operation_reads_as_the_bindings_structure(order: SourceOrder) -> None:
    table = StridedTable(4, batched=True)
    table.make_objects(4)
    given = columns(3)
    table.fill(in_order(given), order)
    for index, operation in enumerate(table.objects[:3]):
        assert isinstance(operation, cuda.CUDA_MEMCPY3D_BATCH_OP)
        pointer = cuda.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
        for side, operand in (("source", operation.src), ("target", operation.dst)):
            assert operand.type == pointer
            assert int(operand.op.ptr.ptr) == int(given[side][index])
            assert operand.op.ptr.rowLength == int(given[f"{side}_pitch"][index])
            assert operand.op.ptr.layerHeight == 0
        extent = operation.extent
        assert (extent.width, extent.height, extent.depth) == (
            int(given["width"][index]),
            int(given["height"][index]),
            1,
        )
        assert int(operation.srcAccessOrder) == order
        assert operation.flags == 0


def test_a_2d_operation_reads_as_the_bindings_structure() -> None:
    table = StridedTable(4, batched=False)
    table.make_objects(4)
    given = columns(3)
    table.fill(in_order(given), SourceOrder.STREAM)
    unified = cuda.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    for index in range(3):
        copy = table.objects[index]
        assert isinstance(copy, cuda.CUDA_MEMCPY2D)
        assert (copy.srcMemoryType, copy.dstMemoryType) == (unified, unified)
        assert (int(copy.srcDevice), int(copy.dstDevice)) == (int(given["source"][index]), int(given["target"][index]))
        assert (copy.srcPitch, copy.dstPitch) == (int(given["source_pitch"][index]), int(given["target_pitch"][index]))
        assert (copy.WidthInBytes, copy.Height) == (int(given["width"][index]), int(given["height"][index]))
        assert (copy.srcXInBytes, copy.srcY, copy.dstXInBytes, copy.dstY) == (0, 0, 0, 0)


class _Memory:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def memory_at(address: int, nbytes: int) -> Any:
    """Bytes of this process as an array."""
    return np.asarray(_Memory(address, nbytes))


def written_by_bindings(made: Any, dtype: np.dtype[Any]) -> Any:
    """The memory of a bindings object as a row of `dtype`."""
    return memory_at(int(made.getPtr()), dtype.itemsize).view(dtype)[0].copy()


def test_what_the_bindings_write_reads_as_our_rows() -> None:
    """The other way round: an offset that is wrong and unused by the tests above would show here."""
    operation = cuda.CUDA_MEMCPY3D_BATCH_OP()
    operation.src.type = operation.dst.type = cuda.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
    operation.src.op.ptr.ptr, operation.src.op.ptr.rowLength = 0x1234_5678_9ABC, 300
    operation.dst.op.ptr.ptr, operation.dst.op.ptr.rowLength = 0x2345_6789_ABCD, 400
    operation.extent.width, operation.extent.height, operation.extent.depth = 100, 7, 1
    operation.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    row = written_by_bindings(operation, DTYPE_3D)
    assert row.tolist() == (1, 0x1234_5678_9ABC, 300, 1, 0x2345_6789_ABCD, 400, 100, 7, 1, 3)

    copy = cuda.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    copy.srcDevice, copy.srcPitch = cuda.CUdeviceptr(0x1234_5678_9ABC), 300
    copy.dstDevice, copy.dstPitch = cuda.CUdeviceptr(0x2345_6789_ABCD), 400
    copy.WidthInBytes, copy.Height = 100, 7
    row = written_by_bindings(copy, DTYPE_2D)
    assert row.tolist() == (4, 0x1234_5678_9ABC, 300, 4, 0x2345_6789_ABCD, 400, 100, 7)


def test_strided_objects_are_made_once_and_follow_the_rows() -> None:
    table = StridedTable(4, batched=True)
    table.make_objects(4)
    table.fill(in_order(columns(4)), SourceOrder.STREAM)
    before = table.objects[:4]
    table.fill(in_order({name: column + np.uint64(8) for name, column in columns(2).items()}), SourceOrder.ANY)
    after = table.objects[:2]
    assert all(old is new for old, new in zip(before, after, strict=False))
    assert len(after) == 2
    assert int(before[0].src.op.ptr.ptr) == int(columns(1)["source"][0]) + 8
    assert int(before[3].src.op.ptr.ptr) == int(columns(4)["source"][3])  # not refilled
    assert table.address == int(before[0].getPtr())


def made_flat_table(capacity: int) -> FlatTable:
    table = FlatTable(capacity)
    table.lists(0, 0)
    return table


def test_flat_tables_hand_over_chunks_of_live_objects() -> None:
    table = made_flat_table(6)
    targets, sources, sizes = (np.arange(5, dtype=np.uint64) + np.uint64(base) for base in (1 << 40, 1 << 41, 100))
    table.fill(targets, sources, sizes)
    given = table.lists(1, 4)
    assert [int(each) for each in given[0]] == targets[1:4].tolist()
    assert [int(each) for each in given[1]] == sources[1:4].tolist()
    assert given[2] == [101, 102, 103]
    assert all(type(each) is int for each in given[2])
    assert all(isinstance(each, cuda.CUdeviceptr) for each in given[0] + given[1])
    table.fill(sources, targets, sizes)
    assert int(given[0][0]) == int(sources[1])
    assert table.lists(0, 5)[0][1] is given[0][0]


@pytest.mark.parametrize("order", SourceOrder)
def test_flat_attributes_set_the_order_and_nothing_else(order: SourceOrder) -> None:
    attributes = made_flat_table(1).attributes[order][0]
    assert isinstance(attributes, cuda.CUmemcpyAttributes)
    assert int(attributes.srcAccessOrder) == order
    assert (int(attributes.srcLocHint.type), attributes.srcLocHint.id) == (0, 0)
    assert (int(attributes.dstLocHint.type), attributes.dstLocHint.id) == (0, 0)
    assert attributes.flags == 0


@pytest.mark.parametrize("nth", range(1, 4))
def test_flat_objects_are_made_all_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """An interrupt while they are made leaves a table that can be used: the next call makes all of them."""
    table, left = FlatTable(2), [nth]
    kinds = ("CUdeviceptr", "CUdeviceptr", "CUmemcpyAttributes")
    with monkeypatch.context() as patch:

        def interrupted(kind: Any) -> Any:
            def make(**options: Any) -> Any:
                left[0] -= kind.__name__ == kinds[nth - 1]
                if left[0] == 0:
                    raise KeyboardInterrupt
                return kind(**options)

            return make

        for name in set(kinds):
            patch.setattr(cuda, name, interrupted(getattr(cuda, name)))
        with pytest.raises(KeyboardInterrupt):
            table.lists(0, 2)
    assert not table.attributes, "so they are made again"
    values = np.arange(2, dtype=np.uint64)
    table.fill(values, values, values)
    assert [len(each) for each in table.lists(0, 2)] == [2, 2, 2]
    assert len(table.attributes) == 4


@pytest.mark.parametrize("nth", [1, 100, 237, 300])
def test_more_flat_objects_are_made_when_they_are_needed(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Those that were made stay. An interrupt among those of the targets, or of the sources, leaves no half."""
    table = FlatTable(300)
    values = np.arange(300, dtype=np.uint64)
    table.fill(values, values + np.uint64(1000), values)
    first = table.lists(0, 1)
    kind, made = cuda.CUdeviceptr, itertools.count(1)

    def interrupted(**given: int) -> Any:
        if next(made) == nth:
            raise KeyboardInterrupt
        return kind(**given)

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "CUdeviceptr", interrupted)
        with pytest.raises(KeyboardInterrupt):
            table.lists(0, 300)
    assert table.lists(0, 1)[0][0] is first[0][0]
    for start, stop in ((60, 70), (250, 300), (0, 300)):
        targets, sources, sizes = table.lists(start, stop)
        assert [int(each) for each in targets] == list(range(start, stop)) == sizes
        assert [int(each) for each in sources] == list(range(1000 + start, 1000 + stop))
    assert table.lists(0, 300)[0][0] is first[0][0]
    assert len(table.attributes) == 4


@pytest.mark.parametrize("batched", [True, False])
def test_more_strided_objects_are_made_when_they_are_needed(batched: bool) -> None:
    table = StridedTable(300, batched=batched)
    table.make_objects(1)
    first = table.objects[0]
    assert len(table.objects) < 300
    table.make_objects(300)
    assert table.objects[0] is first
    step = table.rows.strides[0]
    assert [int(each.getPtr()) for each in table.objects] == [table.address + index * step for index in range(300)]


def test_raw_addresses_are_those_of_the_same_arrays() -> None:
    table = made_flat_table(6)
    table.fill(*(np.arange(6, dtype=np.uint64) + np.uint64(base) for base in (1 << 40, 1 << 41, 100)))
    targets, sources, sizes = table.raw_arrays(2)
    attributes, indices = table.raw_attributes(SourceOrder.ANY)
    objects = table.lists(2, 3)
    assert (targets, sources) == (int(objects[0][0].getPtr()), int(objects[1][0].getPtr()))
    assert attributes == int(table.attributes[SourceOrder.ANY][0].getPtr())
    assert all(type(each) is int for each in (targets, sources, sizes, attributes, indices))

    assert memory_at(sizes, 8 * 4).view(np.uint64).tolist() == [102, 103, 104, 105]
    assert memory_at(indices, 8).view(np.uint64).tolist() == [0]
