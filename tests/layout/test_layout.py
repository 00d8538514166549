"""Planes, groups, slots and ids: what is accepted, what is refused, and where a block lies in a slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvoffload import KVLayout, LayoutError, Plane
from kvoffload.layout import planes as planes_module
from kvoffload.layout.planes import share_bytes

FAR = 1 << 20


def plane(address: int = FAR, block_bytes: int = 64, num_blocks: int = 8, block_stride: int | None = None) -> Plane:
    return Plane(address, block_bytes=block_bytes, num_blocks=num_blocks, block_stride=block_stride)


def planes(count: int, **options: Any) -> list[Plane]:
    return [plane(FAR * (index + 1), **options) for index in range(count)]


# planes


def test_a_plane_ends_with_the_payload_of_its_last_block() -> None:
    padded = plane(4096, block_bytes=100, num_blocks=3, block_stride=128)
    assert (padded.span_bytes, padded.end) == (356, 4452)
    assert plane(4096, block_bytes=100, num_blocks=3).block_stride == 100


@pytest.mark.parametrize("number", ["address", "block_bytes", "num_blocks", "block_stride"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "8", True, np.bool_(True), [1], object()])
def test_a_plane_refuses_what_is_no_positive_integer_by_name(number: str, value: Any) -> None:
    numbers: dict[str, Any] = {"address": 4096, "block_bytes": 64, "num_blocks": 8, "block_stride": 64, number: value}
    with pytest.raises(LayoutError, match=f"^{number} must be an integer.*got "):
        Plane(numbers.pop("address"), **numbers)


def test_a_plane_takes_numpy_integers_and_keeps_python_ones() -> None:
    made = Plane(np.uint64(1 << 46), block_bytes=np.int32(64), num_blocks=np.int64(8))
    assert [type(each) for each in (made.address, made.block_bytes, made.num_blocks, made.block_stride)] == [int] * 4
    assert made == plane(1 << 46)


def test_a_plane_refuses_a_stride_below_its_payload() -> None:
    with pytest.raises(LayoutError, match=r"block_stride must be at least block_bytes \(64\), got 63"):
        plane(block_stride=63)


def test_planes_are_frozen_values_with_a_telling_repr() -> None:
    assert plane() == plane()
    assert len({plane(), plane(), plane(num_blocks=9)}) == 2
    with pytest.raises(AttributeError):
        plane().address = 5  # type: ignore[misc]
    assert repr(plane(0x1000, block_stride=80)) == "Plane(0x1000, block_bytes=64, num_blocks=8, block_stride=80)"
    assert repr(plane(0x1000)) == "Plane(0x1000, block_bytes=64, num_blocks=8)"


# slots


@pytest.mark.parametrize(
    ("sizes", "factor", "slot_bytes"),
    [
        ([[64]], 1, 4096),
        ([[4096]], 1, 4096),
        ([[4097]], 1, 8192),
        ([[1024, 1024]], 2, 4096),
        ([[16], [5000, 1]], 2, 12288),
    ],
)
def test_a_slot_is_the_largest_groups_payload_in_whole_pages(
    sizes: list[list[int]], factor: int, slot_bytes: int
) -> None:
    groups = [
        [plane(FAR * (10 * g + p + 1), block_bytes=size) for p, size in enumerate(group)]
        for g, group in enumerate(sizes)
    ]
    layout = KVLayout(groups, blocks_per_slot=factor)
    assert layout.slot_bytes == slot_bytes
    assert [group.payload_bytes for group in layout.groups] == [sum(group) * factor for group in sizes]
    assert [group.bytes_per_block for group in layout.groups] == [sum(group) for group in sizes]


def test_a_slot_holds_plane_after_plane_without_gaps() -> None:
    group = KVLayout([[plane(FAR, 100), plane(2 * FAR, 7), plane(3 * FAR, 50)]], blocks_per_slot=3).groups[0]
    assert group.host_offsets.tolist() == [0, 300, 321]
    assert group.host_offsets.dtype == np.int64


def block_major(sizes: Sequence[int], padding: int = 0, shift: int = 0) -> list[Plane]:
    """Planes as in `(blocks, planes, ...)`, the last one `shift` bytes late."""
    stride, starts = sum(sizes) + padding, np.cumsum([FAR, *sizes])[:-1]
    starts[-1] += shift
    return [plane(int(start), size, block_stride=stride) for start, size in zip(starts, sizes, strict=True)]


@pytest.mark.parametrize("padding", [0, 24])
def test_a_block_major_slot_holds_block_after_block(padding: int) -> None:
    group = KVLayout([block_major([100, 7, 50], padding)], blocks_per_slot=3).groups[0]
    assert group.slot_order == "block-major"
    assert (group.host_offsets.tolist(), group.host_steps.tolist()) == ([0, 100, 107], [157] * 3)
    assert group.payload_bytes == 3 * 157


def test_the_order_of_a_slot_is_that_of_the_memory_unless_it_is_named() -> None:
    whole = block_major([100, 100])
    planes_of = {
        "block-major": [whole, [plane()]],
        "plane-major": [whole[::-1], block_major([64, 64], padding=8, shift=8), planes(2)],
    }
    for expected, groups in planes_of.items():
        for group in groups:
            assert KVLayout([group], blocks_per_slot=2).groups[0].slot_order == expected
    every = KVLayout([whole, planes(2)], blocks_per_slot=2)
    assert [group.slot_order for group in every.groups] == ["block-major", "plane-major"]
    named = KVLayout([whole, planes(2)], blocks_per_slot=2, slot_order="plane-major")
    assert [group.host_offsets.tolist() for group in named.groups] == [[0, 200], [0, 128]]
    assert [group.host_steps.tolist() for group in named.groups] == [[100, 100], [64, 64]]
    with pytest.raises(
        LayoutError, match=r"^slot_order must be \"block-major\", \"plane-major\" or None, got 'blocks'"
    ):
        KVLayout([whole], slot_order="blocks")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "axes", ["tokens", (), ("tokens", ""), ("tokens", "tokens"), (1, 2), ("t\u00f6kens",), 3, {"tokens"}], ids=repr
)
def test_block_axes_are_names(axes: Any) -> None:
    with pytest.raises(LayoutError, match=r"^block_axes must be the names of the axes of one block .*, got "):
        KVLayout([planes(1)], block_axes=axes)


@pytest.mark.parametrize("factor", [1, 2, 3, 5])
def test_pitfall_11_slots_for_partial_first_and_last_slots(factor: int) -> None:
    layout = KVLayout([planes(1)], blocks_per_slot=factor)
    for count in range(12):
        for first in range(factor):
            touched = {(first + index) // factor for index in range(count)}
            assert layout.slots_for(count, first_sub_block=first) == len(touched)


# groups


def test_layouts_refuse_nothing_and_the_wrong_nesting() -> None:
    with pytest.raises(LayoutError, match="groups is empty"):
        KVLayout([])
    with pytest.raises(LayoutError, match=r"groups\[1\] has no planes"):
        KVLayout([planes(1), []])
    everything: list[Any] = [planes(2), plane(), None, 5]
    for wrong in everything:
        with pytest.raises(LayoutError, match=r"groups must be a list of lists of planes: KVLayout\(\[planes\]\), got"):
            KVLayout(wrong)
    with pytest.raises(LayoutError, match=r"groups\[0\]\[1\] must be a Plane, got int"):
        KVLayout([[plane(), 5]])  # type: ignore[list-item]


@pytest.mark.parametrize("factor", [0, -2, 1.5, True, None])
def test_layouts_refuse_a_bad_blocks_per_slot_by_name(factor: Any) -> None:
    with pytest.raises(LayoutError, match=r"^blocks_per_slot must be an integer.*got"):
        KVLayout([planes(1)], blocks_per_slot=factor)


def test_planes_of_a_group_have_one_block_table() -> None:
    with pytest.raises(LayoutError, match=r"groups\[1\].*num_blocks differ: \[8, 9\]"):
        KVLayout([planes(1), [plane(FAR, num_blocks=8), plane(2 * FAR, num_blocks=9)]])


@pytest.mark.parametrize(
    "pair",
    [
        (plane(4096), plane(4096)),
        (plane(4096), plane(4096 + 511)),  # the last byte
        (plane(4096 + 511), plane(4096)),
        (plane(4096, block_stride=128), plane(4096 + 63, block_stride=128)),
        (plane(4096, block_stride=128), plane(4096 + 65, block_stride=128)),  # wraps into the next block
        (plane(4096, block_stride=128), plane(4096 + 64, block_stride=256)),  # other strides meet somewhere
    ],
)
def test_pitfall_12_planes_of_a_group_that_share_a_byte_are_refused(pair: tuple[Plane, Plane]) -> None:
    with pytest.raises(LayoutError, match=r"groups\[0\]\[\d\] and groups\[0\]\[\d\] share bytes of device memory"):
        KVLayout([[plane(FAR), *pair]])


def test_neighbours_and_interleaved_planes_share_nothing() -> None:
    KVLayout([[plane(4096), plane(4096 + 512)]])
    KVLayout([[plane(4096 + 64 * index, block_stride=64 * 5) for index in range(5)]])
    KVLayout([[plane(4096, block_stride=128), plane(4096 + 64, block_stride=128)]])
    KVLayout([[plane(4096)], [plane(4096)]])  # two groups may use the same memory


def test_sharing_is_found_behind_a_plane_that_ends_late() -> None:
    long = Plane(4096, block_bytes=64, num_blocks=8, block_stride=1024)
    between = Plane(4096 + 64, block_bytes=64, num_blocks=8, block_stride=1024)
    hidden = Plane(4096 + 96, block_bytes=64, num_blocks=8, block_stride=1024)
    with pytest.raises(LayoutError, match=r"groups\[0\]\[1\] and groups\[0\]\[2\]"):
        KVLayout([[long, between, hidden]])


def test_the_repr_of_a_layout_says_its_order_and_how_it_folds() -> None:
    folded = KVLayout([planes(64)], blocks_per_slot=2)
    assert repr(folded) == (
        "KVLayout(64 planes x 64 B x 8 blocks (plane-major), blocks_per_slot=2, slot_bytes=8192; "
        "64 planes fold into 1 operation a block by address alone)"
    )
    block_major_repr = "3 planes x 64 B x 8 blocks (block-major), blocks_per_slot=2"
    assert block_major_repr in repr(KVLayout([block_major([64] * 3)], blocks_per_slot=2))
    mixed = KVLayout([block_major([64] * 3)], blocks_per_slot=2, slot_order="plane-major")
    assert "8 blocks (block-major in plane-major slots), blocks_per_slot=2" in repr(mixed)
    same_bytes = KVLayout([block_major([64] * 3)], slot_order="plane-major")  # with one block a slot
    assert "8 blocks (block-major), blocks_per_slot=1" in repr(same_bytes)
    scattered = KVLayout([[plane(FAR * 9), plane(FAR * 5), plane(FAR)]])
    assert "3 planes do not fold (3 operations a block)" in repr(scattered)
    two = KVLayout([planes(4), [plane(FAR * 50, 100 + index) for index in range(1)]])
    assert "4 planes x 64 B x 8 blocks (plane-major) + 1 planes x 100 B x 8 blocks (block-major)," in repr(two)
    sizes = KVLayout([[plane(FAR * (index + 1), 10 + index) for index in range(5)]])
    assert "5 planes x 10/11/12/... B" in repr(sizes)


def test_descriptions_are_kept() -> None:
    layout = KVLayout([planes(1)], dtype="bfloat16", tokens_per_block=16, block_axes=["tokens", "dim"])
    assert (layout.dtype, layout.tokens_per_block, layout.num_groups) == ("bfloat16", 16, 1)
    assert layout.block_axes == ("tokens", "dim")
    with pytest.raises(LayoutError, match="tokens_per_block must be"):
        KVLayout([planes(1)], tokens_per_block=0)


def test_planes_end_below_the_largest_address() -> None:
    Plane((1 << 63) - 65, block_bytes=64, num_blocks=1)
    with pytest.raises(LayoutError, match=r"ends beyond the largest address, 2\*\*63 - 1"):
        Plane((1 << 63) - 64, block_bytes=64, num_blocks=1)


def interleaved(count: int, shift: int = 0) -> list[Plane]:
    """Planes as in `(blocks, planes, ...)`; the last one `shift` bytes early."""
    stride = 64 * count
    starts = [FAR + 64 * index for index in range(count - 1)] + [FAR + stride - 64 - shift]
    return [Plane(start, block_bytes=64, num_blocks=1024, block_stride=stride) for start in starts]


def test_many_interleaved_planes_are_checked_without_comparing_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their spans all overlap, so that there are two million pairs."""
    compared: list[object] = []

    def counted(low: Plane, high: Plane) -> bool:
        compared.append(low)
        return share_bytes(low, high)

    monkeypatch.setattr(planes_module, "share_bytes", counted)
    KVLayout([interleaved(2000)])
    assert not compared
    with pytest.raises(LayoutError, match=r"groups\[0\]\[19[89]\] and groups\[0\]\[19[89]\] share bytes"):
        KVLayout([interleaved(200, shift=1)])


# numbers that do not fit


@pytest.mark.parametrize("number", ["address", "block_bytes", "num_blocks", "block_stride"])
@pytest.mark.parametrize("value", [1 << 63, 1 << 64, 1 << 200, 1 << 20_000], ids=int.bit_length)
def test_a_plane_refuses_numbers_beyond_int64_by_name(number: str, value: int) -> None:
    """A stride of 2**64 with one block was accepted, and overflowed when the engine folded the plane."""
    numbers: dict[str, Any] = {"address": 4096, "block_bytes": 64, "num_blocks": 1, "block_stride": 64, number: value}
    with pytest.raises(LayoutError, match=rf"^{number} must be an integer of at least 1 and below 2\*\*63, got "):
        Plane(numbers.pop("address"), **numbers)


def test_a_plane_refuses_an_object_that_cannot_show_itself() -> None:
    class Unshowable:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    with pytest.raises(LayoutError, match=r"^num_blocks must be an integer.*, got an object of type Unshowable"):
        plane(num_blocks=Unshowable())  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [(1 << 64) // 3 + 1, (1 << 63) - 1, 1 << 62, (1 << 40) // 3 + 1])
def test_blocks_per_slot_with_which_a_slot_would_wrap_around_are_refused(factor: int) -> None:
    """(2**64 + 2) // 3 blocks of 3 bytes were 2 bytes in int64, and a store wrote past the pool."""
    with pytest.raises(LayoutError, match=r"^blocks_per_slot must be (an integer.* 2\*\*63|at most 366503875925)"):
        KVLayout([[plane(block_bytes=3)]], blocks_per_slot=factor)


def test_the_largest_slot_is_one_tebibyte() -> None:
    layout = KVLayout([[plane(block_bytes=1 << 20), plane(FAR << 10, block_bytes=1 << 20)]], blocks_per_slot=1 << 19)
    assert layout.slot_bytes == 1 << 40
    assert layout.groups[0].host_offsets.tolist() == [0, 1 << 39]
    with pytest.raises(LayoutError, match=r"^blocks_per_slot must be at most 524288 for blocks of 2097152 bytes"):
        KVLayout([layout.groups[0].planes], blocks_per_slot=(1 << 19) + 1)


def test_a_block_that_no_slot_can_hold_is_refused() -> None:
    huge = [Plane(FAR + index * (1 << 61), block_bytes=1 << 61, num_blocks=1) for index in range(3)]
    with pytest.raises(LayoutError, match=r"^groups\[0\]: one block has .* check block_bytes of the planes"):
        KVLayout([huge])


@pytest.mark.parametrize("count", [1 << 64, 1 << 63, 1 << 20_000], ids=int.bit_length)
def test_tokens_per_block_beyond_the_fingerprint_are_refused_by_name(count: int) -> None:
    """2**64 was accepted, and `fingerprint` raised struct.error."""
    with pytest.raises(LayoutError, match=r"^tokens_per_block must be an integer of .* below 2\*\*63, got "):
        KVLayout([planes(1)], tokens_per_block=count, dtype="bfloat16")


def test_the_largest_numbers_have_a_fingerprint() -> None:
    axes = ("tokens", "dim")
    layout = KVLayout([[plane(block_bytes=1 << 40)]], tokens_per_block=(1 << 63) - 1, dtype="bfloat16", block_axes=axes)
    assert len(layout.fingerprint) == 16


@pytest.mark.parametrize("value", ["no", 1, None])
def test_on_default_stream_is_a_boolean(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^on_default_stream must be True or False, got "):
        KVLayout([planes(1)], on_default_stream=value)
