"""An exception at any point of any public call, or another call there, leaves no key visible without its bytes, and
everything usable.

This samples the points; `python tests/interrupts/exhaust_interrupts.py` tries all of them.
"""

from __future__ import annotations

import os
import random

import pytest
from exhaust_interrupts import table, units_of, work_off
from scenarios import SCENARIOS
from trials import MODES, NESTED_MODES

pytestmark = pytest.mark.long

SAMPLE = int(os.environ.get("KVOFFLOAD_INTERRUPT_SAMPLE", "1"))  # points of each scenario, policy and mode
FAMILIES = (
    ("engine.store", "engine.load"),
    (
        "engine.plan",
        "engine.poll",
        "engine.drain",
        "engine.advance",
        "engine.statistics",
        "engine.close",
        "engine.open",
    ),
    ("job", "device", "layout"),
    ("index",),
    ("cache.store",),
    ("cache.l", "cache.job", "cache.open", "cache.touch", "cache.statistics", "cache.status_of"),
    ("cache.re", "cache.a", "cache.clear", "cache.sessions"),
    ("cache.engine", "cache.device"),
    ("cache.fetch", "cache.keep"),
    ("open_cache", "sharded.open_cache"),
    ("sharded.engine.store", "sharded.engine.load"),
    ("sharded.engine.p", "sharded.engine.d", "sharded.engine.a", "sharded.engine.statistics", "sharded.engine.close"),
    ("sharded.engine.open", "sharded.job", "sharded.device", "sharded.cache"),
    ("tiers",),
    ("pool",),
)


def test_every_scenario_is_in_a_family() -> None:
    named = [name for family in FAMILIES for name in SCENARIOS if name.startswith(family)]
    assert sorted(named) == sorted(SCENARIOS)


@pytest.mark.parametrize("family", FAMILIES, ids=" ".join)
def test_an_exception_anywhere_leaves_the_truth(family: tuple[str, ...], seed: int) -> None:
    modes = (*MODES, *random.Random(seed).sample(NESTED_MODES, SAMPLE))
    tallies = work_off(units_of(family, modes=modes, sample=SAMPLE, seed=seed))
    print(table(tallies))
    assert sum(tally.tried for tally in tallies.values()) >= len(tallies)
    wrong = [example for tally in tallies.values() for example in tally.examples]
    assert not wrong, f"{len(wrong)} tries, with seed {seed}:\n" + "\n".join(wrong[:20])
