"""Errors of `open_cache` speak to this call: the arguments that it takes, and a remedy that can be followed."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doors import AXES, KEY_BYTES, SHAPE, Host, host, tokens

import kvoffload
from kvoffload import CapacityError, ClosedError, LayoutError, ShardedEngine
from kvoffload.door import CacheOptions
from kvoffload.testing import leak_check
from kvoffload.tiers import DiskTier

SIZE = 1 << 20
TAKEN = {*inspect.signature(kvoffload.open_cache).parameters, *CacheOptions.__annotations__}
OF_ENGINES = {"num_slots", "nbytes", "host_memory", "staging_bytes", "index", "paths", "capacity"}


def check_words(text: str) -> None:
    """Whatever an error tells to give is an argument of `open_cache`, or of a tier that it names."""
    without_tiers = re.sub(r"DiskTier\([^)]*\)", "", text)
    given = set(re.findall(r"\b([a-z_]+)=", without_tiers)) - {"slot_bytes", "blocks_per_slot", "block_bytes"}
    assert given - {"name"} <= TAKEN, text
    named = set(re.findall(r"\b\w+\b", without_tiers)) & OF_ENGINES
    assert not named or "pool_bytes" in text, text


@pytest.fixture
def there() -> Iterator[Host]:
    with host() as made:
        yield made


def given(there: Host, folder: Path, **more: Any) -> dict[str, Any]:
    disk = {"disk": folder / "kv", "disk_bytes": SIZE, "identity": "model@1"}
    return {"arrays": there.arrays, "axes": AXES, "pool_bytes": 8 * KEY_BYTES} | disk | more


# a disk that differs --------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[str, Callable[[Host, Path], dict[str, Any]]]] = {
    "size": (r"in bytes, was 1048576, and this call wants 524288", lambda *_: {"disk_bytes": SIZE // 2}),
    "identity": ("identity 'model@1', and this call wants 'model@2'", lambda *_: {"identity": "model@2"}),
    "dtype": (
        "the digest of the layout",
        lambda there, _: {"arrays": [there.device.empty(SHAPE, "float8_e5m2") for _ in range(2)]},
    ),
    "layers": ("the digest of the layout", lambda there, _: {"arrays": there.each[:1]}),
    "files": (
        "files in its set was 1, and this call wants 2",
        lambda _, folder: {"disk": [folder / "kv", folder / "b"]},
    ),
}


@pytest.mark.parametrize("remedy", ["delete the files", "reset"])
@pytest.mark.parametrize("other", OTHERS)
def test_another_disk_can_be_begun_anew(there: Host, tmp_path: Path, other: str, remedy: str) -> None:
    kvoffload.open_cache(**given(there, tmp_path)).close()
    said, make = OTHERS[other]
    changed = given(there, tmp_path, **make(there, tmp_path))
    with leak_check(there.device), pytest.raises(LayoutError, match=said) as caught:
        kvoffload.open_cache(**changed)
    text = str(caught.value)
    check_words(text)
    told = re.search(
        r": give the same as then, or another path, or begin anew: delete (.*), or give tiers=\[(\w+)", text
    )
    assert told is not None
    if remedy == "delete the files":
        for path in told[1].split(", "):
            Path(path).unlink(missing_ok=True)
    else:
        names = {"disk": "path", "disk_bytes": "nbytes", "identity": "identity"}
        options = {of_tier: changed.pop(name) for name, of_tier in names.items()}
        assert told[2] == "DiskTier"
        changed["tiers"] = [DiskTier(options.pop("path"), **options, reset=True)]
    with kvoffload.open_cache(**changed) as cache:
        assert cache.tier_statistics()[0].tier.records == 0


def test_the_size_that_is_told_opens_the_files(there: Host, tmp_path: Path) -> None:
    """Whatever number of bytes was given: what lies between two numbers of records is not kept."""
    for number, size in enumerate((SIZE - 1, SIZE + 12_345, 3 * SIZE + 4097)):
        disk = [tmp_path / f"{number}{name}" for name in "abc"]
        kvoffload.open_cache(**given(there, tmp_path, disk=disk, disk_bytes=size)).close()
        with pytest.raises(LayoutError, match="in bytes, was") as caught:
            kvoffload.open_cache(**given(there, tmp_path, disk=disk, disk_bytes=2 * size))
        told = re.search(r"was (\d+), and", str(caught.value))
        assert told is not None
        kvoffload.open_cache(**given(there, tmp_path, disk=disk, disk_bytes=int(told[1]))).close()


# the path of a disk ---------------------------------------------------------------------------------------------------


def test_a_folder_takes_a_file_of_ours(there: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("home", "home/more", "other"):
        (tmp_path / folder).mkdir()
    disks = {
        tmp_path / "other": "other/kvoffload",
        f"{tmp_path / 'home'}/": "home/kvoffload",
        "~/more": "home/more/kvoffload",
        Path("~/file"): "home/file",
    }
    for disk, file in disks.items():
        with kvoffload.open_cache(**given(there, tmp_path, disk=disk)):
            assert (tmp_path / file).is_file()
    (tmp_path / "other" / "kvoffload").unlink()
    with kvoffload.open_cache(**given(there, tmp_path, disk=[tmp_path / "other", "~/new"])):
        assert (tmp_path / "other" / "kvoffload").is_file()
        assert (tmp_path / "home" / "new").is_file()


def test_a_missing_folder_is_told_to_be_made(there: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for disk, folder in ((tmp_path / "a" / "b" / "kv", "a/b"), ("~/c/kv", "c"), (f"{tmp_path}/d/", "d")):
        with leak_check(there.device), pytest.raises(FileNotFoundError, match=f"mkdir -p {tmp_path / folder}"):
            kvoffload.open_cache(**given(there, tmp_path, disk=disk))


# everything else ------------------------------------------------------------------------------------------------------


def link(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "elsewhere")
    return folder / "link"


def foreign(folder: Path) -> Path:
    (folder / "foreign").write_bytes(b"a letter" * 4096)
    (folder / "foreign").chmod(0o600)
    return folder / "foreign"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe", 0o600)
    return folder / "pipe"


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Host, Path], dict[str, Any]]]] = {
    "a file twice": (LayoutError, r"each file .* must be another", lambda _, f: {"disk": [f / "a", f / "a"]}),
    "a link": (
        PermissionError,
        "is a symbolic link; give the path it leads to, .*/elsewhere",
        lambda _, f: {"disk": link(f)},
    ),
    "no file of a tier": (LayoutError, r"another path, or delete it", lambda _, f: {"disk": foreign(f)}),
    "a pipe": (LayoutError, r"is no regular file: give another path", lambda _, f: {"disk": pipe(f)}),
    "no name": (ValueError, r"disk of open_cache\) must name a file or a folder, got ''", lambda *_: {"disk": ""}),
    "a NUL": (ValueError, r"disk of open_cache\) must name a file or a folder, got", lambda *_: {"disk": "a\0b"}),
    "too small a disk": (CapacityError, r"in each file: give it 16384 or more", lambda *_: {"disk_bytes": 100}),
    "a disk of too little space": (CapacityError, r"make the disk smaller", lambda *_: {"disk_bytes": 1 << 59}),
    "a disk larger than any": (
        CapacityError,
        r"larger than any: give it less",
        lambda *_: {"disk_bytes": "2000000TiB"},
    ),
    "no unit": (
        ValueError,
        "^disk_bytes must be .* text such as \"64GiB\", got '64G'",
        lambda *_: {"disk_bytes": "64G"},
    ),
    "a pool of no unit": (ValueError, r"^pool_bytes must be .*\"64GiB\", got '64G'", lambda *_: {"pool_bytes": "64G"}),
    "no slots above a disk": (CapacityError, r"raise pool_bytes", lambda *_: {"pool_bytes": 0}),
    "two tiers of a name": (
        ValueError,
        r"tiers \(and disk\) need names of their own.*\['disk', 'disk'\]; give name=",
        lambda _, f: {"tiers": [DiskTier(f / "b", nbytes=SIZE, identity="x")]},
    ),
    "a device by name": (
        TypeError,
        "^device must be a list of devices from open_device",
        lambda *_: {"device": "cuda:0"},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_what_this_call_takes(there: Host, tmp_path: Path, case: str) -> None:
    kind, said, make = REFUSED[case]
    changed = given(there, tmp_path, **make(there, tmp_path))
    with leak_check(there.device), pytest.raises(kind, match=said) as caught:
        kvoffload.open_cache(**changed)
    check_words(str(caught.value))


def test_what_needs_tokens_says_to_name_them_in_axes(there: Host, tmp_path: Path) -> None:
    without = ("planes", "blocks", "row", "head")
    for more in ({}, {"disk": None, "disk_bytes": 0, "identity": None, "prefill_tokens_per_second": 1.0}):
        with leak_check(there.device), pytest.raises(LayoutError, match='"tokens" in axes'):
            kvoffload.open_cache(**given(there, tmp_path, axes=without, **more))
    cache = kvoffload.open_cache(there.arrays, axes=without, pool_bytes=1 << 16)
    with cache, pytest.raises(LayoutError, match='name "tokens" in axes'):
        cache.keys(tokens(1), salt="")


def test_a_disk_that_is_open_elsewhere(there: Host, tmp_path: Path) -> None:
    with kvoffload.open_cache(**given(there, tmp_path)):
        with pytest.raises(
            BlockingIOError, match="close that first, give another path, or only read it: tiers="
        ) as caught:
            kvoffload.open_cache(**given(there, tmp_path))
        check_words(str(caught.value))
        reads = DiskTier(tmp_path / "kv", identity="model@1", read_only=True)  # as it says
        more = {"disk": None, "disk_bytes": 0, "identity": None, "tiers": [reads]}
        kvoffload.open_cache(**given(there, tmp_path, **more)).close()


@pytest.mark.parametrize("shift", [44, 48, 50])
def test_a_pool_larger_than_the_host_says_what_the_host_has(there: Host, shift: int) -> None:
    for size in (1 << shift, f"{1 << (shift - 40)}TiB", kvoffload.Growing(1 << shift)):
        with leak_check(there.device), pytest.raises(CapacityError, match=r"available now .* GiB of .* GiB") as caught:
            kvoffload.open_cache(there.arrays, axes=AXES, pool_bytes=size)
        check_words(str(caught.value))


def test_sizes_are_taken_as_the_command_takes_them(there: Host, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"pool_bytes": "0.5MiB", "disk_bytes": "2 MB"}
    with kvoffload.open_cache(**given(there, tmp_path, **sizes)) as cache:
        assert cache.engine.statistics().pinned_bytes == 1 << 19
        assert 1_900_000 < (tmp_path / "kv").stat().st_size <= 2_000_000
    with ShardedEngine([cache.engine.layout], devices=[there.device], pool_bytes="32KiB") as engine:
        assert engine.num_slots == 8


def test_blocks_are_counted_in_words() -> None:
    with host() as there, kvoffload.open_cache(there.arrays, axes=AXES, pool_bytes=8 * KEY_BYTES) as cache:
        keys = cache.keys(tokens(1), salt="")
        for call in (cache.keep, cache.fetch):
            with pytest.raises(LayoutError, match=r"^blocks must hold one id for each key, here 4, got 3"):
                call(keys, [1, 2, 3])
        more: dict[str, Any] = {"axes": AXES, "pool_bytes": 16 * KEY_BYTES, "blocks_per_slot": 2}
        with kvoffload.open_cache(there.arrays, **more) as pairs:
            keys = pairs.keys(tokens(1), salt="")
            with pytest.raises(LayoutError, match=r"^blocks must hold 2 ids for each key, here 4, got 3"):
                pairs.keep(keys, [1, 2, 3])


def test_a_closed_cache_says_how_to_have_another_one(there: Host) -> None:
    cache = kvoffload.open_cache(there.arrays, axes=AXES, pool_bytes=8 * KEY_BYTES)
    keys, blocks = cache.keys(tokens(1), salt=""), [0, 1, 2, 3]
    cache.close()
    calls: list[Callable[[], object]] = [
        lambda: cache.keep(keys, blocks),
        lambda: cache.fetch(keys, blocks),
        lambda: cache.lookup(keys),
    ]
    calls += [lambda: cache.store(keys, blocks), lambda: cache.reserve(keys), lambda: cache.promote(keys)]
    for call in calls:
        with pytest.raises(ClosedError, match=r"call open_cache again|open_cache makes another"):
            call()


def test_a_number_of_no_device_is_told() -> None:
    with pytest.raises(ValueError, match=r"the device's index must name one of the 2 devices, 0 to 1, got 7"):
        kvoffload.open_device(7, backend=kvoffload.testing.SimulatedDriver(device_count=2))
