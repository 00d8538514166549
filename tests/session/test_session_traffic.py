"""Saves and restores beside traffic, over tiers, and in small caches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import SECONDS, SMALL, World, talk, values_of, world
from helpers import in_threads
from seeds import rest_long, seeds
from tier_classes import DictTier

from kvoffload import NO_WAIT, MissingKeyError
from kvoffload.session import session_file
from kvoffload.session.session_file import SessionFile
from kvoffload.session.whole_blocks import WholeBlocks
from kvoffload.tiers import DiskTier, MemoryTier

TOKENS = talk(0)
TALKS = [talk(number, 8, same=number % 3) for number in range(5)]
NAMES = ["", "one", "two"]


class Traffic:
    """Threads that use a cache until a time is over. Blocks are computed under a lock that says which weights there
    are, as a program would; saves and restores, removes and clears come at any time.
    """

    def __init__(self, each: World, folder: Path, seed: int, rounds: int) -> None:
        self.each, self.folder, self.seed, self.rounds = each, folder, seed, rounds
        self.model, self.weights, self.serving = threading.Lock(), "", 2
        self.done = {"saved": 0, "restored": 0, "loaded": 0}
        self.counting = threading.Lock()

    def count(self, name: str, number: int) -> None:
        with self.counting:
            self.done[name] += number

    def run(self) -> None:
        works = [self.serve, self.serve, self.save, self.save, self.restore, self.restore, self.disturb]
        in_threads(*(lambda work=work, at=at: self.repeat(work, at) for at, work in enumerate(works)))

    def repeat(self, work: Callable[[np.random.Generator, int], None], at: int) -> None:
        random, serves = np.random.default_rng([self.seed, at]), work == self.serve
        for _ in range(self.rounds if serves else 100 * self.rounds):
            if not self.serving:
                return
            work(random, at)
        if serves:
            with self.counting:
                self.serving -= 1

    def talk(self, random: np.random.Generator) -> Any:
        tokens = TALKS[int(random.integers(len(TALKS)))]
        return tokens[: 4 * int(random.integers(2, 9))]

    def serve(self, random: np.random.Generator, at: int) -> None:
        """Fetch a prompt into blocks of this thread's own, check the hits, compute the rest, keep all."""
        each, tokens = self.each, self.talk(random)
        mine = list(range(8 * at, 8 * at + len(tokens) // 4))
        with self.model:
            keys, values = each.keys(tokens), each.values(tokens, self.weights)[0]
            job = each.cache.fetch(keys, mine, after=NO_WAIT)
            try:
                job.wait(SECONDS)
                hits = job.hits
            except MissingKeyError:
                hits = 0
            image = each.arrays[0][0][0].buffer.to_numpy().reshape(each.blocks, -1)
            assert (image[mine[:hits]] == values[:hits].reshape(hits, 64)).all(), "a load gave wrong bytes"
            self.count("loaded", hits)
            for block, content in zip(mine[hits:], values[hits:], strict=True):
                self.put(block, content)
            each.cache.keep(keys, mine, after=NO_WAIT).wait(SECONDS)

    def put(self, block: int, content: Any) -> None:
        array, flat = self.each.arrays[0][0][0], np.ascontiguousarray(content).reshape(-1)
        with self.each.devices[0].current():
            driver = self.each.devices[0].driver
            driver.copy_to_device(array.address + block * flat.nbytes, flat.ctypes.data, flat.nbytes)

    def save(self, random: np.random.Generator, _: int) -> None:
        tokens, path = self.talk(random), self.folder / f"{random.integers(6)}"
        try:
            saved = self.each.save(path, tokens)
        except MissingKeyError:
            time.sleep(1e-3)
            return
        self.count("saved", saved)
        with SessionFile(path) as file:  # this one, or what the other thread has saved there since
            assert file.sealed
            blocks, good = file.read(0, file.whole)
            assert good == file.whole
            right = values_of(SMALL, file.tokens, file.contents.weights)[0]
            assert (blocks[0] == right).all(), "a file has wrong bytes"

    def restore(self, random: np.random.Generator, _: int) -> None:
        try:
            found = self.each.restore(self.folder / f"{random.integers(6)}")
        except (OSError, ValueError):  # none was saved yet, or for other weights
            time.sleep(1e-3)
        else:
            self.count("restored", found.tokens)

    def disturb(self, random: np.random.Generator, _: int) -> None:
        what = int(random.integers(4))
        if what == 0:
            self.each.cache.remove(self.each.keys(self.talk(random))[int(random.integers(2)) :])
        elif what == 1 and random.random() < 0.2:
            self.each.cache.clear()
        elif what == 2 and random.random() < 0.5:
            with self.model:
                self.weights = str(random.choice(NAMES))
                self.each.cache.use_weights(self.weights)
        time.sleep(0.002)

    def check(self) -> None:
        """All that is there in the end, for all weights."""
        each = self.each
        assert each.cache.drain(SECONDS)  # tiers hold what they write
        each.cache.engine.drain(SECONDS)
        for name in NAMES:
            each.cache.use_weights(name)
            for tokens in TALKS:
                keys, values = each.keys(tokens), each.values(tokens, name)[0]
                hits = each.cache.lookup(keys)
                with each.cache.acquire(keys[:hits]) as lease:
                    rows = each.slots[0][lease.slots(), : values[0].nbytes]
                assert (rows == values[:hits].reshape(hits, 64)).all(), "a slot has wrong bytes"


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("number", rest_long(seeds(12), 2))
def test_no_wrong_byte_beside_traffic(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_file, "SEGMENT_BYTES", 200)
    tiers = [DictTier()] if number % 2 else []
    with world(SMALL, seed=number, capacity=24, blocks=64, tiers=tiers, write="through") as each:
        traffic = Traffic(each, tmp_path, number, 100)
        traffic.run()
        traffic.check()
        assert each.held() == (0, 0, 0)
        assert not [one for one in tmp_path.iterdir() if one.suffix == ".part"]
        assert all(traffic.done.values()), traffic.done


@pytest.mark.parametrize("capacity", [1, 3, 4, 9, 16, 40])
def test_at_most_a_quarter_of_the_entries_is_held(
    capacity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, most = list[int](), max(1, capacity // 4)
    with world(SMALL, capacity=64, blocks=64) as source:
        source.store(talk(0, 48))
        source.save(tmp_path / "file", talk(0, 48))

    def watched(method: Any) -> Any:
        def call(whole: WholeBlocks, *given: Any) -> Any:
            time.sleep(1e-3)  # the other threads hold theirs
            table = target.cache._state.table
            seen.append(len(table.holds | dict.fromkeys(table.writable)))
            return method(whole, *given)

        return call

    monkeypatch.setattr(WholeBlocks, "gather", watched(WholeBlocks.gather))
    monkeypatch.setattr(WholeBlocks, "scatter", watched(WholeBlocks.scatter))
    with world(SMALL, capacity=capacity, blocks=64) as target:
        found = target.restore(tmp_path / "file")
        assert found.tokens == 4 * min(48, capacity)
        assert 0 < max(seen) <= most
        seen.clear()
        assert target.save(tmp_path / "new", talk(0, 48)) == found.tokens
        assert 0 < max(seen) <= most
        assert target.held() == (0, 0, 0)


@pytest.mark.parametrize("below", ["memory", "disk", "dict"])
def test_a_save_reads_tiers_and_a_restore_writes_them(below: str, tmp_path: Path) -> None:
    def tier() -> Any:
        if below == "memory":
            return MemoryTier(1 << 20)
        return DictTier() if below == "dict" else DiskTier(tmp_path / "disk", nbytes=1 << 20, identity="m")

    with world(SMALL, tiers=[tier()], write="through") as each:
        each.store(TOKENS)
        assert each.cache.drain(SECONDS)
        for kept in (0, 3, 8):  # keys in slots; the rest is in the tier alone
            each.cache.clear(below=False)
            if kept:
                each.store(TOKENS[: 4 * kept])
            assert each.save(tmp_path / "file", TOKENS) == 32
            assert each.held() == (0, 0, 0)
        each.cache.clear()
        assert each.cache.locate(each.keys(TOKENS)) == ["missing"] * 8
        assert each.restore(tmp_path / "file") == (32, 32, "")
        assert each.cache.drain(SECONDS)
        each.cache.clear(below=False)
        assert "missing" not in each.cache.locate(each.keys(TOKENS))
        assert each.cache.fetch(each.keys(TOKENS), range(8), after=NO_WAIT).result() is not None
        each.check_load(TOKENS[:16], range(4))


def test_a_conversation_larger_than_the_cache_is_saved_from_a_tier(tmp_path: Path) -> None:
    long = talk(0, 24)
    with world(SMALL, capacity=4, tiers=[DictTier()], write="through") as each:
        for begin in range(0, 24, 4):
            keys = each.keys(long)[begin : begin + 4]
            values = [value[begin : begin + 4] for value in each.values(long)]
            each.write(each.memory(range(4), values))
            each.cache.store(keys, range(4), after=NO_WAIT).wait(SECONDS)
            assert each.cache.drain(SECONDS)
        assert each.save(tmp_path / "file", long) == 96
    with world(SMALL, capacity=24) as target:
        assert target.restore(tmp_path / "file") == (96, 96, "")
        target.check_load(long, range(24))


def test_a_tier_that_has_lost_keys_gives_a_shorter_file(tmp_path: Path) -> None:
    tier = DictTier()
    with world(SMALL, tiers=[tier], write="through") as each:
        each.store(TOKENS)
        assert each.cache.drain(SECONDS)
        each.cache.clear(below=False)
        for key in [stored for stored in tier.store if stored in set(each.keys(TOKENS)[5:])]:
            del tier.store[key]
        assert each.save(tmp_path / "file", TOKENS) == 20
    with world(SMALL) as target:
        assert target.restore(tmp_path / "file") == (20, 20, "")
        target.check_load(TOKENS[:20], range(5))
