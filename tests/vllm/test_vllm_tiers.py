"""Tiers below the workers' slots, under vLLM's scheduler and connector, on simulated GPUs: what is read is compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm_environment import need_vllm

need_vllm()

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config  # noqa: E402
from vllm.v1.kv_offload.config import OffloadingConfig  # noqa: E402
from vllm_worker import GroupShape, Shape, WorkerSpec  # noqa: E402
from vllm_world import Setting, World  # noqa: E402

from kvoffload import CapabilityError, CapacityError, LayoutError  # noqa: E402
from kvoffload.vllm.identity import making_connector  # noqa: E402
from kvoffload.vllm.options import Options  # noqa: E402
from kvoffload.vllm.spec import TiersOfWorkers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

ONE = Shape((GroupShape(3),), num_blocks=60)
WINDOW = Shape((GroupShape(3), GroupShape(2, window=16)), num_blocks=100)
MEMORY: dict[str, Any] = {"kind": "memory", "nbytes": 1 << 24}


def with_tiers(*tiers: dict[str, Any], write: str = "through") -> tuple[tuple[str, Any], ...]:
    return (("kvoffload_tiers", list(tiers)), ("kvoffload_tier_write", write))


SETTINGS = {
    "memory": Setting(ONE, chunks=40, extra=with_tiers(MEMORY)),
    "admitted": Setting(ONE, chunks=40, extra=with_tiers(MEMORY, write="admitted")),
    "back": Setting(ONE, chunks=40, policy="lru", extra=with_tiers(MEMORY, write="back")),
    "a window": Setting(WINDOW, chunks=60, extra=with_tiers(MEMORY)),
    "two workers, asynchronous": Setting(ONE, chunks=40, workers=2, asynchronous=True, extra=with_tiers(MEMORY)),
    "resets": Setting(ONE, chunks=40, reset=0.02, requests=150, extra=with_tiers(MEMORY)),
    "failing transfers": Setting(ONE, chunks=40, fail=0.3, extra=with_tiers(MEMORY)),
}


def run(setting: Setting, seed: int, folder: Path) -> tuple[World, dict[str, int]]:
    with World(setting, seed, folder) as world:
        world.run()
        index = world.manager.index
        assert index.drain(30)
        world.check()
        [tier] = index.tier_statistics()
        counts = {**world.counts, "promoted": tier.promoted, "written": tier.written, "missing": tier.not_found}
    return world, counts


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_model_reads_is_what_it_has_written(name: str, tmp_path: Path) -> None:
    _, counts = run(SETTINGS[name], 0, tmp_path)
    print(name, counts)
    assert counts["compared blocks"] > 300
    assert counts["written"] > 0
    assert counts["promoted"] > 0


def disk(folder: Path) -> Setting:
    tier = {"kind": "disk", "path": str(folder / "records.{dp}"), "nbytes": 1 << 23}
    return Setting(ONE, chunks=40, reset=0, extra=with_tiers(tier))


def test_a_second_engine_finds_what_the_first_has_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    setting = disk(tmp_path)
    _, first = run(setting, 0, tmp_path)
    assert first["promoted"] > 0
    assert (tmp_path / "records.0").stat().st_mode & 0o777 == 0o600
    with World(replace(setting, extra=(*setting.extra, ("kvoffload_tier_write", "none"))), 0, tmp_path) as world:
        world.run()
        [tier] = world.manager.index.tier_statistics()
        assert tier.promoted > first["promoted"]
        assert tier.written == 0
    other = replace(setting, shape=replace(ONE, block_size=8))
    with World(other, 0, tmp_path) as world, pytest.raises(LayoutError, match="layout"):
        world.run()
    named = replace(setting, extra=(*setting.extra, ("kvoffload_tier_identity", "another model")))
    with World(named, 0, tmp_path) as world, pytest.raises(LayoutError, match="another model"):
        world.run()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))  # replaced in place
    with World(setting, 0, tmp_path) as world, pytest.raises(LayoutError, match="identity"):
        world.run()


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "vLLM's connector": ({"connector": "OffloadingConnector"}, CapabilityError, "KVOffloadConnector"),
    "no slots": ({"chunks": 0}, CapacityError, "cpu_bytes_to_use"),
    "no list": ({"extra": (("kvoffload_tiers", "disk"),)}, ValueError, "must be a list"),
    "no kind": ({"extra": with_tiers({"path": "x"})}, ValueError, r"kvoffload_tiers\[0\] must be an object"),
    "write": ({"extra": with_tiers(MEMORY, write="often")}, ValueError, "kvoffload_tier_write must be one of"),
    "seconds": ({"extra": (("kvoffload_promotion_seconds", 0),)}, ValueError, "must be a number above 0"),
    "identity": ({"extra": (("kvoffload_tier_identity", 7),)}, ValueError, "must be a string"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    changes, error, words = REFUSED[name]
    with pytest.raises(error, match=words), World(replace(SETTINGS["memory"], **changes), 0, tmp_path):
        pass


@pytest.mark.parametrize("tier", [{"kind": "tape"}, {"kind": "memory"}, {"kind": "memory", "nbytes": 1 << 24, "x": 1}])
def test_arguments_of_a_tier_that_are_wrong(tier: dict[str, Any], tmp_path: Path) -> None:
    setting = replace(SETTINGS["memory"], extra=with_tiers(tier))
    with World(setting, 0, tmp_path) as world, pytest.raises(ValueError, match=r"kvoffload_tiers\[0\]"):
        world.run()


def test_tiers_of_a_model_whose_weights_are_not_found_need_an_identity(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    [(_, [tier]), *_] = disk(tmp_path).extra
    named = with_tiers({**tier, "identity": "a model"})
    with World(replace(disk(tmp_path), extra=named), 0, tmp_path) as world:
        (tmp_path / "model.safetensors").unlink()
        assert world.manager.index is not None
    (tmp_path / "records.0").unlink()
    with World(disk(tmp_path), 0, tmp_path) as world:
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(CapabilityError, match="Set kvoffload_tier_identity"):
            world.run()


def config_of(world: World) -> OffloadingConfig:
    scheduler = world.scheduler
    return build_offloading_config(scheduler.vllm_config, scheduler.kv_cache_config)


def test_workers_on_another_machine(tmp_path: Path) -> None:
    with World(SETTINGS["memory"], 0, tmp_path) as world:
        config = config_of(world)
        far = replace(config, parallel=replace(config.parallel, world_size=2))
        with making_connector(world.scheduler.vllm_config, world.scheduler.kv_cache_config):
            tiers = TiersOfWorkers(far, Options.read(config.extra_config), 4, wait=0.05)
        assert not tiers.workers_are_there()
        with pytest.raises(CapabilityError, match="worker 1 has offered no memory"):
            tiers.open(None)


def test_errors_of_tiers_come_at_the_start_if_the_workers_are_there(tmp_path: Path) -> None:
    with World(SETTINGS["memory"], 0, tmp_path) as world:
        config = config_of(world)
        with making_connector(world.scheduler.vllm_config, world.scheduler.kv_cache_config):
            manager = WorkerSpec(config).get_manager()
            wrong = replace(config, extra_config={**config.extra_config, "kvoffload_tiers": [{"kind": "tape"}]})
            with pytest.raises(ValueError, match="tape"):
                WorkerSpec(wrong).get_manager()
        manager.shutdown()
