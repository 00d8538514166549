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
NAMES, TOGETHER = sorted(SCENARIOS), 12
FAMILIES = [tuple(NAMES[first : first + TOGETHER]) for first in range(0, len(NAMES), TOGETHER)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda names: names[0])
def test_an_exception_anywhere_leaves_the_truth(family: tuple[str, ...], seed: int) -> None:
    modes = (*MODES, *random.Random(seed).sample(NESTED_MODES, SAMPLE))
    tallies = work_off(units_of(family, modes=modes, sample=SAMPLE, seed=seed))
    print(table(tallies))
    assert sum(tally.tried for tally in tallies.values()) >= len(tallies)
    wrong = [example for tally in tallies.values() for example in tally.examples]
    assert not wrong, f"{len(wrong)} tries, with seed {seed}:\n" + "\n".join(wrong[:20])
