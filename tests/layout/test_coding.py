"""The format bf16-12 in numpy: lossless, of the size that it says, the same in every version."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from coded import OF_LAYOUT, Values, chunks, kinds, normal
from hypothesis import given
from hypothesis import strategies as st
from seeds import rest_long, seeds

from kvoffload import KVLayout, LayoutError, Plane, ShardedLayout
from kvoffload.layout.coding import Coding

CODINGS = [Coding(256), Coding(512), Coding(1024)]
ALL_VALUES = np.arange(1 << 16, dtype=np.uint16)
REAL_KV = os.environ.get("KVOFFLOAD_REAL_KV", "")  # a .npz with K and V, uint16, (layers, tokens, heads, dim)


def naive(values: Values, coding: Coding) -> bytes | None:
    """The record of one chunk, value by value; None if it does not fit."""
    exponents = [int(value) >> 7 & 255 for value in values]
    tops = sorted(set(exponents), reverse=True)
    for top in [*tops, 0][:16]:
        base, mantissas, codes, escapes = max(top - 14, 0), bytearray(), list[int](), bytearray()
        for value, exponent in zip(values.tolist(), exponents, strict=True):
            mantissas.append(value >> 8 & 128 | value & 127)
            if exponent == 0 or 1 <= exponent - base <= 14:
                codes.append(exponent and exponent - base)
            else:
                codes.append(15)
                escapes.append(exponent)
        if len(escapes) < coding.values // 32:
            halves = bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
            return bytes(mantissas) + halves + bytes([base]) + escapes.ljust(coding.values // 32 - 1, b"\0")
    return None


@pytest.mark.parametrize("coding", CODINGS)
def test_records_have_their_size(coding: Coding) -> None:
    assert coding.record_bytes == coding.values + coding.values // 2 + coding.values // 32
    assert coding.coded(6 * coding.values) == 3 * coding.record_bytes


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("seed", seeds(4))
def test_chunks_of_every_kind_come_back_or_do_not_fit(coding: Coding, seed: int) -> None:
    values, fit = chunks(seed, 60, coding)
    records, fits = coding.encode(values)
    assert (fits == fit).all()
    decoded, whole = coding.decode(records)
    assert (whole == fit).all()
    assert (decoded[fit] == values[fit]).all()
    for chunk, record, fitting in zip(values, records, fits, strict=True):
        assert naive(chunk, coding) == (record.tobytes() if fitting else None)


@pytest.mark.parametrize("coding", rest_long([(each,) for each in CODINGS], 1))
def test_all_values_in_every_lane(coding: Coding) -> None:
    """Each value among others of its exponent and of larger ones, at each place of a byte and of a chunk."""
    usual = normal(np.random.default_rng(0), coding.values)
    for first in range(0, 1 << 16, 4096):
        some = ALL_VALUES[first : first + 4096]
        values = np.tile(usual, (len(some), 1))
        lanes = (np.arange(len(some)) + first // 4096) % coding.values
        values[np.arange(len(some)), lanes] = some
        alike = np.repeat(some, coding.values).reshape(-1, coding.values)
        for given_values in (values, alike):
            records, fits = coding.encode(given_values)
            assert fits.all()
            assert (coding.decode(records)[0] == given_values).all()


@pytest.mark.parametrize("coding", rest_long([(coding,) for coding in CODINGS], 0))
def test_all_values_at_every_place(coding: Coding) -> None:
    """Among others of their exponent; and each exponent as the only one outside the window, or the top of it."""
    places, random = np.arange(coding.values), np.random.default_rng(1)
    usual = normal(random, coding.values)
    shifted = (places[:256, np.newaxis] + places) % 256  # each of 256 values at each place
    for exponent in range(256):
        alike = ((shifted & 128) << 8 | exponent << 7 | shifted & 127).astype(np.uint16)
        one = np.tile(usual, (coding.values, 1))
        one[places, places] = random.integers(0, 1 << 16, coding.values) & 0x807F | exponent << 7
        for values in (alike, one):
            records, fits = coding.encode(values)
            assert fits.all()
            assert (coding.decode(records)[0] == values).all()


@pytest.mark.long
def test_ten_thousand_chunks_of_every_kind() -> None:
    coding, random, count = CODINGS[0], np.random.default_rng(2), 10_000
    found = kinds(random, count * coding.values, coding.most_escapes)
    del found["unfit: one too many in each window"]  # of one chunk
    for name in [name for name in found if name.endswith("small ones")]:  # a number of them in each chunk
        values = found[name].reshape(count, -1) & np.uint16(0x807F) | np.uint16(0x3F80)
        escapes = coding.most_escapes + name.startswith("unfit")
        places = random.random(values.shape).argpartition(escapes, axis=1)[:, :escapes]
        np.put_along_axis(values, places, np.uint16(0x0080), axis=1)
        found[name] = values
    for name, values in found.items():
        chunks = values.reshape(count, coding.values)
        records, fits = coding.encode(chunks)
        assert (fits == (not name.startswith("unfit"))).all(), name
        decoded, whole = coding.decode(records)
        assert (whole == fits).all(), name
        assert (decoded[fits] == chunks[fits]).all(), name


@given(st.data())
def test_any_exponents(data: st.DataObject) -> None:
    coding = CODINGS[0]
    exponents = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=20))
    seed = data.draw(st.integers(0, 1 << 32))
    random = np.random.default_rng(seed)
    common = random.choice(exponents, coding.values)
    common[random.random(coding.values) < data.draw(st.sampled_from((0.02, 0.5, 1.0)))] = exponents[0]
    values = (common << 7 | random.integers(0, 128, coding.values) | random.choice([0, 1 << 15], coding.values)).astype(
        np.uint16
    )
    (record,), (fits,) = coding.encode(values)
    assert naive(values, coding) == (record.tobytes() if fits else None)
    assert not fits or (coding.decode(record)[0] == values).all()


@pytest.mark.parametrize("coding", CODINGS)
def test_any_bytes_can_be_decoded(coding: Coding) -> None:
    """Slots that were never stored: the values mean nothing, and nothing else is touched."""
    random = np.random.default_rng(1)
    values, _ = coding.decode(random.integers(0, 256, (200, coding.record_bytes)).astype(np.uint8))
    assert values.shape == (200, coding.values)


def test_the_format_is_the_same_in_every_version() -> None:
    """What disks and other hosts hold: a change of the format needs another name."""
    digest = blake2b(digest_size=16)
    for coding in CODINGS:
        ramp = (np.arange(64 * coding.values, dtype=np.uint32) * 40503 >> 3 & 0xFFFF).astype(np.uint16)
        close = ramp & np.uint16(0x83FF) | np.uint16(0x3C00)
        few = np.where(np.arange(len(ramp)) % 61 == 0, ramp, close).astype(np.uint16)
        for values in (ramp, close, few):
            digest.update(coding.encode(values)[0].tobytes())
    assert digest.hexdigest() == "30af8377f6e9671351f55a641f5a31d8"


@pytest.mark.skipif(not REAL_KV, reason="KVOFFLOAD_REAL_KV names no file")
@pytest.mark.parametrize("tokens", [16, 32, 64, 128, 256])
def test_real_kv_fits_in_1_28_times_as_many_slots(tokens: int) -> None:
    """Every block, with padding to whole pages."""
    with np.load(Path(REAL_KV)) as arrays:
        keys_and_values = [arrays["K"], arrays["V"]]
    layers, length, heads, dim = keys_and_values[0].shape
    nbytes = tokens * heads * dim * 2
    planes = [Plane((1 + index) << 32, block_bytes=nbytes, num_blocks=length // tokens) for index in range(2 * layers)]
    raw, coded = (KVLayout([planes], codec=codec, **OF_LAYOUT) for codec in ("raw", "bf16-12"))
    assert raw.slot_bytes / coded.slot_bytes >= 1.28
    coding = coded.groups[0].coding
    assert coding is not None
    for array in keys_and_values:
        records, fits = coding.encode(array)
        assert fits.all()
        assert (coding.decode(records)[0] == array.reshape(-1, coding.values)).all()


# layouts


def planes(*widths: int, address: int = 1 << 20, padding: int = 0) -> list[Plane]:
    return [
        Plane(address + (index << 20), block_bytes=width, num_blocks=4, block_stride=width + padding)
        for index, width in enumerate(widths)
    ]


@pytest.mark.parametrize(
    ("widths", "values"), [((2048,), 1024), ((4096, 6144), 1024), ((1024, 2048), 512), ((512,), 256), ((18432,), 1024)]
)
def test_chunks_are_as_long_as_all_planes_allow(widths: tuple[int, ...], values: int) -> None:
    (group,) = KVLayout([planes(*widths)], codec="bf16-12").groups
    assert group.coding == Coding(values)
    assert group.slot_block_bytes == group.payload_bytes == sum(widths) * 49 // 64
    assert group.bytes_per_block == sum(widths)


def test_a_third_more_slots_in_the_same_memory() -> None:
    for widths in ([32768] * 64, [8192] * 160, [18432] * 61, [4096] * 48):
        raw, coded = (KVLayout([planes(*widths)], codec=codec).slot_bytes for codec in ("raw", "bf16-12"))
        assert raw / coded > 1.28


def test_blocks_of_a_slot_are_whole_ranges() -> None:
    (group,) = KVLayout([planes(512, 1024)], blocks_per_slot=3, codec="bf16-12").groups
    assert group.slot_order == "block-major"
    assert group.host_steps.tolist() == [1176, 1176]
    assert group.host_offsets.tolist() == [0, 392]
    with pytest.raises(LayoutError, match='slot_order="plane-major" and codec='):
        KVLayout([planes(512)], blocks_per_slot=3, codec="bf16-12", slot_order="plane-major")


@pytest.mark.parametrize("codec", ["zstd", "", None, 12, ["raw"], ["raw", "raw", "bf16-12"], ["raw", None]])
def test_unknown_codecs_are_refused(codec: object) -> None:
    with pytest.raises(LayoutError, match="codec must be one of raw, bf16-12, or a list"):
        KVLayout([planes(512), planes(512, address=1 << 30)], codec=codec)  # type: ignore[arg-type]


def test_what_cannot_be_coded_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"multiple of 512 bytes in each plane, and groups\[0\] has a plane with 768"):
        KVLayout([planes(512, 768)], codec="bf16-12")
    with pytest.raises(LayoutError, match="codes bfloat16, or its bits as uint16, and dtype is float16"):
        KVLayout([planes(512)], codec="bf16-12", dtype="float16")
    for wrong in (planes(512, address=(1 << 20) + 2), planes(512, padding=2)):
        with pytest.raises(LayoutError, match=r"multiples of 4, and groups\[0\]\[0\] is Plane"):
            KVLayout([wrong], codec="bf16-12")
    KVLayout([planes(768), planes(512, address=1 << 30)], codec=["raw", "bf16-12"])
    KVLayout([planes(512)], codec="bf16-12", dtype="uint16")


def test_keys_depend_on_the_codec() -> None:
    groups = [planes(512), planes(512, address=1 << 30)]
    codecs = ["raw", "bf16-12", ["raw", "bf16-12"], ["bf16-12", "raw"]]
    layouts = [KVLayout(groups, codec=codec, **OF_LAYOUT) for codec in codecs]  # type: ignore[arg-type]
    assert len({layout.fingerprint for layout in layouts}) == 4
    assert layouts[0].fingerprint == KVLayout(groups, **OF_LAYOUT).fingerprint
    assert ShardedLayout([layouts[1]]).codecs == ("bf16-12", "bf16-12")
    other = KVLayout([planes(512, address=1 << 32), planes(512, address=1 << 33)], **OF_LAYOUT)
    with pytest.raises(LayoutError, match="codecs"):
        ShardedLayout([layouts[1], other])


def test_kinds_are_all_there() -> None:
    found = kinds(np.random.default_rng(0), 256, 7)
    assert sum(name.startswith("unfit") for name in found) == 4
    assert {len(values) for values in found.values()} == {256}
