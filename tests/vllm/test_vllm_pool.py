"""Two replicas over one shared pool, each under vLLM's scheduler and connector, on simulated GPUs: what is read is
compared. KVOFFLOAD_VLLM_RUNS and KVOFFLOAD_TEST_SEED: see test_vllm_runs.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm_environment import need_vllm

need_vllm()

from seeds import seeds  # noqa: E402
from tiering import until  # noqa: E402
from vllm_worker import GroupShape, Shape  # noqa: E402
from vllm_world import Setting, World  # noqa: E402

from kvoffload import CapabilityError  # noqa: E402
from kvoffload.pool import PoolOwner, SharedPool  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

RUNS = int(os.environ.get("KVOFFLOAD_VLLM_RUNS", "1"))
ONE = Shape((GroupShape(3),), num_blocks=60)
WINDOW = Shape((GroupShape(3), GroupShape(2, window=16)), num_blocks=100)
NBYTES = 1 << 20  # of the pool
SETTINGS = {
    "one group": Setting(ONE, chunks=200, reset=0),
    "a window, two blocks a chunk": Setting(WINDOW, chunks=100, blocks_per_chunk=2, reset=0),
    "two workers, asynchronous": Setting(ONE, chunks=100, workers=2, asynchronous=True, reset=0),
    "few rows": Setting(ONE, chunks=24, reset=0),
    "resets": Setting(ONE, chunks=200, reset=0.05, asynchronous=True),
    "failures, a window": Setting(WINDOW, chunks=200, fail=0.2, reset=0),
}
OWNER = "import sys; from kvoffload.pool import PoolOwner; PoolOwner(sys.argv[1], nbytes=int(sys.argv[2])); print()\nwhile 1: sys.stdin.read(1) or sys.exit()"  # noqa: E501


def over(setting: Setting, path: str) -> Setting:
    return replace(setting, extra=(*setting.extra, ("kvoffload_pool", path)))


@contextmanager
def owner_process(path: str) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-c", OWNER, path, str(NBYTES)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def run_both(a: World, b: World, chance: random.Random, turns: int | None = None) -> Any:
    """Turns of both in random order, until both have ended, or so many."""
    waiting = {a: a.prompts(), b: []}
    waiting[b] = random.Random(0).sample(waiting[a], len(waiting[a]))
    return take_turns(waiting, chance, turns)


def take_turns(waiting: Any, chance: random.Random, turns: int | None = None) -> Any:
    taken = 0
    while any(left or world.busy for world, left in waiting.items()) and taken != turns:
        world = chance.choice([world for world, left in waiting.items() if left or world.busy])
        world.turn(waiting[world])
        taken += 1
    return waiting


def counts(*worlds: World) -> Counter[str]:
    for world in worlds:
        for worker in world.workers:
            worker.synchronize()
            assert not worker.wrong, worker.wrong[:4]
    until(lambda: (now := worlds[0].manager.index.statistics()).pending == now.pinned == 0)
    for world in worlds:
        world.check()
    return sum((world.counts for world in worlds), Counter[str]())


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_models_read_is_what_they_have_written(name: str, tmp_path: Path) -> None:
    for number, seed in enumerate(seeds(RUNS)):
        path, chance = str(tmp_path / "pool"), random.Random(seed)
        setting = over(SETTINGS[name], path)
        with (
            PoolOwner(path, nbytes=NBYTES),
            World(setting, number, tmp_path) as a,
            World(setting, number, tmp_path) as b,
        ):
            run_both(a, b, chance)
            total = counts(a, b)
        print(name, seed, total)
        assert total["compared blocks"] > 600
        assert total["stored blocks"] > 0
        assert total["loaded blocks"] > 0
        if setting.fail:
            assert total["failed loads"] + total["failed stores"] > 0


def test_a_replica_loads_what_the_other_has_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask = Counter[str](), SharedPool.ask

    def counted(pool: SharedPool, operation: Any, *rest: Any, **options: Any) -> bytes | None:
        asked[operation.name] += 1
        return ask(pool, operation, *rest, **options)

    path = str(tmp_path / "pool")
    setting = over(replace(SETTINGS["one group"], abort=0), path)
    with PoolOwner(path, nbytes=NBYTES), World(setting, 0, tmp_path) as a, World(setting, 0, tmp_path) as b:
        prompt = max(a.prompts(), key=len)
        a.add(prompt)
        while a.busy:
            a.step()
        b.add(prompt)
        monkeypatch.setattr(SharedPool, "ask", counted)
        b.manager.index  # noqa: B018  # joins
        b.step()
        chunks = len(prompt) // ONE.block_size
        print(len(prompt), asked, b.counts)
        assert b.counts["loaded blocks"] >= chunks - 1 > 20
        assert b.counts["stored blocks"] == 0
        assert asked["TAKE"] == 1, "of all the lookups of a request, and of its load"
        assert asked.total() <= 2, asked
        while b.busy:
            b.step()
        counts(a, b)


@pytest.mark.parametrize("follows", [False, True], ids=["no owner follows", "an owner follows"])
def test_the_owner_is_killed_in_the_middle(follows: bool, tmp_path: Path) -> None:
    for number, seed in enumerate(seeds(RUNS)):
        path, chance = str(tmp_path / f"pool{number}"), random.Random(seed)
        setting = over(replace(SETTINGS["one group"], requests=20), path)
        with owner_process(path) as owner, World(setting, number, tmp_path) as a, World(setting, number, tmp_path) as b:
            waiting = run_both(a, b, chance, turns=chance.randrange(10, 60))
            owner.kill()
            owner.wait()
            stored = a.counts["stored blocks"] + b.counts["stored blocks"]
            waiting = take_turns(waiting, chance, turns=10)
            if not follows:
                take_turns(waiting, chance)
                assert a.counts["stored blocks"] + b.counts["stored blocks"] == stored
                print(seed, counts(a, b))
                continue
            with owner_process(path):
                take_turns(waiting, chance, turns=5)
                until(lambda: a.manager.index.statistics().resident > 0)  # the keys that the memory has
                until(lambda: b.manager.index.statistics().resident > 0)
                loaded = a.counts["loaded blocks"]
                take_turns({**waiting, a: [*waiting[a], *a.prompts()[:10]]}, chance)
                print(seed, counts(a, b))
                assert a.counts["loaded blocks"] > loaded


def test_what_is_refused_at_the_start(tmp_path: Path) -> None:
    path = str(tmp_path / "pool")
    pooled = over(SETTINGS["one group"], path)
    with (
        pytest.raises(CapabilityError, match="KVOffloadConnector"),
        World(replace(pooled, connector="OffloadingConnector"), 0, tmp_path),
    ):
        pass
