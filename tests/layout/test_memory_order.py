"""Views whose blocks are permuted in memory: `from_tree` names the order of memory, and what cannot know it is refused.

Content is compared by a naive loop: it writes each element's coordinates, by the names of their axes, where its strides
say.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

import kvoffload
from kvoffload import NO_WAIT, KVLayout, LayoutError, OffloadEngine, ShardedLayout

NAMES = ("tokens", "heads", "dim", "half")
ORDERS = tuple(itertools.permutations(NAMES))
EXTENTS = tuple(itertools.product((1, 2, 4), repeat=4))
UNORDERED = tuple(itertools.combinations_with_replacement((1, 2, 4), 4))  # the names take all places in ORDERS
MEANINGLESS = (0, -6, 2, 1 << 40)  # strides of axes of extent 1, as libraries have all kinds of


class Exported:
    """An array of float16 with `__cuda_array_interface__`."""

    dtype = np.dtype("float16")

    def __init__(self, shape: Sequence[int], strides: Sequence[int] | None, address: int = 1 << 20) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(shape),
            "strides": None if strides is None else tuple(strides),
            "data": (address, False),
            "typestr": "<f2",
            "version": 3,
            "stream": None,
        }


def strides_of(memory: Sequence[str], extents: Mapping[str, int]) -> dict[str, int]:
    """Bytes from one element to the next by name, for a block whose axes have this order in memory."""
    strides, step = {}, 2
    for name in reversed(memory):
        strides[name] = step
        step *= extents[name]
    return strides | {"blocks": step}


def view(memory: Sequence[str], axes: Sequence[str], extents: Mapping[str, int], address: int = 1 << 20) -> Exported:
    """An array of these axes, in the order of its shape, over blocks with their axes in the order `memory`."""
    strides = strides_of(memory, extents)
    odd = {name: MEANINGLESS[at] for at, name in enumerate(NAMES) if extents[name] == 1}
    extents = {**extents, "blocks": 3}
    return Exported([extents[name] for name in axes], [(strides | odd)[name] for name in axes], address)


def content(memory: Sequence[str], extents: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """What lies in a block, byte after byte: of each element its coordinates along NAMES."""
    strides = strides_of(memory, extents)
    found: dict[int, tuple[int, ...]] = {}
    for place in itertools.product(*(range(extents[name]) for name in NAMES)):
        found[sum(at * strides[name] for at, name in zip(place, NAMES, strict=True))] = place
    assert sorted(found) == list(range(0, strides["blocks"], 2))
    return tuple(found[offset] for offset in sorted(found))


def described(extents: Mapping[str, int]) -> dict[str, Any]:
    return {"tokens_per_block": extents["tokens"], "block_axes": NAMES}


# equal fingerprints mean equal bytes


@pytest.mark.parametrize("counts", UNORDERED, ids=str)
def test_equal_fingerprints_mean_equal_bytes(counts: tuple[int, ...]) -> None:
    """24 orders in memory, each seen in 24 orders of the shape, with the blocks at each place of it."""
    extents = dict(zip(NAMES, counts, strict=True))
    bytes_of: dict[bytes, set[tuple[tuple[int, ...], ...]]] = {}
    for number, (memory, shape) in enumerate(itertools.product(ORDERS, ORDERS)):
        axes = (*shape[: number % 5], "blocks", *shape[number % 5 :])
        layout = KVLayout.from_tree(view(memory, axes, extents), axes=axes)
        bytes_of.setdefault(layout.fingerprint, set()).add(content_once(memory, counts))
    assert all(len(contents) == 1 for contents in bytes_of.values()), "one fingerprint, and blocks of different bytes"
    if 1 not in counts:
        assert len(bytes_of) == len(ORDERS), "and equal bytes of such blocks have equal fingerprints"


@cache
def content_once(memory: tuple[str, ...], counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return content(memory, dict(zip(NAMES, counts, strict=True)))


@pytest.mark.parametrize("block_major", [False, True])
def test_planes_at_any_place_change_no_names(block_major: bool) -> None:
    """Planes between two blocks, as in `(blocks, planes, ...)`, or outside of all."""
    extents = {"tokens": 4, "heads": 2, "dim": 8, "half": 1}
    counts, axes = {**extents, "blocks": 3, "planes": 2}, ("half", "planes", "tokens", "blocks", "heads", "dim")
    for memory in ORDERS:
        strides = strides_of(memory, extents)
        block = strides["blocks"]
        strides |= {"blocks": 2 * block, "planes": block} if block_major else {"planes": 3 * block}
        array = Exported([counts[name] for name in axes], [strides[name] for name in axes])
        layout = KVLayout.from_tree(array, axes=axes)
        assert (len(layout.groups[0].planes), layout.groups[0].num_blocks) == (2, 3)
        of_a_plane = tuple(name for name in axes if name != "planes")
        assert layout.block_axes == KVLayout.from_tree(view(memory, of_a_plane, extents), axes=of_a_plane).block_axes


def test_axes_of_one_element_keep_their_place() -> None:
    """Whatever stride the library gives them."""
    for odd in (0, 2, 16, -4, 1 << 50):
        array = Exported((3, 4, 1, 2, 8), (128, 16, odd, 64, 2))  # memory: blocks, heads, tokens, dim
        layout = KVLayout.from_tree(array, axes=("blocks", "tokens", "half", "heads", "dim"))
        assert layout.block_axes == ("heads", "half", "tokens", "dim")


@pytest.mark.parametrize("memory", ORDERS, ids="-".join)
def test_a_slot_holds_the_bytes_that_the_names_say(device: kvoffload.Device, memory: tuple[str, ...]) -> None:
    """The slot, read as a contiguous array of the layout's `block_axes`, is the view's block."""
    extents = {"tokens": 4, "heads": 2, "dim": 8, "half": 1}
    base = device.empty((3, *(extents[name] for name in memory)), "float16")
    base.buffer.copy_from(np.arange(3 * 64, dtype="float16"))
    seen = np.from_dlpack(base).transpose(0, *(memory.index(name) + 1 for name in NAMES))
    layout = KVLayout.from_tree(view(memory, ("blocks", *NAMES), extents, base.address), axes=("blocks", *NAMES))
    assert layout.block_axes is not None
    assert layout.tokens_per_block == 4
    with OffloadEngine(layout, device=device, num_slots=3) as engine:
        engine.store([2], [1], after=NO_WAIT).wait(10)
        slot = engine.slots[1, :128].view("float16").reshape([extents[name] for name in layout.block_axes])
        for place in itertools.product(*(range(extents[name]) for name in NAMES)):
            where = dict(zip(NAMES, place, strict=True))
            assert slot[tuple(where[name] for name in layout.block_axes)] == seen[(2, *place)]


# every row-major block has the fingerprint that it had in the first releases of version 2


FROZEN = {
    "from_tree": "a18d3ca82bc36cdd54dfc0d3d6a7c8a2",
    "from_arrays": "330c02db5cc573eeb3a88e1588f3e467",
    "from_stacked": "42f99ea37695c5d33be9bae0c9ff52d9",
}


def row_major(how: str) -> Iterator[bytes]:
    """Fingerprints of all orders of the names, all extents, with and without several blocks a slot."""
    for number, (names, counts) in enumerate(itertools.product(ORDERS, EXTENTS)):
        options: dict[str, Any] = {"blocks_per_slot": 1 + number % 2}
        tokens = counts[names.index("tokens")]
        named = {"tokens_per_block": tokens, "block_axes": names, **options}
        if how == "from_tree":
            yield KVLayout.from_tree(
                Exported((2, 3, *counts), None), axes=("planes", "blocks", *names), **options
            ).fingerprint
        elif how == "from_arrays":
            yield KVLayout.from_arrays([Exported((3, *counts), None)], **named).fingerprint
        else:
            yield KVLayout.from_stacked(
                Exported((3, 2, *counts), None), plane_axis=1, block_axis=0, **named
            ).fingerprint


@pytest.mark.parametrize("how", FROZEN)
def test_row_major_blocks_keep_their_fingerprints(how: str) -> None:
    assert blake2b(b"".join(row_major(how)), digest_size=16).hexdigest() == FROZEN[how]


# what cannot know the order is refused


def permuted() -> Iterator[tuple[Exported, Mapping[str, int], bool]]:
    """Views with the shape `(blocks, *NAMES)`, the extents of a block, and whether memory has another order."""
    for counts, memory in itertools.product(UNORDERED, ORDERS):
        extents = dict(zip(NAMES, counts, strict=True))
        wide = [name for name in memory if extents[name] > 1]
        yield view(memory, ("blocks", *NAMES), extents), extents, wide != [name for name in NAMES if name in wide]


@pytest.mark.parametrize("names", [NAMES, ("tokens", "rest"), ("rest",)], ids=len)
def test_names_for_a_permuted_block_are_refused(names: tuple[str, ...]) -> None:
    """In whatever order and number they are; without names it is a layout, which has no keys."""
    refused = 0
    for array, extents, other in permuted():
        options: dict[str, Any] = {"tokens_per_block": extents["tokens"], "block_axes": names}
        stacked = Exported((2, *array.__cuda_array_interface__["shape"]), (1 << 20, *strides_in(array)))
        ways: list[Any] = [
            lambda array=array, options=options: KVLayout.from_arrays([array], **options),
            lambda array=stacked, options=options: KVLayout.from_stacked(array, plane_axis=0, block_axis=-5, **options),
            lambda array=stacked, options=options: ShardedLayout.from_stacked(
                [array], plane_axis=0, block_axis=1, **options
            ),
        ]
        for make in ways:
            if other:
                with pytest.raises(LayoutError, match=r"in memory .* and block_axes=.*use KVLayout\.from_tree\("):
                    make()
                refused += 1
            else:
                assert make().tokens_per_block == extents["tokens"]
        plain = KVLayout.from_arrays([array], tokens_per_block=extents["tokens"])
        assert plain.groups[0].planes[0].block_bytes == 2 * np.prod(list(extents.values()))
    assert refused > 500


def strides_in(array: Exported) -> tuple[int, ...]:
    strides: tuple[int, ...] = array.__cuda_array_interface__["strides"]
    return strides


def test_the_refusal_names_the_array_that_is_permuted() -> None:
    straight = Exported((3, 4, 2, 8), None)
    other = Exported((3, 4, 2, 8), (128, 16, 64, 2), 1 << 21)
    with pytest.raises(LayoutError, match=r"^arrays\[1\] of shape \(3, 4, 2, 8\) has the axes \[1, 2, 3\] of a block in the order \[2, 1, 3\]"):  # fmt: skip  # noqa: E501
        KVLayout.from_arrays([straight, other], tokens_per_block=4, block_axes=("tokens", "heads", "dim"))
    with pytest.raises(LayoutError, match=r"^array of shape") as refused:
        ShardedLayout.from_stacked(
            [Exported((1, 3, 4, 2, 8), None), Exported((1, 3, 4, 2, 8), (512, 128, 16, 64, 2))],
            plane_axis=0,
            block_axis=1,
            block_axes=("tokens", "heads", "dim"),
        )
    assert refused.value.__notes__ == ["for arrays[1]"]


AXES = ("blocks", "tokens", "heads", "dim")


def tree(*strides: tuple[int, ...], shape: tuple[int, ...] = (3, 4, 2, 8)) -> list[Exported]:
    return [Exported(shape, each, (1 + at) << 20) for at, each in enumerate(strides)]


def test_a_tree_of_mixed_orders_is_refused() -> None:
    nhd, hnd = (128, 32, 16, 2), (128, 16, 64, 2)
    for strides in ((nhd, hnd), (hnd, nhd), (hnd, hnd, nhd)):
        with pytest.raises(LayoutError, match=r"^arrays\[0\] has a block's axes .* in memory, and arrays\[[12]\] in the order"):  # fmt: skip  # noqa: E501
            KVLayout.from_tree(tree(*strides), axes=AXES)
    with pytest.raises(LayoutError, match=r"arrays\['v'\]\[1\] in the order \['heads', 'tokens', 'dim'\]"):
        KVLayout.from_tree({"v": tree(nhd, hnd), "k": Exported((3, 4, 2, 8), nhd, 1 << 30)}, axes=AXES)
    assert KVLayout.from_tree(tree(hnd, hnd), axes=AXES).block_axes == ("heads", "tokens", "dim")


@pytest.mark.parametrize("first", [True, False])
def test_an_array_that_fits_every_order_follows_the_others(first: bool) -> None:
    """A scale for each token and head beside values whose memory has the tokens last."""
    values, scale = Exported((3, 4, 2, 8), (128, 2, 64, 8)), Exported((3, 4, 2, 1), (16, 2, 8, 0), 1 << 21)
    arrays = [scale, values] if first else [values, scale]
    assert KVLayout.from_tree(arrays, axes=AXES).block_axes == ("heads", "dim", "tokens")
    assert KVLayout.from_tree([scale], axes=AXES).block_axes == ("heads", "tokens", "dim")


def test_shards_of_mixed_orders_are_refused() -> None:
    nhd, hnd = (128, 32, 16, 2), (128, 16, 64, 2)
    straight, other, third = (
        KVLayout.from_tree(Exported((3, 4, 2, 8), strides, (1 + at) << 20), axes=AXES)
        for at, strides in enumerate((nhd, hnd, hnd))
    )
    with pytest.raises(
        LayoutError, match=r"layouts\[1\] has block_axes \('heads', 'tokens', 'dim'\), layouts\[0\] has"
    ):
        ShardedLayout([straight, other])
    shards = ShardedLayout([other, third]).fingerprint
    named: dict[str, Any] = {"dtype": "float16", "tokens_per_block": 4, "block_axes": ("heads", "tokens", "dim")}
    planes = [[[plane] for plane in layout.groups[0].planes] for layout in (other, third)]
    assert shards == ShardedLayout([KVLayout(each, **named) for each in planes]).fingerprint


# other exporters


class Capsule:
    """An array of a library that has DLPack alone; `array` is numpy's, and says that it is on a GPU."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array, self.dtype, self.itemsize = array, array.dtype, array.itemsize

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()


def test_orders_of_arrays_with_dlpack() -> None:
    for memory in ORDERS:
        extents = {"tokens": 4, "heads": 2, "dim": 8, "half": 1}
        base = np.zeros((3, *(extents[name] for name in memory)), np.float16)
        seen = base.transpose(0, *(memory.index(name) + 1 for name in NAMES))
        by_dlpack = KVLayout.from_tree(Capsule(seen), axes=("blocks", *NAMES))
        assert by_dlpack.block_axes == KVLayout.from_tree(view(memory, ("blocks", *NAMES), extents), axes=("blocks", *NAMES)).block_axes  # fmt: skip  # noqa: E501
        assert KVLayout.from_tree(Capsule(base), axes=("blocks", *memory)).block_axes == memory


@pytest.mark.parametrize(
    "strides",
    [(128, 32, 16, -2), (128, -32, 16, 2), (128, 0, 16, 2), (128, 32, 0, 2), (128, 16, 64, 4), (256, 64, 16, 2)],
    ids=["reversed dim", "reversed tokens", "broadcast tokens", "broadcast heads", "overlapping", "a gap"],
)
def test_blocks_that_are_no_permutation_of_a_range_are_refused(strides: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"arrays is not contiguous within a block"):
        KVLayout.from_tree(Exported((3, 4, 2, 8), strides), axes=AXES)
