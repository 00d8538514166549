"""Messages of a shared pool: what goes through comes out the same, and what is cut off or changed is refused."""

from __future__ import annotations

import random

import pytest

from kvoffload.errors import LayoutError
from kvoffload.pool.messages import (
    DATAGRAM_BYTES,
    HEADER,
    MOST_MESSAGE,
    Assembler,
    MessageError,
    Operation,
    datagrams,
    pack_entries,
    pack_keys,
    unpack_entries,
    unpack_keys,
)


def some_keys(rng: random.Random, count: int, *, equal: bool) -> list[bytes]:
    width = rng.randint(0, 64)
    return [rng.randbytes(width if equal else rng.randint(0, 64)) for _ in range(count)]


def test_keys_come_out_as_they_went_in(seed: int) -> None:
    rng = random.Random(seed)
    for count in (0, 1, 2, 3, 31, 32, 500):
        for equal in (True, False):
            keys = some_keys(rng, count, equal=equal)
            before = rng.randbytes(rng.randint(0, 9))
            assert unpack_keys(before + pack_keys(keys), len(before)) == keys
    assert unpack_keys(pack_keys([b"", b"", b""])) == [b"", b"", b""]


def test_keys_that_are_cut_off_or_too_long_are_refused(seed: int) -> None:
    rng = random.Random(seed)
    for equal in (True, False):
        packed = pack_keys([*some_keys(rng, 5, equal=equal), b"x"])
        for length in range(len(packed)):
            with pytest.raises(MessageError):
                unpack_keys(packed[:length])
        with pytest.raises(MessageError):
            unpack_keys(packed + b"x")


def test_a_key_has_at_most_64_bytes() -> None:
    assert unpack_keys(pack_keys([b"x" * 64])) == [b"x" * 64]
    for length in (65, 255, 256, 100_000):
        with pytest.raises(LayoutError, match=rf"keys\[1\] has {length} bytes"):
            pack_keys([b"x", b"x" * length])
    with pytest.raises(MessageError):  # a member that packs them all the same
        unpack_keys((1).to_bytes(4, "little") + bytes([65]) + b"x" * 65)
    with pytest.raises(MessageError):
        unpack_keys((2).to_bytes(4, "little") + bytes([64, 65]) + b"x" * 129)


def test_entries_come_out_as_they_went_in_and_cut_off_ones_are_refused() -> None:
    entries = [0, 1, (1 << 32) - 1]
    packed = b"x" + pack_entries(entries)
    assert unpack_entries(packed, 1) == entries
    for length in range(1, len(packed)):
        if (length - 1) % 4:
            with pytest.raises(MessageError):
                unpack_entries(packed[:length], 1)


@pytest.mark.parametrize("length", [0, 1, DATAGRAM_BYTES - 16, DATAGRAM_BYTES - 15, 200_000, MOST_MESSAGE])
def test_a_large_message_takes_several_datagrams(length: int, seed: int) -> None:
    """Up to the largest that a member sends."""
    payload = random.Random(seed).randbytes(length)
    sent = list(datagrams(7, Operation.FIND, payload))
    assert len(sent) == max(1, -(-length // (DATAGRAM_BYTES - HEADER.size)))
    assert max(map(len, sent)) <= DATAGRAM_BYTES
    assembler = Assembler()
    assert [assembler.take(each) for each in sent[:-1]] == [None] * (len(sent) - 1)
    assert assembler.take(sent[-1]) == (7, Operation.FIND, payload)


def test_a_message_without_a_bound_is_refused() -> None:
    assembler, more = Assembler(), HEADER.pack(1, Operation.FIND, True) + bytes(DATAGRAM_BYTES - HEADER.size)
    for _ in range(MOST_MESSAGE // DATAGRAM_BYTES):
        assert assembler.take(more) is None
    with pytest.raises(MessageError, match="more than"):
        assembler.take(more)


def test_a_sender_that_is_interrupted_between_datagrams_loses_that_message_alone(seed: int) -> None:
    """The next message cuts it off, whichever part of it had been sent."""
    payloads = [random.Random(seed).randbytes(150_000) for _ in range(2)]
    first, second = (list(datagrams(number, 1, payload)) for number, payload in enumerate(payloads, 1))
    for sent in range(len(first)):
        assembler = Assembler()
        found = [assembler.take(each) for each in first[:sent] + second]
        assert [each for each in found if each is not None] == [(2, 1, payloads[1])]


def test_datagrams_that_are_cut_off_are_refused() -> None:
    for length in range(HEADER.size):
        with pytest.raises(MessageError, match="cut off"):
            Assembler().take(bytes(length))


def test_a_datagram_that_is_too_long_is_refused() -> None:
    whole = HEADER.pack(1, Operation.FIND, False) + bytes(DATAGRAM_BYTES - HEADER.size)
    assert Assembler().take(whole) is not None
    with pytest.raises(MessageError, match="more than"):
        Assembler().take(whole + b"x")
