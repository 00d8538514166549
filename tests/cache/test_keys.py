"""Keys: what they cover and what not, the same everywhere, and the page that describes their bytes."""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import steps
from hypothesis import given
from hypothesis import strategies as st
from programs import run_program

from kvoffload.cache.keys import KEY_BYTES, chain_keys
from kvoffload.errors import LayoutError
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Plane

PAGE = (Path(__file__).parent.parent.parent / "docs" / "keys.md").read_text()
FAR = 1 << 30
TOKENS = list(range(1000, 1050))
DESCRIPTION: dict[str, Any] = {"dtype": "bfloat16", "tokens_per_block": 4, "block_axes": ("tokens", "heads", "dim")}
token_lists = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 3), max_size=40)
any_text = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates included


def layout(groups: Sequence[Sequence[int]] = ((64, 64),), **changes: Any) -> KVLayout:
    """A plane-major layout with planes of these block bytes by group; 4 tokens a block unless told otherwise."""
    planes = [
        [Plane(FAR * (place + 1), block_bytes=nbytes, num_blocks=8) for place, nbytes in enumerate(group)]
        for group in groups
    ]
    return KVLayout(planes, **{**DESCRIPTION, **changes})


def block_major(groups: Sequence[Sequence[int]] = ((64, 64),), **changes: Any) -> KVLayout:
    """The same, of planes that lie block after block."""
    planes = [
        [
            Plane(FAR + sum(group[:place]), block_bytes=nbytes, num_blocks=8, block_stride=sum(group))
            for place, nbytes in enumerate(group)
        ]
        for group in groups
    ]
    return KVLayout(planes, **{**DESCRIPTION, **changes})


LAYOUT = layout()


def keys_of(token_ids: Any, **changes: Any) -> list[bytes]:
    return chain_keys(token_ids, **{"layout": LAYOUT, "salt": "model", **changes})


# the page, and what it describes written once more


def u64(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def digest(person: str, message: bytes) -> bytes:
    return blake2b(message, digest_size=16, person=person.encode().ljust(16, b"\0")).digest()


def by_the_page(vector: dict[str, Any]) -> tuple[bytes, list[bytes]]:
    """Fingerprint and keys of a vector, from the page's text alone."""
    dtype, salt = vector["dtype"].encode(), vector["salt"].encode("utf-8", "surrogatepass")
    extra, parent = bytes.fromhex(vector["extra"]), bytes.fromhex(vector["parent"])
    per_block, blocks = vector["tokens_per_block"], vector["blocks_per_slot"]
    axes = [name.encode("ascii") for name in vector["block_axes"]]
    shape = u64(2, len(dtype)) + dtype + u64(len(axes)) + b"".join(u64(len(name)) + name for name in axes)
    shape += u64(per_block, blocks, len(vector["groups"]))
    for group in vector["groups"]:
        whole_blocks = vector["slot_order"] == "block-major" and blocks > 1 and len(group) > 1
        shape += u64(1 if whole_blocks else 0, len(group)) + u64(*group)
    fingerprint = digest("kvoffload layout", shape)
    message = u64(1, 16) + fingerprint + u64(len(salt)) + salt + u64(len(extra)) + extra
    root = digest("kvoffload root", message)
    keys, tokens = [parent or root], list(vector["token_ids"])
    while len(tokens) >= per_block * blocks:
        mine, tokens = tokens[: per_block * blocks], tokens[per_block * blocks :]
        message = root + keys[-1] + b"".join(token.to_bytes(4, "little") for token in mine)
        keys.append(digest("kvoffload key", message))
    return fingerprint, keys[1:]


def by_the_library(vector: dict[str, Any]) -> tuple[bytes, list[bytes]]:
    described = {name: vector[name] for name in ("dtype", "block_axes", "tokens_per_block", "blocks_per_slot")}
    made = {"plane-major": layout, "block-major": block_major}[vector["slot_order"]](vector["groups"], **described)
    extra, parent = bytes.fromhex(vector["extra"]), bytes.fromhex(vector["parent"]) or None
    keys = chain_keys(vector["token_ids"], layout=made, salt=vector["salt"], extra=extra, parent=parent)
    return made.fingerprint, keys


def vectors() -> list[dict[str, Any]]:
    found = re.search(r"<!-- vectors -->\n```json\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, "docs/keys.md has no vectors"
    made: list[dict[str, Any]] = json.loads(found.group(1))
    return made


@pytest.mark.parametrize("vector", vectors())
@pytest.mark.parametrize("implementation", [by_the_library, by_the_page])
def test_the_vectors_of_the_page(
    vector: dict[str, Any], implementation: Callable[[dict[str, Any]], tuple[bytes, list[bytes]]]
) -> None:
    fingerprint, keys = implementation(vector)
    assert (fingerprint.hex(), [key.hex() for key in keys]) == (vector["fingerprint"], vector["keys"])


def test_the_vectors_show_every_part_of_the_layout() -> None:
    """Several groups, blocks per slot, keys and bytes of one hash; a parent; text that is not ASCII."""
    every = vectors()
    assert any(len(each["groups"]) > 1 and each["blocks_per_slot"] > 1 and each["extra"] for each in every)
    assert any(len(each["keys"]) > 1 and len(each["token_ids"]) % each["tokens_per_block"] for each in every)
    assert any(4 * each["tokens_per_block"] * each["blocks_per_slot"] + 32 > 128 for each in every)
    assert any(each["parent"] for each in every)
    assert {(each["slot_order"], each["blocks_per_slot"] > 1) for each in every} == set(
        itertools.product(("block-major", "plane-major"), (False, True))
    )
    assert not all(each["salt"].isascii() for each in every)


@given(
    groups=st.lists(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=4), min_size=1, max_size=3),
    dtype=st.sampled_from(["bfloat16", "float16", "uint8", "float8_e5m2"]),
    counts=st.tuples(st.integers(1, 40), st.integers(1, 3)),
    described=st.tuples(
        st.sampled_from(["block-major", "plane-major"]),
        st.lists(st.text(st.characters(codec="ascii"), min_size=1, max_size=9), min_size=1, max_size=4, unique=True),
    ),
    texts=st.tuples(any_text, st.binary(max_size=200), st.sampled_from([b"", bytes(range(16))])),
    tokens=token_lists,
)
def test_the_page_describes_what_the_library_does(
    groups: list[list[int]],
    dtype: str,
    counts: tuple[int, int],
    described: tuple[str, list[str]],
    texts: tuple[str, bytes, bytes],
    tokens: list[int],
) -> None:
    names = ("dtype", "groups", "tokens_per_block", "blocks_per_slot", "salt", "extra", "parent", "token_ids")
    values = (dtype, groups, *counts, texts[0], texts[1].hex(), texts[2].hex(), tokens)
    vector = dict(zip(names, values, strict=True)) | dict(zip(("slot_order", "block_axes"), described, strict=True))
    assert by_the_library(vector) == by_the_page(vector)


# the same everywhere


def test_pitfall_28_another_process_computes_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Python's own hashes are there, and whatever the types were called."""
    program = """
        import numpy as np
        from kvoffload.cache.keys import chain_keys
        from kvoffload.layout.layout import KVLayout
        from kvoffload.layout.planes import Plane
        planes = [Plane(1 << 20, block_bytes=64, num_blocks=3), Plane(1 << 21, block_bytes=64, num_blocks=3)]
        axes = ("tokens", "heads", "dim")
        layout = KVLayout([planes], dtype=np.dtype("f2"), tokens_per_block=4, block_axes=axes)
        tokens = np.arange(1000, 1050, dtype=np.uint16)
        print(*(key.hex() for key in chain_keys(tokens, layout=layout, salt="model", extra=b"x")))
    """
    mine = keys_of(TOKENS, layout=layout(dtype=np.float16), extra=b"x")
    assert len(mine) == 12
    for hash_seed in ("0", "1", "random"):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        assert run_program(program, dev_mode=False).split() == [key.hex() for key in mine]


class Wrapped:
    """An array of another library, as numpy sees it."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self._values, dtype=dtype)


@given(data=st.data(), tokens=token_lists.filter(bool))
def test_the_type_of_token_ids_does_not_matter(data: st.DataObject, tokens: list[int]) -> None:
    kinds = [kind for kind in "bBhHiIqQ" if np.iinfo(kind).max >= max(tokens)]
    values = np.array(tokens, dtype=data.draw(st.sampled_from("<>=")) + data.draw(st.sampled_from(kinds)))
    spread = np.zeros(3 * len(tokens), values.dtype)
    spread[::3] = values
    stacked = np.zeros((len(tokens), 2), values.dtype)
    stacked[:, 1] = values
    forms = {
        "array": values,
        "with gaps": spread[::3],
        "column": stacked[:, 1],
        "backwards": values[::-1].copy()[::-1],
        "read-only": np.frombuffer(values.tobytes(), values.dtype),
        "tuple": tuple(tokens),
        "numpy integers": list(values),
        "wrapped": Wrapped(values),
        "array of Python": array("Q", tokens),
    }
    wanted = keys_of(tokens)
    assert {name: keys_of(form) == wanted for name, form in forms.items()} == dict.fromkeys(forms, True)


def test_a_range_and_no_tokens_at_all_are_token_ids() -> None:
    assert keys_of(range(1000, 1050)) == keys_of(TOKENS)
    for nothing in ([], (), np.empty(0, np.int64), TOKENS[:3]):
        assert keys_of(nothing) == []


class Scalar:
    """A type that says what numpy's type of it is, as those of jax.numpy do."""

    dtype = np.dtype(np.float16)


class Named:
    """A type that has a name only, as PyTorch's do."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return self._name


@pytest.mark.parametrize(
    ("wanted", "spellings"),
    [
        ("float16", [np.float16, np.dtype(np.float16), "f2", "<f2", "half", "fp16", Scalar, Named("torch.float16")]),
        ("float32", [np.float32, "f4", "single", "FP32", np.dtype("=f4"), Named("torch.float32")]),
        ("uint8", [np.uint8, "u1", "|u1", ">u1", np.dtype("B")]),
        ("bfloat16", ["BFloat16", "bf16", Named("bf16"), Named("torch.bfloat16"), Named("bfloat16")]),
        ("float8_e4m3fn", [Named("torch.float8_e4m3fn"), "FLOAT8_E4M3FN"]),
        (">f2", [np.dtype(">f2")]),
    ],
)
def test_a_dtype_has_one_spelling(wanted: str, spellings: list[Any]) -> None:
    prints = {str(each): layout(dtype=each).fingerprint for each in spellings}
    assert prints == dict.fromkeys(prints, layout(dtype=wanted).fingerprint)


def test_different_dtypes_have_different_spellings() -> None:
    names = ("float16", ">f2", "bfloat16", "float32", "int16", "uint16", "float8_e4m3fn", "float8_e5m2", "int8", "bool")
    assert len({layout(dtype=name).fingerprint for name in names}) == len(names)


def test_types_of_ml_dtypes_are_their_names() -> None:
    types: Any = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not here")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"):
        made = getattr(types, name)
        assert layout(dtype=made).fingerprint == layout(dtype=np.dtype(made)).fingerprint
        assert layout(dtype=made).fingerprint == layout(dtype=Named(f"torch.{name}")).fingerprint


# what keys cover


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": layout(dtype="float16")},
        {"layout": layout(tokens_per_block=2)},
        {"layout": layout(tokens_per_block=5)},
        {"layout": layout([(64, 128)])},
        {"layout": layout([(128, 64)])},
        {"layout": layout([(128,)])},
        {"layout": layout([(64, 64, 64)])},
        {"layout": layout([(64,), (64,)])},
        {"layout": layout([(64, 64), (64, 64)])},
        {"layout": layout(blocks_per_slot=2)},
        {"layout": layout(blocks_per_slot=2, tokens_per_block=2)},
        {"layout": layout(block_axes=("heads", "tokens", "dim"))},
        {"layout": layout(block_axes=("tokens", "heads"))},
        {"layout": layout(block_axes=("tokens", "headsdim"))},
        {"layout": layout(block_axes=("tokens", "head", "sdim"))},
        {"salt": ""},
        {"salt": "Model"},
        {"salt": "model\0"},
        {"extra": b"\0"},
        {"extra": b"model"},
        {"parent": bytes(16)},
        {"token_ids": [999, *TOKENS[1:]]},
        {"token_ids": [0, *TOKENS]},
    ],
    ids=str,
)
def test_pitfall_13_a_changed_layout_gives_other_keys(changes: dict[str, Any]) -> None:
    """And so does a changed salt: no key is among the others."""
    keys, changed = keys_of(TOKENS), keys_of(**{"token_ids": TOKENS, **changes})
    assert len(set(keys)) == 12
    assert changed
    assert set(keys).isdisjoint(changed)


def test_pitfall_13_where_the_planes_lie_changes_no_key() -> None:
    planes = [
        Plane(FAR + 100 * place, block_bytes=64, num_blocks=3, block_stride=200, owner=object()) for place in (1, 0)
    ]
    moved = KVLayout([planes], **DESCRIPTION)
    assert moved.fingerprint == LAYOUT.fingerprint == block_major().fingerprint
    assert keys_of(TOKENS, layout=moved) == keys_of(TOKENS)


@pytest.mark.parametrize("groups", [[(64, 64)], [(64,), (64, 32, 64)]])
def test_the_order_of_a_slot_changes_keys_where_it_changes_bytes(groups: list[tuple[int, ...]]) -> None:
    """Two caches of one model, in different orders, share stored bytes if a slot has one block, or the same order."""
    for factor in (1, 2, 8):
        mine, other = (make(groups, blocks_per_slot=factor).fingerprint for make in (layout, block_major))
        assert (mine == other) == (factor == 1)
        for order in ("block-major", "plane-major"):
            alike = {
                make(groups, blocks_per_slot=factor, slot_order=order).fingerprint for make in (layout, block_major)
            }
            assert len(alike) == 1
            assert alike <= {mine, other}
    one_plane = {make([(64,)], blocks_per_slot=4).fingerprint for make in (layout, block_major)}
    assert len(one_plane) == 1


def test_version_1_of_the_fingerprint_is_none_of_version_2() -> None:
    """The vectors of version 0.1."""
    old = {"e472bb9d0809439f1878a0cd19898106", "d7bf0319f5ec881328ee1b455443d6a9", "814b570b7e9c8ef8397624b5b68365b2"}
    assert old.isdisjoint(vector["fingerprint"] for vector in vectors())


@given(tokens=token_lists, cut=st.integers(0, 40), factor=st.integers(1, 3))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(tokens: list[int], cut: int, factor: int) -> None:
    made = layout(blocks_per_slot=factor)
    keys = keys_of(tokens, layout=made)
    assert len(keys) == len(tokens) // (4 * factor)
    assert keys_of(tokens[:cut], layout=made) == keys[: min(cut, len(tokens)) // (4 * factor)]


@given(tokens=token_lists.filter(bool), data=st.data())
def test_a_changed_token_changes_its_key_and_all_behind_it(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, 2**32 - 1).filter(lambda token: token != tokens[place]))
    keys, changed = keys_of(tokens), keys_of([*tokens[:place], other, *tokens[place + 1 :]])
    assert changed[: place // 4] == keys[: place // 4]
    assert set(changed[place // 4 :]).isdisjoint(keys)


@given(tokens=token_lists, cuts=st.lists(st.integers(0, 10), max_size=4))
def test_extending_a_chain_is_hashing_all_at_once(tokens: list[int], cuts: list[int]) -> None:
    keys: list[bytes] = []
    for cut in [*sorted(4 * cut for cut in cuts), len(tokens)]:
        keys += keys_of(tokens[4 * len(keys) : cut], parent=keys[-1] if keys else None)
    assert keys == keys_of(tokens)


def test_a_chain_extended_with_other_arguments_is_another_chain() -> None:
    """A parent of another salt or layout, taken by mistake, hits nothing."""
    parent, rest = keys_of(TOKENS[:8])[-1], TOKENS[8:]
    right = keys_of(rest, parent=parent)
    for wrong in ({"salt": "other"}, {"extra": b"image"}, {"layout": layout(dtype="float16")}):
        assert set(right).isdisjoint(keys_of(rest, parent=parent, **wrong))
        assert set(right).isdisjoint(keys_of(rest, parent=keys_of(TOKENS[:8], **wrong)[-1]))


@given(text=st.text(max_size=6), first=st.integers(0, 20), second=st.integers(0, 20))
def test_the_same_bytes_split_otherwise_are_other_keys(text: str, first: int, second: int) -> None:
    """Between salt and extra, so that neither can be made to read like the other."""
    every = {keys_of(TOKENS[:4], salt=text[:at], extra=text[at:].encode())[0] for at in (first, second)}
    assert len(every) == len({text[:at] for at in (first, second)})


@given(st.lists(st.tuples(any_text, st.binary(max_size=8)), unique=True, max_size=6))
def test_every_salt_and_extra_has_keys_of_its_own(pairs: list[tuple[str, bytes]]) -> None:
    assert len({keys_of(TOKENS[:4], salt=name, extra=extra)[0] for name, extra in pairs}) == len(pairs)


# what is refused


@pytest.mark.parametrize(
    ("token_ids", "culprit"),
    [
        ([1, -1], r"token_ids\[1\] is -1"),
        ([1, 2**32], r"token_ids\[1\] is 4294967296"),
        ([2**63, 1], r"token_ids\[0\] is 9223372036854775808"),
        ([1, 2**64], r"token_ids\[1\] is 18446744073709551616"),
        ([-1, 2**63], r"token_ids\[0\] is -1"),
        (np.array([5, 2**64 - 1], np.uint64), r"token_ids\[1\] is 18446744073709551615"),
        (np.array([0, -128], np.int8), r"token_ids\[1\] is -128"),
        ([1, 2.0], r"token_ids\[1\] is 2.0"),
        (np.array([1.0]), r"token_ids\[0\] is 1.0"),
        ([True, False], r"token_ids\[0\] is True"),
        (np.array([True]), r"token_ids\[0\] is True"),
        ([[1, 2], [3, 4]], r"token_ids\[0\] is \[1, 2\]"),
        (np.zeros((2, 3), np.int64), r"token_ids\[0\] is array\(\[0, 0, 0\]\)"),
        (np.zeros((2, 0), np.int64), r"token_ids\[0\] is array\(\[\], dtype=int64\)"),
        ([1, [2, 3]], r"token_ids\[1\] is \[2, 3\]"),
        (np.arange(96)[None], r"token_ids\[0\] is array\(\[ 0, 1, [^\n]*"),
        (["1"], r"token_ids\[0\] is '1'"),
        ("12", r"token_ids\[0\] is '1'"),
        ([None], r"token_ids\[0\] is None"),
        (5, r"token_ids must be one-dimensional, got shape \(\)"),
        (None, r"token_ids must be one-dimensional, got shape \(\)"),
        (iter(TOKENS), r"token_ids must be one-dimensional, got shape \(\)"),
        (set(TOKENS), r"token_ids must be one-dimensional, got shape \(\)"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "__next__") else repr(value),
)
def test_what_is_no_token_is_refused_by_name(token_ids: Any, culprit: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^{culprit}; token_ids must be one sequence of integers in \[0, 2\*\*32\)"
    ) as one:
        keys_of(token_ids)
    assert one.type is ValueError, "no layout is wrong"


@pytest.mark.parametrize("missing", ["dtype", "block_axes", "tokens_per_block"])
def test_a_layout_that_says_too_little_has_no_keys(missing: str) -> None:
    remedy = (
        rf"^{missing} of the layout is None, .*: give the layout \(or OwnedCache\) .* dtype=.*block_axes=.*\); for .*$"
    )
    changes: dict[str, Any] = {missing: None}
    made = layout(**changes)
    with pytest.raises(LayoutError, match=remedy):
        keys_of(TOKENS, layout=made)
    with pytest.raises(LayoutError, match=remedy):
        _ = made.fingerprint


@pytest.mark.parametrize(
    "dtype",
    [
        object(),
        dict,
        "V2",
        "i4,i4",
        "S3",
        "",
        "<weird>",
        [("k", "f2")],
        16,
        (np.int8, 2),
        True,
        float("nan"),
        np.float32(1.0),
    ],
)
def test_a_dtype_that_is_none_of_one_element_is_refused(dtype: Any) -> None:
    """The text of an object may hold its address, and then differs between processes."""
    with pytest.raises(LayoutError, match=r'^dtype must be the type of one element, such as "bfloat16" .*, got '):
        layout(dtype=dtype)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("layout", None, TypeError),
        ("salt", None, TypeError),
        ("salt", b"model", TypeError),
        ("extra", "image", TypeError),
        ("extra", None, TypeError),
        ("parent", "0" * 16, TypeError),
        ("parent", b"", ValueError),
        ("parent", bytes(17), ValueError),
    ],
)
def test_other_arguments_are_refused_by_name(argument: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{argument} must be .*, got "):
        keys_of(TOKENS, **{argument: value})


# what it costs


def test_a_fingerprint_is_computed_once() -> None:
    made = layout()
    assert made.fingerprint is made.fingerprint
    assert len(made.fingerprint) == 16


def test_a_long_context_is_keyed_in_a_few_steps_a_block() -> None:
    tokens = np.arange(131_072)
    made = layout(tokens_per_block=16)
    keys: list[bytes] = []
    taken = steps(lambda: keys.extend(keys_of(tokens, layout=made)))
    assert [len(each) for each in keys] == [KEY_BYTES] * 8192
    assert taken < 12 * 8192
