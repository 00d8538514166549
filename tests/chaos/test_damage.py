"""Damage at rest: what is damaged is a miss, everything else is there, and no byte is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos_damage
import pytest
from chaos_damage import DATA, FILES, HEADER, KEYS, TABLE, Damaged, Lab, full
from chaos_history import RECORD_BYTES, SECONDS, content, fetch, make_tier

from kvoffload.errors import LayoutError
from kvoffload.tiers import Outcome
from kvoffload.tiers.format import make_checksum

pytestmark = pytest.mark.long


@pytest.fixture
def lab() -> Iterator[Lab]:
    opened = Lab()
    yield opened
    opened.close()


def test_a_byte_flipped_anywhere_a_file_cut_off_slots_swapped_and_older_sectors(seed: int) -> None:
    counts, wrong = chaos_damage.run(1009, seed, every=3)
    assert wrong == []
    assert counts["flipped"] > 900
    assert counts["truncated"] > 10
    assert counts["swapped"] > 5
    assert counts["older"] > 100


def test_the_check_finds_a_record_that_should_not_be_there(lab: Lab) -> None:
    _, state, versions = full(lab)
    gone = {key: version for key, version in versions.items() if key != KEYS[0]}
    assert lab.check(Damaged("nothing", state, versions, versions)) is None
    assert lab.check(Damaged("nothing", state, gone, gone)) is not None
    assert lab.check(Damaged("nothing", state, versions | {b"other": 1}, versions | {b"other": 1})) is not None


def test_one_copy_of_the_superblock_may_be_older(lab: Lab) -> None:
    """Cleared records stay away if one of the two copies is brought back, with all headers and payloads."""
    folder, before, _ = full(lab)
    with lab.tier(folder) as tier:
        assert tier.clear().wait(SECONDS) == [Outcome.DONE]
    after = lab.read(folder)
    for first, second in ((before, after), (after, before)):
        state = {name: first[name][:4096] + second[name][4096:TABLE] + before[name][TABLE:] for name in FILES}
        assert lab.found(state) == {}


def test_not_promised_both_copies_of_the_superblock_are_older(lab: Lab) -> None:
    """Then the file is what it was before the clear: records come back, with the bytes that were put."""
    folder, before, versions = full(lab)
    with lab.tier(folder) as tier:
        assert tier.clear().wait(SECONDS) == [Outcome.DONE]
    after = lab.read(folder)
    assert lab.found({name: before[name][:TABLE] + after[name][TABLE:] for name in FILES}) == versions
    one = lab.found({FILES[0]: before[FILES[0]], FILES[1]: after[FILES[1]]})
    assert 0 < len(one) < len(versions)
    assert one.items() <= versions.items()


def test_not_promised_a_header_is_older_and_its_payload_still_there(lab: Lab) -> None:
    folder, before, versions = full(lab)
    with lab.tier(folder) as tier:
        assert tier.remove(KEYS).wait(SECONDS) == [Outcome.DONE] * len(KEYS)
    after = lab.read(folder)
    assert lab.found(after) == {}
    assert lab.found({name: after[name][:TABLE] + before[name][TABLE:DATA] + after[name][DATA:] for name in FILES}) == (
        versions
    )


def test_a_removed_record_whose_slot_was_used_again_does_not_come_back_with_its_header(lab: Lab) -> None:
    folder, before, _ = full(lab)
    with lab.tier(folder) as tier:
        tier.remove(KEYS).wait(SECONDS)
    lab.put(folder, {key: 500 + number for number, key in enumerate(chaos_damage.LATER)})
    after = lab.read(folder)
    assert lab.found({name: before[name][:DATA] + after[name][DATA:] for name in FILES}) == {}


@pytest.mark.parametrize("part", ["headers", "headers and payloads"])
def test_slots_of_another_set_of_the_same_layout_are_misses(lab: Lab, part: str) -> None:
    _, state, _ = full(lab)
    _, other, _ = full(lab)
    end = TABLE + chaos_damage.SLOTS * HEADER if part == "headers" else DATA + chaos_damage.SLOTS * RECORD_BYTES
    assert lab.found({name: state[name][:TABLE] + other[name][TABLE:end] + state[name][end:] for name in FILES}) == {}


def test_a_file_of_another_set_is_refused_and_stays_as_it_is(lab: Lab) -> None:
    folder, state, versions = full(lab)
    _, other, _ = full(lab)
    (folder / FILES[1]).write_bytes(other[FILES[1]])
    for read_only in (False, True):
        with pytest.raises(LayoutError, match="another set"):
            make_tier(folder, lab.memory, slots=chaos_damage.SLOTS, read_only=read_only)
    assert lab.read(folder) == {FILES[0]: state[FILES[0]], FILES[1]: other[FILES[1]]}
    with lab.tier(folder, reset=True) as tier:
        assert fetch(tier, lab.memory, KEYS) == {}
    assert lab.found(state) == versions


@pytest.mark.parametrize("options", [{"identity": "model@2"}, {"slots": 3}, {"key": b"k" * 16}])
def test_files_of_another_identity_size_or_key_are_refused(lab: Lab, options: dict[str, Any]) -> None:
    folder, state, _ = full(lab)
    with pytest.raises(LayoutError, match="reset=True"):
        make_tier(folder, lab.memory, **({"slots": chaos_damage.SLOTS} | options))
    assert lab.read(folder) == state


def test_with_a_key_a_flipped_byte_is_a_miss_too(lab: Lab) -> None:
    folder: Path = lab.folder()
    versions = {key: 100 + number for number, key in enumerate(KEYS)}
    lab.put(folder, versions, key=b"k" * 16)
    state = lab.read(folder)
    for offset in (TABLE + 3, TABLE + 100, TABLE + 191, DATA, DATA + RECORD_BYTES - 1):
        data = bytearray(state[FILES[0]])
        data[offset] ^= 4
        (folder / FILES[0]).write_bytes(bytes(data))
        with lab.tier(folder, key=b"k" * 16) as tier:
            found = fetch(tier, lab.memory, KEYS)
        assert len(found) == len(KEYS) - 1
        assert found.items() <= versions.items()
        (folder / FILES[0]).write_bytes(state[FILES[0]])


@pytest.mark.parametrize("key", [None, b"k" * 16])
def test_a_record_that_another_program_has_written_is_valid_unless_there_is_a_key(lab: Lab, key: bytes | None) -> None:
    """Who can write the file knows the format, and not the key: digest and checksum are made by another one."""
    folder = lab.folder()
    lab.put(folder, {KEYS[0]: 100}, key=key)
    state, forged = lab.read(folder), None
    forging = make_checksum(None if key is None else b"another key, 16+")
    for name, before in state.items():
        data = bytearray(before)
        for slot in range(chaos_damage.SLOTS):
            at, payload_at = TABLE + slot * HEADER, DATA + slot * RECORD_BYTES
            if any(data[at : at + HEADER]):
                forged = name
                payload = b"".join(row.tobytes() for row in content(999))
                data[payload_at : payload_at + RECORD_BYTES] = payload
                body = data[at + 16 : at + HEADER]
                body[16:32] = forging.of([memoryview(payload)])  # after the member digest
                data[at : at + HEADER] = forging.of_bytes(bytes(body)) + body
        (folder / name).write_bytes(bytes(data))
    assert forged is not None
    tier = make_tier(folder, lab.memory, slots=chaos_damage.SLOTS, key=key)
    assert fetch(tier, lab.memory, KEYS) == ({KEYS[0]: 999} if key is None else {})
    assert tier.close(SECONDS)


def test_the_documents_say_that_the_default_checksum_is_no_signature() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for page in ("security.md", "disk-format.md", "guides/add-a-disk.md"):
        assert "no signature" in " ".join((docs / page).read_text().split()), page
