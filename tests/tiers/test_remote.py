"""RemoteTier over a dictionary: names, headers, and every kind of record that is not what was put."""

from __future__ import annotations

import hashlib
import re
import struct
import sys
from collections.abc import Callable, Sequence

import pytest
import xxhash
from dict_remote import DictRemote, Store
from remote_sessions import RemoteSession
from seeds import rest_long

from kvoffload.errors import CapabilityError, LayoutError
from kvoffload.testing import check_tier
from kvoffload.testing.tier_pools import TierPools
from kvoffload.tiers import Limits, Outcome, Tier

DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED
SECRET = b"a secret of a test, 32 bytes of."
ONE_LAYOUT = hashlib.blake2b(b"one layout", digest_size=16).digest()


@pytest.mark.parametrize(("pools", "key"), rest_long([(2, SECRET), (1, None)], 1))
def test_it_conforms(pools: int, key: bytes | None, seed: int) -> None:
    store: Store = {}
    names = check_tier(lambda: DictRemote(store, key=key), pools=pools, seed=seed)
    assert "another layout gets no records" in names


def test_a_store_in_memory_conforms(seed: int) -> None:
    store: Store = {}
    check_tier(lambda: DictRemote(store, durable=False), seed=seed)


# names and headers ----------------------------------------------------------------------------------------------------


def test_names_and_headers_are_those_of_the_documented_format() -> None:
    store: Store = {}
    with RemoteSession(DictRemote(store, prefix="kv/prod")) as session:
        assert session.put(b"the key", 5) is DONE
        layout = session.memory.layout
        payload = b"".join(pool[0].tobytes() for pool in session.memory.arrays)
    digest = hashlib.blake2b(b"a model", digest_size=16, person=b"kvoffload ident").digest()
    about = struct.pack("<IB", 1, 1) + bytes(16) + digest + struct.pack("<IQQ", 2, 4096, 4096)
    space = hashlib.blake2b(about, digest_size=16, person=b"kvoffload space").digest()
    [(name, [header, *ranges])] = store.items()
    assert name == f"kv/prod/1/{layout.hex()}/{space.hex()}/{b'the key'.hex()}"
    assert b"".join(ranges) == payload
    body = struct.pack("<8sIIQIBBBx16s16s16s64s32x", b"\x89KVORMT\n", 1, 192, 8192, 2, 1, 0, 7, layout, space,
                       xxhash.xxh3_128_digest(payload), b"the key")  # fmt: skip
    assert header == xxhash.xxh3_128_digest(body) + body


def test_names_are_short_and_plain_for_the_longest_key_and_prefix() -> None:
    store: Store = {}
    with RemoteSession(DictRemote(store, prefix="x" * 100)) as session:
        assert session.put(b"\xff" * 64, 1) is DONE
    [name] = store
    assert len(name) <= 300
    assert re.fullmatch(r"[a-z0-9/]+", name)


def test_what_differs_in_anything_the_bytes_depend_on_is_not_found_and_not_cleared() -> None:
    store: Store = {}
    others: list[Callable[[], RemoteSession]] = [
        lambda: RemoteSession(DictRemote(store, identity="another model")),
        lambda: RemoteSession(DictRemote(store), layout=bytes(16)),
        lambda: RemoteSession(DictRemote(store), pools=1, layout=ONE_LAYOUT),
        lambda: RemoteSession(DictRemote(store, key=SECRET)),
        lambda: RemoteSession(DictRemote(store, key=SECRET[::-1])),
        lambda: RemoteSession(DictRemote(store, prefix="kvoffload2")),
    ]
    with RemoteSession(DictRemote(store), layout=ONE_LAYOUT) as first:
        assert first.put(b"k", 1) is DONE
        for number, make in enumerate(others, start=2):
            with make() as other:
                assert other.get(b"k") is MISSING, number
                assert other.put(b"k", number) is DONE
        assert len(store) == 1 + len(others)
        assert first.tier.clear().wait(30) == [DONE]
        assert first.get(b"k") is MISSING
        for number, make in enumerate(others, start=2):
            with make() as other:
                assert other.get(b"k") == number


# records that are not what was put ------------------------------------------------------------------------------------


def damages(record: list[bytes]) -> list[list[bytes]]:
    """A record with each byte of its header, and some of its ranges, changed; and cut, and longer."""
    found = []
    for at, part in enumerate(record):
        places = range(len(part)) if at == 0 else (0, 1, 2047, 4094, 4095)
        for place in places:
            changed = bytearray(part)
            changed[place] ^= 1 << place % 8
            found.append([*record[:at], bytes(changed), *record[at + 1 :]])
        found.append([*record[:at], part[:-1], *record[at + 1 :]])
        found.append([*record[:at], part + b"\0", *record[at + 1 :]])
        found.append([*record[:at], bytes(len(part)), *record[at + 1 :]])
    return [*found, record[:-1], [], [record[0], record[2], record[1]]]


@pytest.mark.parametrize("key", [None, SECRET])
def test_every_damaged_record_is_a_miss_that_is_deleted_and_can_be_put_again(key: bytes | None) -> None:
    store: Store = {}
    with RemoteSession(DictRemote(store, key=key)) as session:
        assert session.put(b"k", 1) is DONE
        [(name, record)] = store.items()
        all_damages = damages(record)
        for damaged in all_damages:
            store[name] = damaged
            assert session.get(b"k") is MISSING
            assert name not in store
        assert session.tier.statistics().corrupt == len(all_damages)
        assert session.put(b"k", 2) is DONE
        assert session.get(b"k") == 2


def test_parts_of_different_puts_and_records_of_other_keys_are_misses() -> None:
    store: Store = {}
    with RemoteSession(DictRemote(store)) as session:
        assert session.put(b"a", 1) is DONE
        assert session.put(b"b", 2) is DONE
        [(name_a, a), (name_b, b)] = store.items()
        assert session.tier.remove([b"a"]).wait(30) == [DONE]
        assert session.put(b"a", 3) is DONE
        later = store[name_a]
        for wrong in ([later[0], *a[1:]], [a[0], *later[1:]], [a[0], a[1], later[2]], b):
            store[name_a] = list(wrong)
            assert session.get(b"a") is MISSING
        store[name_a] = a  # what was put once is a record
        assert session.get(b"a") == 1
        assert session.get(b"b") == 2
        assert store[name_b] == b


def test_who_has_not_the_key_writes_no_records() -> None:
    store: Store = {}
    forged: Store = {}
    with RemoteSession(DictRemote(forged)) as forger:
        assert forger.put(b"k", 9) is DONE
    with RemoteSession(DictRemote(store, key=SECRET)) as session:
        assert session.put(b"k", 1) is DONE
        [name] = store
        store[name] = next(iter(forged.values()))
        assert session.get(b"k") is MISSING


def test_a_damaged_record_that_cannot_be_deleted_stays_a_miss() -> None:
    store: Store = {}
    tier = DictRemote(store)
    with RemoteSession(tier) as session:
        assert session.put(b"k", 1) is DONE
        [name] = store
        store[name][1] = bytes(4096)
        tier.delete_raises = True
        for _ in range(2):
            assert session.get(b"k") is MISSING
        assert session.tier.remove([b"k"]).wait(30) == [FAILED]


# calls ----------------------------------------------------------------------------------------------------------------


def test_what_the_store_has_is_not_sent_again() -> None:
    tier = DictRemote({})
    with RemoteSession(tier) as session:
        assert session.put(b"k", 1) is DONE
        assert session.put(b"k", 2) is DONE
        assert [name for name, _ in tier.calls] == ["have", "store", "have"]
        assert session.get(b"k") == 1
        assert tier.connected
    assert not tier.connected


def test_a_store_that_does_not_answer_is_asked_once_a_call() -> None:
    """Each question takes the client's timeout."""
    tier = DictRemote({}, limits=Limits(threads=2))

    def refuse(names: Sequence[str]) -> list[bool]:
        tier.calls.append(("have", len(names)))
        raise TimeoutError

    with RemoteSession(tier) as session:
        tier.have_names = refuse  # type: ignore[method-assign]
        assert session.tier.exists([b"%d" % number for number in range(8)]).wait(30) == [FAILED] * 8
        assert tier.calls == [("have", 4)] * 2


def test_arguments_that_are_refused() -> None:
    for prefix in ("", "/a", "a/", "a//b", "../a", "a/.b", "a b", "a*", "{a}", "é", "x" * 101, 7):
        with pytest.raises(ValueError, match="prefix must be"):
            DictRemote({}, prefix=prefix)
    with pytest.raises(TypeError, match="identity must be a string"):
        DictRemote({}, identity=7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="key must have"):
        DictRemote({}, key=b"short")
    tier: Tier = DictRemote({})
    with pytest.raises(LayoutError, match="layout must not be None"):
        tier.attach(TierPools(8, 4096, 1, 0).arrays, None)


def test_a_client_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload.tiers import ObjectStoreTier, ValkeyTier

    for module in ("glide_sync", "obstore", "obstore.store"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CapabilityError, match=r"pip install 'kvoffload\[valkey\]'"):
        ValkeyTier(identity="x")
    with pytest.raises(CapabilityError, match=r"pip install 'kvoffload\[objectstore\]'"):
        ObjectStoreTier("s3://bucket", identity="x")
