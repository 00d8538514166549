"""Scenarios of a cache with a tier; see `interrupt_scenarios`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interrupt_scenarios import Call, scenario
from interrupt_world import SECONDS, TieredWorld, keys

from kvoffload import NO_WAIT


def _promoted(world: TieredWorld) -> Any:
    """A promotion of keys that are in the tier alone."""
    world.full.clear(below=False)
    promotion = world.full.promote(keys([0, 1]))
    world.kept.append(promotion)
    return promotion


def _of_promotion(use: Callable[[Any], object]) -> Callable[[TieredWorld], Call]:
    def prepare(world: TieredWorld) -> Call:
        promotion = _promoted(world)
        promotion.wait(SECONDS)
        return lambda: use(promotion)

    return prepare


@scenario("tiers.promote", TieredWorld)
def _promote(world: TieredWorld) -> Call:
    world.full.clear(below=False)
    return lambda: world.kept.append(world.full.promote(keys([0, 1])))


@scenario("tiers.promote.present", TieredWorld)
def _promote_present(world: TieredWorld) -> Call:
    return lambda: world.kept.append(world.full.promote(keys([0, 1])))


@scenario("tiers.promotion.wait", TieredWorld)
def _wait(world: TieredWorld) -> Call:
    promotion = _promoted(world)
    return lambda: promotion.wait(SECONDS)


scenario("tiers.promotion.load", TieredWorld)(
    _of_promotion(lambda promotion: promotion.load([40, 41], after=NO_WAIT).wait(SECONDS))
)
scenario("tiers.promotion.release", TieredWorld)(_of_promotion(lambda promotion: promotion.release()))


@scenario("tiers.store", TieredWorld)
def _store(world: TieredWorld) -> Call:
    return lambda: world.store(4, 5).wait(SECONDS)


@scenario("tiers.remove", TieredWorld)
def _remove(world: TieredWorld) -> Call:
    return lambda: world.full.remove(keys([1, 9]))


@scenario("tiers.locate", TieredWorld)
def _locate(world: TieredWorld) -> Call:
    return lambda: (world.full.locate(keys(range(6))), world.full.tier_statistics())


@scenario("tiers.drain", TieredWorld)
def _drain(world: TieredWorld) -> Call:
    world.store(4).wait(SECONDS)
    return lambda: world.full.drain(SECONDS)


@scenario("tiers.engine.poll", TieredWorld)
def _poll(world: TieredWorld) -> Call:
    world.store(4)
    return world.busy.poll
