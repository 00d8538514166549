"""A folder of session files as a tier: its bytes in every layout, what is left out, comes and goes, or is refused."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from session_folders import GIVEN, LAYOUTS, TOKENS, blocks_of, flip, layout_of, write
from tiering import aligned, until

import kvoffload
from kvoffload import NO_WAIT, KVLayout, LayoutError, ShardedLayout, chain_keys
from kvoffload.cache.weights import tag_of
from kvoffload.session import SessionFolder, session_folder
from kvoffload.session.session_file import SessionFile
from kvoffload.session.whole_blocks import WholeBlocks
from kvoffload.tiers import Outcome

SECONDS = 30.0
ENTRIES = 12
RAW = cast(KVLayout, LAYOUTS["raw"])
PROMPT = list(range(100, 100 + 12 * TOKENS))
DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests look themselves."""
    monkeypatch.setattr(session_folder, "LOOK_SECONDS", 3600.0)


@contextmanager
def attached(
    folder: Path, layout: KVLayout | ShardedLayout = RAW, tier: SessionFolder | None = None
) -> Iterator[tuple[SessionFolder, WholeBlocks]]:
    """A tier over the folder, and the slots below it."""
    tier = tier or SessionFolder(folder, layout=layout, **GIVEN)
    each = layout.layouts if isinstance(layout, ShardedLayout) else [layout]
    slots = [aligned(ENTRIES * layout.num_groups, one.slot_bytes) for one in each]
    try:
        tier.attach([one.reshape(ENTRIES, -1) for one in slots], layout.fingerprint)
        yield tier, WholeBlocks(layout, slots)
    finally:
        assert tier.close(SECONDS)


def no_more_files(*_: Any) -> None:
    raise OSError(errno.EMFILE, "too many open files")


def keys_of(tokens: Sequence[int], layout: Any = RAW) -> list[bytes]:
    return chain_keys(tokens, layout=layout, salt="s")


def got(tier: SessionFolder, keys: Sequence[bytes]) -> list[Outcome]:
    return tier.get(keys, range(len(keys))).wait(SECONDS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_of_a_file_comes_into_slots_of_every_layout(tmp_path: Path, name: str, seed: int) -> None:
    layout = LAYOUTS[name]
    write(tmp_path / "a.kv", PROMPT, layout)
    keys, factor = keys_of(PROMPT, layout), layout.blocks_per_slot
    order = np.random.default_rng(seed).permutation(len(keys))
    entries = np.random.default_rng(seed).permutation(ENTRIES)[: len(keys)]
    with attached(tmp_path, layout) as (tier, slots):
        assert tier.contains([*keys, b"other"]) == [True] * len(keys) + [False]
        assert tier.get([keys[at] for at in order], entries.tolist()).wait(SECONDS) == [DONE] * len(keys)
        for group, blocks in enumerate(blocks_of(PROMPT, layout.num_groups)):
            wanted = blocks.reshape(len(keys), factor, *blocks.shape[1:])[order]
            found = slots.gather(group, entries * layout.num_groups + group)
            assert np.array_equal(found, wanted.reshape(found.shape))
        figures = tier.statistics()
        assert (figures.read, figures.records, figures.failed) == (len(keys), len(keys), 0)


def test_a_cache_above_it_has_hits_of_the_weights_that_files_were_saved_with(tmp_path: Path) -> None:
    axes, shape = ("planes", "blocks", "tokens", "heads", "dim"), (2, 8, 4, 2, 8)
    with kvoffload.open_device(backend="simulated") as device:
        array = device.empty(shape, "uint16")
        values = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
        array.buffer.copy_from(values)
        with kvoffload.open_cache(array, axes=axes, device=device, pool_bytes=16 * 4096) as cache:
            cache.use_weights("step 1")
            keys, layout = cache.keys(range(16), salt="s"), cache.engine.layout
            cache.keep(keys, [0, 1, 2, 3], after=NO_WAIT).wait(SECONDS)
            assert cache.save(tmp_path / "a.kv", range(16), **GIVEN) == 16
        tier = SessionFolder(tmp_path, layout=layout, **GIVEN)
        with kvoffload.open_cache(array, axes=axes, device=device, pool_bytes=16 * 4096, tiers=[tier]) as cache:
            assert cache.locate(keys) == ["missing"] * 4
            cache.use_weights("step 1")
            assert cache.locate(keys) == ["sessions"] * 4
            assert cache.fetch(keys, [7, 6, 5, 4], after=NO_WAIT).wait(SECONDS) == 4
            found = array.buffer.to_numpy().view(np.uint16).reshape(shape)
            assert np.array_equal(found[:, [7, 6, 5, 4]], values[:, :4])


def test_what_does_not_fit_is_left_out_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = LAYOUTS["two groups, heads first"]
    write(tmp_path / "good.kv", PROMPT)
    write(tmp_path / ".hidden", PROMPT, salt="t")
    (tmp_path / "folder").mkdir()
    wrong = {
        "form.kv": write(tmp_path / "form.kv", PROMPT, other),
        "identity.kv": write(tmp_path / "identity.kv", PROMPT, identity={"model": "m", "revision": "2"}),
        "salt.kv": write(tmp_path / "salt.kv", PROMPT, salt="t"),
        "header.kv": write(tmp_path / "header.kv", PROMPT),
        "notes.txt": tmp_path / "notes.txt",
    }
    flip(wrong["header.kv"], 300)
    wrong["notes.txt"].write_text("system prompts")
    with caplog.at_level(logging.WARNING, "kvoffload"), attached(tmp_path) as (tier, _):
        assert all(tier.contains(keys_of(PROMPT)))
        tier._look()
        said = [record.message for record in caplog.records]
        assert [sum(str(path) in each for each in said) for path in wrong.values()] == [1] * len(wrong)
        assert len(said) == len(wrong)
        assert all(each.startswith("tier sessions leaves a file out: ") for each in said)


def test_files_that_come_change_and_go_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_folder, "LOOK_SECONDS", 1e-3)
    more = [*PROMPT[: 4 * TOKENS], *range(500, 500 + TOKENS)]
    with attached(tmp_path) as (tier, _):
        assert tier.num_records() == 0
        a, b = write(tmp_path / "a.kv", PROMPT), write(tmp_path / "b.kv", more)
        until(lambda: all(tier.contains([*keys_of(PROMPT), *keys_of(more)])))
        a.unlink()
        until(lambda: not any(tier.contains(keys_of(PROMPT)[4:])))
        assert got(tier, keys_of(more)) == [DONE] * 5, "b has the common ones"
        content = write(tmp_path / ".new", PROMPT).read_bytes()
        b.write_bytes(content[: len(content) // 2])  # as while it is copied
        until(lambda: 4 < sum(tier.contains(keys_of(PROMPT))) < 12)
        assert not tier.contains(keys_of(more))[4]
        b.write_bytes(content)
        until(lambda: all(tier.contains(keys_of(PROMPT))))


def test_a_file_that_has_not_changed_is_not_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.kv", PROMPT)
    with attached(tmp_path) as (tier, _):
        with monkeypatch.context() as patch:
            patch.delattr(session_folder, "SessionFile")
            tier._look()
            assert all(tier.contains(keys_of(PROMPT)))
        os.utime(path, (1, 1))
        with monkeypatch.context() as patch:
            patch.setattr(session_folder, "SessionFile", no_more_files)
            tier._look()
            assert not any(tier.contains(keys_of(PROMPT)))
        tier._look()
        assert all(tier.contains(keys_of(PROMPT))), "what was wrong with the system is over"


def test_a_whole_file_is_read_where_a_damaged_one_has_the_same_keys(tmp_path: Path) -> None:
    with SessionFile(write(tmp_path / "a.kv", PROMPT)) as file:
        place = file.plan.place(0, 0)
    flip(tmp_path / "a.kv", place)
    write(tmp_path / "b.kv", PROMPT)
    with attached(tmp_path) as (tier, _):
        found = [got(tier, keys_of(PROMPT)) for _ in range(3)]
        assert found[-1] == [DONE] * 12, found


def test_a_file_that_was_replaced_since_the_last_look_is_a_miss(tmp_path: Path) -> None:
    path, keys = write(tmp_path / "a.kv", PROMPT), keys_of(PROMPT)
    other = [*PROMPT[: 4 * TOKENS], *range(500, 500 + 4 * TOKENS)]
    with attached(tmp_path) as (tier, slots):
        write(path, other)
        assert got(tier, keys) == [DONE] * 4 + [MISSING] * 8
        assert np.array_equal(slots.gather(0, np.arange(4)), blocks_of(other)[0][:4])
        write(path, PROMPT, salt="t")
        assert got(tier, keys) == [MISSING] * 12
        path.unlink()
        assert got(tier, keys) == [MISSING] * 12
        path.mkdir()
        assert got(tier, keys) == [MISSING] * 12
        assert all(tier.contains(keys)), "as at the last look"
        tier._look()
        assert not any(tier.contains(keys))
        assert tier.statistics().corrupt == 0


def test_no_byte_is_wrong_while_files_are_replaced_and_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(session_folder, "LOOK_SECONDS", 1e-4)
    random, other = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    prompts = [[*PROMPT[: number * TOKENS], *range(900 + number, 900 + number + 8 * TOKENS)] for number in range(4)]
    contents = [write(tmp_path / f".{number}", prompt).read_bytes() for number, prompt in enumerate(prompts)]
    wanted = {
        key: block for prompt in prompts for key, block in zip(keys_of(prompt), blocks_of(prompt)[0], strict=True)
    }
    seen, ended = Counter[Outcome](), threading.Event()

    def write_over() -> None:
        while not ended.is_set():
            name, content = tmp_path / f"{other.integers(3)}.kv", contents[other.integers(4)]
            part = tmp_path / ".part"
            (part if other.integers(2) else name).write_bytes(content)
            if part.exists():
                part.replace(name)

    with attached(tmp_path) as (tier, slots), ThreadPoolExecutor(1) as threads:
        future = threads.submit(write_over)
        try:
            end = time.monotonic() + SECONDS
            while seen[DONE] < 300 or seen[MISSING] < 300:
                assert time.monotonic() < end
                keys = keys_of(prompts[random.integers(4)])
                outcomes = got(tier, keys)
                seen.update(outcomes)
                for row in np.flatnonzero([each is DONE for each in outcomes]):
                    assert np.array_equal(slots.gather(0, np.array([row]))[0], wanted[keys[row]])
        finally:
            ended.set()
        future.result(SECONDS)
    assert set(seen) == {DONE, MISSING}


def test_a_damaged_block_is_a_miss_and_those_before_it_are_not(tmp_path: Path) -> None:
    path, keys = write(tmp_path / "a.kv", PROMPT), keys_of(PROMPT)
    with SessionFile(path) as file:
        at = file.plan.place(5, 0) + 1000
    flip(path, at)
    with attached(tmp_path) as (tier, slots):
        tier.threads = 1  # one call for all
        assert got(tier, keys) == [DONE] * 5 + [MISSING] * 7
        assert np.array_equal(slots.gather(0, np.arange(5)), blocks_of(PROMPT)[0][:5])
        assert tier.statistics().corrupt == 1
        assert tier.contains(keys) == [True] * 5 + [False] + [True] * 6
        assert got(tier, keys[6:]) == [DONE] * 6
        assert tier.statistics().corrupt == 1


def test_a_block_that_the_codec_cannot_hold_is_a_miss(tmp_path: Path) -> None:
    layout = LAYOUTS["coded"]
    blocks = blocks_of(PROMPT)
    blocks[0][3] = np.random.default_rng(1).integers(0, 1 << 16, blocks[0][3].shape, dtype=np.uint16)
    write(tmp_path / "a.kv", PROMPT, layout, blocks=blocks)
    keys = keys_of(PROMPT, layout)
    with attached(tmp_path, layout) as (tier, _):
        expected = [DONE] * 3 + [MISSING] + [DONE] * 8
        assert got(tier, keys) == expected
        assert tier.contains(keys) == [each is DONE for each in expected]
        assert tier.statistics().corrupt == 0


def test_it_takes_no_puts_and_removes_nothing(tmp_path: Path) -> None:
    path, keys = write(tmp_path / "a.kv", PROMPT), keys_of(PROMPT)
    content = path.read_bytes()
    with attached(tmp_path) as (tier, _):
        assert set(tier.put([b"new", keys[0]], [0, 1]).wait(SECONDS)) == {Outcome.DECLINED}
        assert tier.remove([b"new"]).wait(SECONDS) == [MISSING]
        assert tier.remove([b"new", keys[11]]).wait(SECONDS) == [FAILED, FAILED]
        assert tier.clear().wait(SECONDS) == [FAILED]
        assert all(tier.contains(keys))
        path.unlink()
        tier._look()
        assert tier.clear().wait(SECONDS) == [DONE]
        assert tier.drain(SECONDS)
        path.write_bytes(content)


def test_no_file_stays_open(tmp_path: Path) -> None:
    prompts = [[number, *PROMPT] for number in range(20)]
    for number, prompt in enumerate(prompts):
        write(tmp_path / f"{number}.kv", prompt)
    before = len(os.listdir("/proc/self/fd"))
    with attached(tmp_path) as (tier, _):
        assert tier.num_records() == 20 * 12
        assert got(tier, [keys_of(prompt)[0] for prompt in prompts[:ENTRIES]]) == [DONE] * ENTRIES
        assert len(os.listdir("/proc/self/fd")) == before


def test_keys_of_named_weights_have_their_tag(tmp_path: Path) -> None:
    write(tmp_path / "a.kv", PROMPT, weights="step 1")
    with attached(tmp_path) as (tier, _):
        assert not any(tier.contains(keys_of(PROMPT)))
        assert got(tier, [tag_of("step 1") + key for key in keys_of(PROMPT)]) == [DONE] * 12


def test_another_layout_is_refused_and_a_folder_that_is_missing(tmp_path: Path) -> None:
    pool, folder = aligned(ENTRIES, RAW.slot_bytes), tmp_path / "later"
    tier = SessionFolder(folder, layout=RAW, **GIVEN)
    for layout in (None, bytes(16), LAYOUTS["coded"].fingerprint):
        with pytest.raises(LayoutError, match="layout"):
            tier.attach([pool], layout)
    with pytest.raises(FileNotFoundError):
        tier.attach([pool], RAW.fingerprint)
    folder.mkdir()
    with attached(folder, tier=tier):
        assert tier.num_records() == 0


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"layout": None}, TypeError, "layout must be"),
        ({"layout": KVLayout([RAW.groups[0].planes])}, LayoutError, "None"),
        ({"salt": None}, TypeError, "salt must be"),
        ({"extra": ""}, TypeError, "extra must be"),
        ({"identity": {}}, ValueError, "identity must be"),
        ({"identity": "m"}, ValueError, "identity must be"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(tmp_path: Path, wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SessionFolder(tmp_path, **{"layout": layout_of(), **GIVEN, **wrong})
